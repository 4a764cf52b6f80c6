"""The operations that benchmarks measure, on a folder of synthetic data; as a program, one of them in a fresh process.

`python operations.py OPERATION FOLDER ROWS` with an operation of OPERATIONS. Each reads what an earlier one wrote.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import synthetic

from eyas.config import ExportSettings, MixSettings, StatsSettings
from eyas.journal import Journal, JournalWriter
from eyas.plugins import registry
from eyas.recordfile import write_records


class Folder:
    """Where the files of `rows` synthetic responses are, in the order in which they come to be."""

    def __init__(self, path: Path, rows: int) -> None:
        self.path, self.rows = path, rows
        self.prompts = path / "prompts.jsonl.zst"
        self.journal = path / "journal"
        self.responses = path / "responses.jsonl.zst"
        self.verdicts = path / "verdicts.parquet"
        self.train = path / "train.parquet"
        self.stats = path / "stats.json"
        self.mixed = path / "mixed" / "train.parquet"
        self.exported = path / "exported.jsonl.zst"

    def prepare(self, operation: str) -> None:
        """Runs what comes before `operation`, unless it has already run."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.prompts.exists():
            write_records(self.prompts, synthetic.prompts(self.rows))
        outputs = (
            self.journal,
            self.responses,
            self.verdicts,
            self.train,
            self.stats,
            self.mixed,
            self.exported,
        )
        for (name, run), output in zip(OPERATIONS.items(), outputs, strict=True):
            if name == operation:
                return
            if not output.exists():
                run(self)


def append(folder: Folder) -> None:
    """Journals all entries."""
    shutil.rmtree(folder.journal, ignore_errors=True)
    with JournalWriter(folder.journal) as writer:
        for entry in synthetic.entries(folder.rows):
            writer.append(entry)


def finalise(folder: Folder) -> None:
    from eyas.generate import Paths, finalise
    from eyas.progress import Progress
    from eyas.units import Accepts, Plan

    paths = Paths(
        prompts=folder.prompts,
        journal=folder.journal,
        responses=folder.responses,
        outcomes=folder.path / "outcomes.jsonl.zst",
        timing=folder.path / "timing.parquet",
        servers=folder.path / "servers.json",
        progress=folder.path / "status.json",
        audit=folder.path / "audit.jsonl",
    )
    plan = Plan(synthetic.GENERATE, folder.prompts, registry())
    progress = Progress(
        dataset=synthetic.DATASET, state="finishing", planned=plan.planned, budget_tokens=None, pid=0, host=""
    )
    with Journal(folder.journal) as journal:
        finalise(plan, journal, paths, Accepts(synthetic.GENERATE, registry()), progress)


def validate(folder: Folder) -> None:
    from eyas.validate import validate

    assert validate(synthetic.VALIDATE, folder.responses, folder.verdicts, registry()) == folder.rows


def train(folder: Folder) -> None:
    from eyas.train import train

    rows = train(synthetic.TRAIN, folder.prompts, folder.responses, folder.verdicts, folder.train)
    assert rows >= 0.9 * folder.rows - 1


def stats(folder: Folder) -> None:
    from eyas.prompts import KeysDigest, PromptsReport
    from eyas.stats import stats

    report = PromptsReport(
        dataset=synthetic.DATASET,
        asked=None,
        rows_read=folder.rows,
        used=folder.rows,
        turns=folder.rows,
        keys=KeysDigest(map(synthetic.key, range(folder.rows))).hex(),
        not_taken=0,
        skipped={},
        files=[],
        evaluation=[],
    )
    prompts, outcomes = folder.path / "prompts.json", folder.path / "outcomes.jsonl.zst"
    prompts.write_bytes(msgspec.json.encode(report))
    settings = StatsSettings(dataset=synthetic.DATASET, samples=1)
    stats(settings, prompts, outcomes, folder.verdicts, folder.train, folder.stats)


def mix(folder: Folder) -> None:
    from eyas.mix import mix

    settings = MixSettings(datasets=[synthetic.DATASET], weights=None, eval_share=0.01, seed=0)
    folder.mixed.parent.mkdir(exist_ok=True)
    evaluation, report = folder.mixed.with_name("eval.parquet"), folder.mixed.with_name("mix.json")
    mix(settings, [folder.train], folder.mixed, evaluation, report)


def export(folder: Folder) -> None:
    from eyas.export import export

    export(ExportSettings(exporter="tokens", options={}), folder.mixed, folder.exported, registry())


OPERATIONS: dict[str, Callable[[Folder], None]] = {
    operation.__name__: operation for operation in (append, finalise, validate, train, stats, mix, export)
}


if __name__ == "__main__":
    OPERATIONS[sys.argv[1]](Folder(Path(sys.argv[2]), int(sys.argv[3])))
