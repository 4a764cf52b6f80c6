"""`eyas verify`: whether the results are what the journal gives."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from eyas.cli import ROOT, add_configfile, add_directory, again, enter, run_of
from eyas.errors import EyasError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify", help="rebuild every file from the journal in a temporary folder, and say which differ"
    )
    parser.add_argument(
        "--cores", type=int, default=os.cpu_count(), help="jobs at a time; default: all cores"
    )
    add_configfile(parser)
    add_directory(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from eyas.verify import MANIFEST, verify

    enter(arguments)
    raw, stages = run_of(arguments)
    _check_run(Path("results/summary/manifest.json"), set(stages.config.datasets))
    found = verify(raw, stages, Path("results"), ROOT, arguments.cores)
    for line in found.notes:
        print(f"note: {line}")
    for line in found.differences:
        print(line)
    if found.differences:
        count = f"{len(found.differences)} difference{'s' * (len(found.differences) > 1)} above"
        if any(line.startswith(f"{MANIFEST}: jobs") for line in found.differences):
            raise EyasError(
                f"{count}, and {MANIFEST} has other settings or other code in `jobs`: if these are the results of another "
                f"config, name it with --configfile and delete nothing. Else run `{again(arguments)}`, which rebuilds them"
            )
        raise EyasError(
            f"{count}. A file that differs: delete it and run `{again(arguments)}`, which rebuilds it. A damaged journal: "
            f"restore it from a backup"
        )
    print(f"{found.files} files are what the journal gives, byte by byte")


def _check_run(manifest: Path, datasets: set[str]) -> None:
    """Raises EyasError if the results are those of another config: everything would differ, and nothing be wrong.

    Also for a manifest that cannot be read.
    """
    if not manifest.is_file():
        return
    try:
        made = set(json.loads(manifest.read_bytes())["sources"])
    except (ValueError, KeyError, TypeError):
        raise EyasError(f"{manifest}: damaged; delete it and run `snakemake`, which rebuilds it") from None
    if made != datasets:
        raise EyasError(
            f"results/ holds a run with the datasets {', '.join(sorted(made))}, the config has {', '.join(sorted(datasets))}; "
            f"name that run's config with --configfile, or run snakemake with this one first"
        )
