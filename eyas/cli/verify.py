"""`eyas verify`: whether the results are what the journal gives."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from eyas.cli import ROOT, add_configfile, run_of
from eyas.errors import EyasError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify", help="rebuild every file from the journal in a temporary folder, and say which differ"
    )
    parser.add_argument(
        "--cores", type=int, default=os.cpu_count(), help="jobs at a time; default: all cores"
    )
    add_configfile(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from eyas.verify import verify

    raw, stages = run_of(arguments)
    found = verify(raw, stages, Path("results"), ROOT, arguments.cores)
    for line in found.notes:
        print(f"note: {line}")
    for line in found.differences:
        print(line)
    if found.differences:
        raise EyasError(
            f"{len(found.differences)} difference{'s' * (len(found.differences) > 1)} above. A file that differs: delete it "
            f"and run `snakemake`, which rebuilds it. A damaged journal: restore it from a backup"
        )
    print(f"{found.files} files are what the journal gives, byte by byte")
