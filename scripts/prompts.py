"""Source files → prompts.jsonl.zst, in the fixed order."""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

from eyas.config import PromptsSettings
from eyas.plugins import Registry, Source, registry
from eyas.program import run
from eyas.prompts import Evaluation, prompts


def main(a: argparse.Namespace) -> None:
    settings = msgspec.json.decode(a.settings, type=PromptsSettings)
    found = registry(tuple(json.loads(a.plugins)))
    source = create(found, settings.source, f"datasets.{settings.dataset}.source")
    files = [Path(file) for file in json.loads(a.files)]
    evaluations = {
        name: Evaluation(
            create(found, settings.evaluation_sets[name].source, f"evaluation_sets.{name}.source"),
            [Path(file) for file in places],
        )
        for name, places in json.loads(a.evaluation).items()
    }
    prompts(settings, files, a.names, source, a.out, a.report, evaluations)


def create(found: Registry, section: dict[str, Any], where: str) -> Source:
    options = dict(section)
    source = found.create("source", options.pop("name"), options, where)
    assert isinstance(source, Source)
    return source


parser = argparse.ArgumentParser("prompts", description=__doc__)
parser.add_argument("--settings", required=True, help="PromptsSettings as JSON")
parser.add_argument("--plugins", required=True, help="plugin files, a JSON list")
parser.add_argument("--files", required=True, help="source files, a JSON list")
parser.add_argument("--names", nargs="+", required=True, help="the same files as the config names them")
parser.add_argument(
    "--evaluation", required=True, help="files of the evaluation sets, a JSON object of lists"
)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--report", type=Path, required=True, help="rows read, used and skipped, by reason")
run(main, parser)
