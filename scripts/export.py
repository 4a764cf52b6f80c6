"""A training table → the file that a trainer reads."""

import argparse
import json
from pathlib import Path

import msgspec

from eyas.config import ExportSettings
from eyas.export import export
from eyas.plugins import registry
from eyas.program import run


def main(a: argparse.Namespace) -> None:
    settings = msgspec.json.decode(a.settings, type=ExportSettings)
    export(settings, a.table, a.out, registry(tuple(json.loads(a.plugins))))


parser = argparse.ArgumentParser("export", description=__doc__)
parser.add_argument("--settings", required=True, help="ExportSettings as JSON")
parser.add_argument("--plugins", required=True, help="plugin files, a JSON list")
parser.add_argument("--table", type=Path, required=True, help="train.parquet or eval.parquet")
parser.add_argument("--out", type=Path, required=True)
run(main, parser)
