"""`eyas plugins`: what is installed, from where, what it is for, and its options, as docs/config.md tells them."""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from typing import Any

from eyas.cli import add_configfile, run_of
from eyas.plugins import KINDS, Found, registry
from eyas.schema import WHERE, plugin_keys, purpose


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plugins", help="list plugins, where they are from, what for, and their options"
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="plugin files, as under `plugins:` in the config"
    )
    add_configfile(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    files = tuple(arguments.files)
    if arguments.configfile:
        _, stages = run_of(arguments, check_files=False)
        files += stages.plugin_files
    found = registry(files).all()
    parts = []
    for kind, plugins in groupby(found, key=lambda one: one.kind):
        parts.append(f"# {purpose(KINDS[kind])}\n# In the config: {WHERE[kind]}")
        parts += map(describe, plugins)
    print("\n\n".join(parts))


def describe(found: Found) -> str:
    """A plugin in a few lines: kind, name, origin; purpose; each option with type, default and meaning."""
    origin = found.origin
    if Path(origin).is_absolute() and Path(origin).is_relative_to(Path.cwd()):
        origin = str(Path(origin).relative_to(Path.cwd()))
    lines = [f"{found.kind} {found.cls.name}  ({origin})"]
    if about := purpose(found.cls):
        lines.append(f"    {about}")
    for key in plugin_keys(found):
        default = "required" if key.default is None else f"default {key.default or 'its own'}"
        lines.append(f"    {key.name}: {key.type.replace('`', '')}, {default}")
        if key.meaning:
            lines.append(f"        {key.meaning}")
    return "\n".join(lines)
