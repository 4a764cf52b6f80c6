"""All datasets → summary.json, summary.md, manifest.json, report.html."""

import argparse
import json
import logging
import sys
from pathlib import Path

import msgspec

from eyas.config import SummarySettings
from eyas.program import run
from eyas.summary import summarise


def main(a: argparse.Namespace) -> None:
    settings = msgspec.json.decode(a.settings, type=SummarySettings)
    results = a.out.parent.parent
    servers: dict[str, object] = {}
    for dataset in settings.datasets:
        servers |= json.loads((results / dataset / "servers.json").read_bytes())
    benchmarks = a.log.parent / "benchmarks"
    summary = summarise(settings, results, a.exports, benchmarks, servers, json.loads(a.code), a.out.parent)
    for warning in summary.warnings:
        logging.warning("%s", warning)
        print(f"eyas summary: warning: {warning}", file=sys.stderr)


parser = argparse.ArgumentParser("summary", description=__doc__)
parser.add_argument("--settings", required=True, help="SummarySettings as JSON")
parser.add_argument(
    "--code", required=True, help="code digest of every job by stage and subject, a JSON object"
)
parser.add_argument("--exports", type=Path, nargs="*", required=True, help="the exported training set")
parser.add_argument("--out", type=Path, required=True, help="summary.json; its siblings go beside it")
run(main, parser)
