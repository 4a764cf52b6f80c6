"""Source files → prompts.jsonl.zst, in the fixed order."""

import argparse
import json
from pathlib import Path

import msgspec

from eyas.config import PromptsSettings
from eyas.plugins import Source, registry
from eyas.program import run
from eyas.prompts import prompts


def main(a: argparse.Namespace) -> None:
    settings = msgspec.json.decode(a.settings, type=PromptsSettings)
    found = registry(tuple(json.loads(a.plugins)))
    section = dict(settings.source)
    source = found.create("source", section.pop("name"), section, f"datasets.{settings.dataset}.source")
    assert isinstance(source, Source)
    files = [Path(file) for file in json.loads(a.files)]
    prompts(settings, files, a.names, source, a.out, a.report)


parser = argparse.ArgumentParser("prompts", description=__doc__)
parser.add_argument("--settings", required=True, help="PromptsSettings as JSON")
parser.add_argument("--plugins", required=True, help="plugin files, a JSON list")
parser.add_argument("--files", required=True, help="source files, a JSON list")
parser.add_argument("--names", nargs="+", required=True, help="the same files as the config names them")
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--report", type=Path, required=True, help="rows read, used and skipped, by reason")
run(main, parser)
