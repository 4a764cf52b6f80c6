"""`eyas doctor`: the last look before a long run; ends GO or NO-GO."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

from eyas.cli import add_configfile, add_directory, enter, run_of
from eyas.errors import EyasError

MARKS = {"ok": "ok", "warning": "warning", "no-go": "NO-GO"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor", help="look at server, tokenizer, one answer per dataset, disk and limits before a long run"
    )
    add_configfile(parser)
    add_directory(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from eyas.doctor import examine
    from eyas.plugins import Engine
    from eyas.server.verdict import keep

    enter(arguments, make=True)
    _, stages = run_of(arguments)
    print(f"For runs in {Path.cwd()}", flush=True)
    section = dict(stages.config.server.engine)
    engine = stages.registry.create("engine", section.pop("name"), section, "server.engine", stages.model)
    assert isinstance(engine, Engine)
    reasons, warnings = [], 0
    keep(stages.access(), ["doctor: it did not finish"])
    for finding in examine(stages, Path("results"), engine):
        head = f"{MARKS[finding.state]:>7}  {finding.name}: "
        print(textwrap.fill(head + finding.text, 118, subsequent_indent=" " * 9), flush=True)
        if finding.state == "no-go":
            reasons.append(f"{finding.name}: {finding.text}")
        warnings += finding.state == "warning"
    keep(stages.access(), reasons)
    if reasons:
        raise EyasError(f"NO-GO: {len(reasons)} reason{'s' * (len(reasons) > 1)} above")
    print("GO" + (f", with {warnings} warning{'s' * (warnings > 1)} above" if warnings else ""))
