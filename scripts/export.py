"""A training table → what a trainer reads, and a report of what survives there."""

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
    export(settings, a.table, a.out, registry(tuple(json.loads(a.plugins))), a.prompts, a.responses)


parser = argparse.ArgumentParser("export", description=__doc__)
parser.add_argument("--settings", required=True, help="ExportSettings as JSON")
parser.add_argument("--plugins", required=True, help="plugin files, a JSON list")
parser.add_argument("--table", type=Path, required=True, help="train.parquet or eval.parquet")
parser.add_argument(
    "--prompts",
    type=Path,
    nargs="*",
    required=True,
    help="prompts.jsonl.zst of each dataset, for exporters of text",
)
parser.add_argument(
    "--responses",
    type=Path,
    nargs="*",
    required=True,
    help="responses.jsonl.zst of the datasets whose conversations go on, for exporters of text",
)
parser.add_argument("--out", type=Path, required=True, help="file or folder; the report goes beside it")
run(main, parser)
