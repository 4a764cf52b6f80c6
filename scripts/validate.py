"""responses.jsonl.zst → verdicts.parquet."""

import argparse
import json
from pathlib import Path

import msgspec

from eyas.config import ValidateSettings
from eyas.plugins import registry
from eyas.program import run
from eyas.validate import validate


def main(a: argparse.Namespace) -> None:
    settings = msgspec.json.decode(a.settings, type=ValidateSettings)
    validate(settings, a.responses, a.out, registry(tuple(json.loads(a.plugins))))


parser = argparse.ArgumentParser("validate", description=__doc__)
parser.add_argument("--settings", required=True, help="ValidateSettings as JSON")
parser.add_argument("--plugins", required=True, help="plugin files, a JSON list")
parser.add_argument("--responses", type=Path, required=True)
parser.add_argument("--out", type=Path, required=True)
run(main, parser)
