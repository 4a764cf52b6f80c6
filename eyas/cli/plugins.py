"""`eyas plugins`: what is installed, what it is for, and its options, as docs/config.md tells it."""

from __future__ import annotations

import argparse
from typing import Any

from eyas.plugins import Found, registry
from eyas.schema import plugin_keys, purpose


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("plugins", help="list plugins, what they are for, and their options")
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="plugin files, as under `plugins:` in the config"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    print("\n\n".join(describe(found) for found in registry(tuple(arguments.files)).all()))


def describe(found: Found) -> str:
    """A plugin in a few lines: kind, name, origin; purpose; each option with type, default and meaning."""
    lines = [f"{found.kind} {found.cls.name}  ({found.origin})"]
    if about := purpose(found):
        lines.append(f"    {about}")
    for key in plugin_keys(found):
        default = "required" if key.default is None else f"default {key.default or 'its own'}"
        lines.append(f"    {key.name}: {key.type.replace('`', '')}, {default}")
        if key.meaning:
            lines.append(f"        {key.meaning}")
    return "\n".join(lines)
