"""CPU time of each exporter, writing and proof, as a ratio to what any check of text costs: the bare library encoding each row once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from exported import Made, qwen3_model, system, user
from real_tokenizers import folder
from tokenizers import Tokenizer

from eyas.config import ExportSettings
from eyas.export import export
from eyas.plugins import Told, registry
from eyas.recordfile import write_records
from eyas.records import Turn
from eyas.tables import write_table
from eyas.train import SCHEMA

EXPORTERS = {found.cls.name: found.cls for found in registry().all() if found.kind == "exporter"}
WORDS = ["the", "of", "rain", "light", "blue", "sky", "because", "scatters", "more", "than", "red", "waves"]
TURNS = 3  # of every second conversation; the others end with their first answer
QUESTION, THOUGHT, ANSWER = 100, 200, 150  # words, about as many tokens


@dataclass(frozen=True)
class Rows:
    """Training rows on disk, half of whose tokens are in conversations that go on, and their texts."""

    made: Made
    table: Path
    texts: list[str]

    def export(self, name: str) -> int:
        """Rows written by one exporter; all that can be are."""
        cls: Any = EXPORTERS[name]
        # What the model was not told, no trainer is to add.
        options = {"system_prompt": ""} if name == "specforge" else {}
        model = self.made.model if cls.takes is Told else None
        settings = ExportSettings(exporter=name, options=options, model=model)
        beside = [self.table.with_name(f"{what}.jsonl.zst") for what in ("prompts", "responses")]
        report = export(settings, self.table, self.table.with_name(name), registry(), beside[:1], beside[1:])
        assert report.same_ids == report.rows and report.reasoning_kept == report.reasoning_rows
        return report.rows + sum(left.rows for left in report.left_out.values())


@pytest.fixture(scope="module")
def made(rows: int, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    place = tmp_path_factory.mktemp("exports") / "d"
    made = Made(place, qwen3_model(folder("qwen3")))
    draw = random.Random(7)

    def said(count: int) -> str:
        return f"{draw.randrange(10**6)} {' '.join(draw.choices(WORDS, k=count))}."

    for n in range(max(1, rows // 200)):
        questions = [said(QUESTION) for _ in range(TURNS if n % 2 else 1)]
        answers = [said(ANSWER) for _ in questions]
        outputs = [f"<think>\n{said(THOUGHT)}\n</think>\n\n{answer}<|im_end|>" for answer in answers]
        turns = tuple(Turn(calls=[], messages=[user(question)]) for question in questions[1:])
        # As ShareGPT's format has none, half of the conversations have no system message.
        opening = [system("Be brief.")] if n % 4 < 2 else []
        asked = made.asked(made.add(f"k{n}", [*opening, user(questions[0])], outputs[0], turns=turns))
        for turn in range(1, len(questions)):
            asked += f"{answers[turn - 1]}<|im_end|>\n<|im_start|>user\n{questions[turn]}<|im_end|>\n<|im_start|>assistant\n"
            made.answer(f"k{n}", turn, asked, outputs[turn])
    table = place / "train.parquet"
    write_table(table, SCHEMA, draw.sample(made.rows, len(made.rows)))
    write_records(place / "prompts.jsonl.zst", made.prompts)
    write_records(place / "responses.jsonl.zst", made.responses)
    return Rows(made, table, [made.target.text(row.input_ids) for row in made.rows])


@pytest.mark.parametrize("name", EXPORTERS)
def test_exporters(name: str, made: Rows, benchmark: Any, tell: Callable[..., None]) -> None:
    library = Tokenizer.from_file(str(folder("qwen3") / "tokenizer.json"))

    def encode() -> float:
        """CPU seconds a row of the bare library."""
        started = time.process_time()
        for text in made.texts:
            library.encode(text, add_special_tokens=False)
        return (time.process_time() - started) / len(made.texts)

    before = encode()
    started = time.process_time()
    count = benchmark.pedantic(made.export, args=(name,), rounds=1)
    seconds = (time.process_time() - started) / count
    assert count == len(made.texts)
    tell(f"export {name}", ratio=(before + encode()) / 2 / seconds, rows_per_s=round(1 / seconds))
