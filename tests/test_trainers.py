"""The trainers' own code reads the exports: SpecForge, NVIDIA's Model-Optimizer, and `datasets` and torch for speculators."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import zstandard
from exported import Made, add_talks, qwen3
from real_tokenizers import folder as real

ROOT = Path(__file__).parent.parent
PYTHON, TRAINERS = ROOT / ".venv-sglang/bin/python", ROOT / ".trainers"
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        not (PYTHON.exists() and (TRAINERS / "installed").exists()),
        reason="no trainers in .trainers (make trainers)",
    ),
]
Rows = list[list[list[int]]]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Path]:
    top = tmp_path_factory.mktemp("trainers")
    made = add_talks(qwen3(top, real("qwen3")))
    paths = {
        name: str(made.export(name)[0]) for name in ("speculators", "specforge", "specforge_text", "modelopt")
    }
    packed = made.export("tokens")[0]
    with packed.open("rb") as file, (top / "tokens.jsonl").open("wb") as plain:
        stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        plain.write(stream.read())
    paths["tokens"] = str(top / "tokens.jsonl")
    told: dict[str, Any] = {"paths": paths, "tokenizer": str(real("qwen3").resolve())}
    (top / "exports.json").write_text(json.dumps(told))
    return made, top


def read(reader: str, top: Path) -> Rows:
    environment = {**os.environ, "PYTHONPATH": str(TRAINERS), "HOME": str(top)}
    command = [str(PYTHON), str(ROOT / "tests/trainers_read.py"), str(top / "exports.json"), reader]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: Rows = json.loads(done.stdout.splitlines()[-1])
    return rows


@pytest.mark.parametrize("reader", ["SpecForge tokens", "SpecForge text", "speculators folder"])
def test_token_formats_arrive_as_exactly_our_ids_and_mask(exports: tuple[Made, Path], reader: str) -> None:
    made, top = exports
    own = sorted([row.input_ids, row.loss_mask] for row in made.rows)
    assert sorted(read(reader, top)) == own


def test_specforge_renders_our_ids_where_it_adds_no_system_message(exports: tuple[Made, Path]) -> None:
    made, top = exports
    seen = read("SpecForge conversations", top)
    same = [
        (ids, mask)
        for row in made.rows
        for ids, mask in seen
        # The template writes a line end behind the end token; SpecForge learns that too.
        if ids[:-1] == row.input_ids and mask == [*row.loss_mask, 1]
    ]
    report = made.export("specforge")[1]
    # Each turn of `call`, which has tools, calls and results, and two rows of one turn.
    assert (len(seen), len(same)) == (report.rows, report.same_ids) == (11, 5)


@pytest.mark.parametrize("way", ["online", "streaming"])
def test_model_optimizer_renders_our_ids_and_learns_the_answer_without_its_end(
    exports: tuple[Made, Path], way: str
) -> None:
    made, top = exports
    own = []
    for row in made.rows:
        if row.metadata.finish == "stop":
            own.append([row.input_ids, [*row.loss_mask[:-1], 0]])
        elif row.id.startswith("d/late"):
            own.append([[*row.input_ids, *made.target.encode("<|im_end|>")], [*row.loss_mask, 0]])
    seen = read(f"Model-Optimizer, {way}", top)
    assert sorted(seen) == sorted(own) and len(seen) == made.export("modelopt")[1].rows == 12
