"""`eyas doctor`: the last look before a long run; ends GO or NO-GO."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

import yaml

import eyas
from eyas.errors import EyasError

MARKS = {"ok": "ok", "warning": "warning", "no-go": "NO-GO"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor", help="look at server, tokenizer, one answer per dataset, disk and limits before a long run"
    )
    parser.add_argument(
        "--configfile",
        type=Path,
        nargs="+",
        help="as for snakemake; default: the shipped config.yaml",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from eyas.config import Stages, load
    from eyas.doctor import examine
    from eyas.plugins import Engine
    from eyas.server.verdict import keep

    root = Path(eyas.__file__).resolve().parent.parent
    files = arguments.configfile or [root / "config.yaml"]
    stages = Stages(load(_merged(files), files, root, check_files=True), root)
    section = dict(stages.config.server.engine)
    engine = stages.registry.create("engine", section.pop("name"), section, "server.engine", stages.model)
    assert isinstance(engine, Engine)
    reasons = []
    keep(stages.access(), ["doctor: it did not finish"])
    for finding in examine(stages, Path("results"), engine):
        head = f"{MARKS[finding.state]:>7}  {finding.name}: "
        print(textwrap.fill(head + finding.text, 118, subsequent_indent=" " * 9), flush=True)
        if finding.state == "no-go":
            reasons.append(f"{finding.name}: {finding.text}")
    keep(stages.access(), reasons)
    if reasons:
        raise EyasError(f"NO-GO: {len(reasons)} reason{'s' * (len(reasons) > 1)} above")
    print("GO")


def _merged(files: list[Path]) -> dict[str, Any]:
    """The config as Snakemake merges several files: later ones win, key by key."""
    from snakemake.utils import update_config

    merged: dict[str, Any] = {}
    for file in files:
        try:
            read = yaml.safe_load(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise EyasError(
                f"--configfile: {file} cannot be read ({error.strerror}); correct the path"
            ) from None
        except yaml.YAMLError as error:
            raise EyasError(f"{file}: not valid YAML: {' '.join(str(error).split())}; correct it") from None
        update_config(merged, read or {})
    return merged
