"""`eyas plugins`: what is installed, what it is for, and its options."""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec

from eyas.plugins import Found, registry


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("plugins", help="list plugins, what they are for, and their options")
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="plugin files, as under `plugins:` in the config"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    print("\n\n".join(describe(found) for found in registry(tuple(arguments.files)).all()))


def describe(found: Found) -> str:
    """A plugin in a few lines: kind, name, origin; purpose; one line for each option with its default."""
    purpose = (found.cls.__doc__ or "").strip().partition("\n")[0]
    lines = [f"{found.kind} {found.cls.name}  ({found.origin})"]
    if purpose:
        lines.append(f"    {purpose}")
    fields = msgspec.structs.fields(found.cls.Options)
    width = max((len(field.encode_name) for field in fields), default=0)
    lines += [f"    {field.encode_name.ljust(width)}  {_default(field)}" for field in fields]
    return "\n".join(lines)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"default {json.dumps(msgspec.to_builtins(value), ensure_ascii=False)}"
