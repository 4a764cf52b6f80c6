"""A million short answers, and 20,000 long ones, from source rows to the training table: CPU time and memory of each stage.

Every stage is the workflow's own program in a process of its own, and everything that it reads lies on disk. Answers are
synthetic: `generate` is somebody else's time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import synthetic
from conftest import FULL

from eyas.config import FilterConfig, PromptsSettings, StatsSettings
from eyas.prompts import CACHE_KIBIBYTES
from eyas.recordfile import Writer, read_records
from eyas.records import Outcome, Prompt, Response

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[1] / "scripts"
SECONDS = 600  # of CPU, for all stages of both shapes
MOST = 1.1  # of the memory that fewer rows take
SHAPES = {"short": (1_000_000, 50), "long": (20_000, 1_400)}  # rows, output tokens of each
# The fewer rows: enough to fill every buffer, of which the largest is a row group of 8,192 verdicts.
FEWER = {"short": 100_000, "long": 10_000}

PROMPTS = PromptsSettings(
    dataset=synthetic.DATASET,
    source={"name": "chat"},
    revision=None,
    rows=None,
    turns="first",
    filter=FilterConfig(),
    duplicates="keep",
    near_duplicates=None,
    decontaminate=None,
    evaluation_sets={},
    seed=0,
)


@dataclass(frozen=True)
class Cost:
    """What one stage took: s of CPU, s of wall time, bytes of resident memory at most."""

    cpu: float
    wall: float
    peak: int


def source_rows(path: Path, count: int, tokens: int) -> None:
    """Conversations of one question and its recorded answer, as JSON Lines."""
    answers = itertools.cycle(synthetic.pool(min(count, synthetic.POOL), tokens))
    with path.open("w") as file:
        for n, answer in zip(range(count), answers, strict=False):
            asked = {"role": "user", "content": f"{n}{answer.prompt}"}
            said = {"role": "assistant", "content": answer.text}
            file.write(json.dumps({"messages": [asked, said]}) + "\n")


def generate(folder: Path, count: int, tokens: int) -> None:
    """Responses to the prompts in `folder`, in their order, and outcomes, as the stage of that name leaves them."""
    answers = itertools.cycle(synthetic.pool(min(count, synthetic.POOL), tokens))
    prompts = read_records(folder / "prompts.jsonl.zst", Prompt)
    with (
        Writer[Response](folder / "responses.jsonl.zst") as responses,
        Writer[Outcome](folder / "outcomes.jsonl.zst") as outcomes,
    ):
        for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=False)):
            responses.write(
                Response(
                    key=prompt.key,
                    turn=0,
                    sample=0,
                    request=hashlib.sha256(prompt.key.encode()).hexdigest(),
                    prompt_ids=[n % synthetic.VOCABULARY, *answer.prompt_ids],
                    output_ids=answer.output_ids,
                    finish=answer.finish,
                    text=answer.text,
                    text_lengths=answer.text_lengths,
                    stop_ids=[synthetic.STOP],
                    added_tokens=synthetic.ADDED,
                    control_ids=[synthetic.STOP],
                    effective_max_new=synthetic.LIMIT,
                    constrained=False,
                )
            )
            outcomes.write(Outcome(key=prompt.key, turn=0, sample=0, status="answered"))


def commands(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The stages in their order, with their arguments."""
    rows, prompts, report, responses, outcomes, verdicts, train, stats = (
        str(folder / name)
        for name in (
            "rows.jsonl",
            "prompts.jsonl.zst",
            "prompts.json",
            "responses.jsonl.zst",
            "outcomes.jsonl.zst",
            "verdicts.parquet",
            "train.parquet",
            "stats.json",
        )
    )
    settings = {
        "prompts": PROMPTS,
        "validate": synthetic.VALIDATE,
        "train": synthetic.TRAIN,
        "stats": StatsSettings(dataset=synthetic.DATASET, samples=1),
    }
    arguments = {
        "prompts": [
            *("--plugins", "[]", "--files", json.dumps([rows]), "--names", "rows.jsonl"),
            *("--evaluation", "{}", "--out", prompts, "--report", report),
        ],
        "validate": ["--plugins", "[]", "--responses", responses, "--out", verdicts],
        "train": ["--prompts", prompts, "--responses", responses, "--verdicts", verdicts, "--out", train],
        "stats": [
            *("--prompts", report, "--outcomes", outcomes, "--verdicts", verdicts),
            *("--train", train, "--out", stats),
        ],
    }
    for stage, rest in arguments.items():
        told = ["--settings", msgspec.json.encode(settings[stage]).decode(), "--log", f"{folder / stage}.log"]
        yield stage, [str(SCRIPTS / f"{stage}.py"), *told, *rest]


def run(folder: Path, count: int, tokens: int) -> dict[str, Cost]:
    """The cost of each stage on `count` rows of `tokens` output tokens."""
    folder.mkdir()
    source_rows(folder / "rows.jsonl", count, tokens)
    costs = {}
    for stage, command in commands(folder):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, str(HERE / "peak.py"), sys.executable, *command],
            check=True,
            stdout=subprocess.PIPE,
        )
        wall = time.perf_counter() - started
        peak, cpu = done.stdout.split()
        costs[stage] = Cost(float(cpu), wall, int(peak))
        if stage == "prompts":
            generate(folder, count, tokens)
    told = json.loads((folder / "stats.json").read_bytes())
    assert told["accepted"]["rows"] + told["rejected"]["rows"] == count
    assert told["fit"]["rows"] > count / 2
    return costs


def scaled(count: int, rows: int) -> int:
    """Of `count` rows at full size, those at the size asked for; never none."""
    return max(1, count * rows // FULL)


@pytest.mark.parametrize("rows", [1, 49, FULL])
def test_no_shape_is_empty_at_any_size(rows: int) -> None:
    assert all(scaled(count, rows) >= 1 for count in FEWER.values())
    assert [scaled(count, FULL) for count, _ in SHAPES.values()] == [1_000_000, 20_000]


def test_a_million_short_and_twenty_thousand_long_answers_in_ten_minutes_and_flat_memory(
    rows: int, full: bool, tmp_path: Path, benchmark: Any, tell: Callable[..., None]
) -> None:
    def stages(counts: dict[str, int]) -> dict[tuple[str, str], Cost]:
        """The cost of every stage of each shape, at so many rows in a run of full size."""
        costs = {}
        for shape, count in counts.items():
            folder = tmp_path / f"{shape}-{count}"
            for stage, cost in run(folder, scaled(count, rows), SHAPES[shape][1]).items():
                costs[shape, stage] = cost
            shutil.rmtree(folder)
        return costs

    fewer = stages(FEWER)
    whole = benchmark.pedantic(stages, args=({shape: SHAPES[shape][0] for shape in SHAPES},), rounds=1)
    for (shape, stage), cost in whole.items():
        few = fewer[shape, stage].peak
        tell(
            f"{shape}: {stage}",
            rows_per_s=round(SHAPES[shape][0] * rows // FULL / cost.cpu),
            CPU_s=cost.cpu,
            wall_s=cost.wall,
            MB=round(cost.peak / 1e6),
            MB_at_fewer=round(few / 1e6),
            ratio=cost.peak / few,
        )
    cpu, wall = (sum(getattr(cost, name) for cost in whole.values()) for name in ("cpu", "wall"))
    tell("short and long", CPU_s=cpu, wall_s=wall)
    if full:
        assert cpu <= SECONDS
        for (shape, stage), cost in whole.items():
            # The long rows do not fill the sorter's page cache.
            cache = CACHE_KIBIBYTES * 1024 if stage == "prompts" else 0
            assert cost.peak <= MOST * fewer[shape, stage].peak + cache, (shape, stage)
