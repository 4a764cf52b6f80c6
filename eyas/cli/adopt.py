"""`eyas adopt`: finished answers from elsewhere, so that only the rest is asked."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from eyas.cli import add_configfile, add_directory, again, enter, run_of
from eyas.errors import EyasError
from eyas.report.words import commonest, number


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "adopt",
        help="take finished answers with ids and settings into the journal; refuse all others, with reasons",
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JSON lines, or responses.jsonl.zst of another run",
    )
    parser.add_argument(
        "--dataset", help="whose answers they are; may be left out if the config has only one"
    )
    add_configfile(parser)
    add_directory(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from eyas.adopt import adopt

    enter(arguments, "files")
    _, stages = run_of(arguments)
    datasets = list(stages.config.datasets)
    name = arguments.dataset or (datasets[0] if len(datasets) == 1 else None)
    if name not in datasets:
        raise EyasError(
            f"--dataset: {'no dataset ' + repr(name) if name else 'say which dataset'}; known: {', '.join(datasets)}"
        )
    prompts = Path("results", name, "prompts.jsonl.zst")
    if not prompts.is_file():
        raise EyasError(
            f"{prompts}: missing; run `{again(arguments, str(prompts))}` first, so that answers find their prompts"
        )
    adopted = 0
    for file in arguments.files:
        result = adopt(
            stages.generate(name),
            stages.access(name),
            prompts,
            Path(stages.config.journal, name),
            file,
            stages.registry,
        )
        print(
            f"{file}: {number(result.answers)} of {number(result.records)} answers adopted, {number(result.tokens)} output tokens"
        )
        for reason, count in commonest(result.refused):
            print(f"    {number(count)} × {reason}")
        adopted += result.answers
    if adopted:
        print(f"Run snakemake: it asks only for the rest of {name}.")
