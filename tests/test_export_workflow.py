"""Exports of conversations that go on, in the real workflow: what was asked is what trainers are told, and nothing more runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import make_model
from pipeline import Run
from test_sglang import serving

from eyas.exporters.reports import ExportReport, read_report
from eyas.recordfile import read_records
from eyas.records import TrainRow
from eyas.tables import read_table

pytestmark = pytest.mark.workflow
EXPORTS: dict[str, dict[str, Any]] = {
    "torchspec": {},
    "modelopt": {},
    "sharegpt": {"allow_lossy": True},
    "tokens": {},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A finished run of `once`, and of `talks`, where all turns are answered."""
    made = Run(tmp_path_factory.mktemp("talks"), {"once": 6})
    turns = [f"Question {n}: why?" for n in range(3)]
    rows = [
        {
            "messages": [
                {"role": role, "content": f"{text} (talk {n})"}
                for text in turns
                for role in ("user", "assistant")
            ]
        }
        for n in range(12)
    ]
    (made.folder / "data/talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made.config["datasets"]["talks"] = {
        "source": {"name": "chat"},
        "files": ["data/talks.jsonl"],
        "turns": "all",
    }
    model = make_model(made.folder / "byte-reasoner")
    made.config["model"] = {
        "id": "org/byte-reasoner",
        "tokenizer": model.name,
        "kv_dtype": "bf16",
        "context": 4096,
        "tools": "system",
        "reasoning": {"name": "tags", "opened_by_prompt": True, "single_token": True},
    }
    made.config |= {"plugins": [], "exports": EXPORTS}
    with serving(model, "--context", "4096") as url:
        made.config["server"] = {"engine": {"name": "sglang"}, "url": url, "concurrency": 16}
        made.save()
        made.snakemake()
    yield made


def out(run: Run, exporter: str) -> Path:
    name = {"tokens": "train.jsonl.zst", "modelopt": "train"}.get(exporter, "train.jsonl")
    return run.folder / "results/train/exports" / exporter / name


def report(run: Run, exporter: str) -> ExportReport:
    return read_report(out(run, exporter))


def test_every_row_of_every_turn_is_exported_and_becomes_its_own_ids(run: Run) -> None:
    rows = list(read_table(run.folder / "results/train/train.parquet", TrainRow))
    later = [row.id for row in rows if row.id.split(":")[1] != "0"]
    assert len(later) > 5 and any(row.metadata.dataset == "once" for row in rows)
    assert len(list(read_records(out(run, "tokens"), TrainRow))) == len(rows)
    for exporter in EXPORTS:
        told = report(run, exporter)
        assert (told.rows, told.later_turns, told.left_out) == (len(rows), len(later), {}), exporter
        if exporter != "sharegpt":
            assert (told.same_ids_share, told.reasoning_share, told.differ_for) == (1, 1, {}), exporter
    written = [json.loads(line) for line in out(run, "torchspec").read_text().splitlines()]
    earlier = {row["id"]: row["conversations"] for row in written}
    first = next(row for row in rows if row.id.endswith(":0:0") and row.id.replace(":0:0", ":1:0") in later)
    answers = {row["id"]: row["conversations"][-1]["content"] for row in written}
    following = earlier[first.id.replace(":0:0", ":1:0")]
    # The target's own answer and not the recorded one.
    assert following[1]["content"] == answers[first.id].partition("</think>")[2].strip()


def test_the_summary_warns_of_a_trainer_that_learns_earlier_answers(run: Run) -> None:
    text = (run.folder / "results/summary/summary.md").read_text()
    later = report(run, "sharegpt").later_turns
    assert (
        f"train/exports/sharegpt/train.jsonl: the trainer learns every answer of a conversation, and in {later} rows earlier "
        "ones without their reasoning"
    ) in text
    assert "train/exports/torchspec/train.jsonl: the trainer learns" not in text


def test_responses_are_read_where_conversations_go_on_and_only_there(run: Run) -> None:
    assert not run.jobs()
    target = str(out(run, "torchspec").relative_to(run.folder))
    told = run.snakemake("--dry-run", "--printshellcmds", "--forcerun", "export", "--", target)
    (command,) = (line for line in (told.stdout + told.stderr).splitlines() if "/scripts/export.py" in line)
    assert " --responses results/talks/responses.jsonl.zst " in command
    assert " --prompts results/once/prompts.jsonl.zst results/talks/prompts.jsonl.zst " in command
    tokens = str(out(run, "tokens").relative_to(run.folder))
    told = run.snakemake("--dry-run", "--printshellcmds", "--forcerun", "export", "--", tokens)
    assert "responses.jsonl.zst" not in told.stdout + told.stderr
