"""Outcomes, verdicts and training rows → stats.json; the books must balance."""

import argparse
from pathlib import Path

import msgspec

from eyas.config import StatsSettings
from eyas.program import run
from eyas.stats import stats


def main(a: argparse.Namespace) -> None:
    settings = msgspec.json.decode(a.settings, type=StatsSettings)
    stats(settings, a.prompts, a.outcomes, a.verdicts, a.train, a.out)


parser = argparse.ArgumentParser("stats", description=__doc__)
parser.add_argument("--settings", required=True, help="StatsSettings as JSON")
parser.add_argument("--prompts", type=Path, required=True, help="prompts.json")
parser.add_argument("--outcomes", type=Path, required=True)
parser.add_argument("--verdicts", type=Path, required=True)
parser.add_argument("--train", type=Path, required=True, help="train.parquet")
parser.add_argument("--out", type=Path, required=True)
run(main, parser)
