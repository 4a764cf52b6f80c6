"""`eyas report`: the report of what is finished, while the rest still runs or after a run that failed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from eyas.cli import add_configfile, add_directory, enter, run_of
from eyas.report.words import number

RESULTS = Path("results")
PAGE = RESULTS / "summary" / "partial.html"
NEEDED = "prompts.jsonl.zst prompts.json responses.jsonl.zst outcomes.jsonl.zst timing.parquet servers.json verdicts.parquet stats.json train.parquet"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("report", help="write a partial report, of the datasets that are finished")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"the page, default {PAGE} of the run",
    )
    add_configfile(parser)
    add_directory(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from eyas.digest import code_digests
    from eyas.summary import summarise_part

    out = arguments.out.absolute() if arguments.out else PAGE
    enter(arguments)
    _, stages = run_of(arguments, check_files=False)
    names = sorted(stages.config.datasets)
    finished = [name for name in names if all((RESULTS / name / file).is_file() for file in NEEDED.split())]
    unfinished = {name: state(name) for name in names if name not in finished}
    servers: dict[str, Any] = {}
    for name in finished:
        servers |= json.loads((RESULTS / name / "servers.json").read_bytes())
    out.parent.mkdir(parents=True, exist_ok=True)
    summarise_part(
        stages.summary(),
        RESULTS,
        Path("logs/benchmarks"),
        servers,
        json.loads(code_digests(stages)),
        unfinished,
        out,
    )
    print(f"{out}: {len(finished)} of {len(names)} datasets")
    for name, told in unfinished.items():
        print(f"    not in it: {name} ({told})")


def state(dataset: str) -> str:
    """How far an unfinished dataset is, by its status file."""
    import time

    from eyas.cli.status import look

    for progress, shown in look(Path("logs/generate"), time.time()):
        if progress.dataset == dataset:
            return f"{shown}, {number(progress.done)} of {number(progress.planned)} answered"
    return "not started"
