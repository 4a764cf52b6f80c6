"""All datasets' train.parquet → one shuffled training set and its held-out part."""

import argparse
from pathlib import Path

import msgspec

from eyas.config import MixSettings
from eyas.mix import mix
from eyas.program import run


def main(a: argparse.Namespace) -> None:
    settings = msgspec.json.decode(a.settings, type=MixSettings)
    mix(settings, a.tables, a.train, a.eval, a.report)


parser = argparse.ArgumentParser("mix", description=__doc__)
parser.add_argument("--settings", required=True, help="MixSettings as JSON")
parser.add_argument(
    "--tables", type=Path, nargs="+", required=True, help="train.parquet of each dataset, by name"
)
parser.add_argument("--train", type=Path, required=True)
parser.add_argument("--eval", type=Path, required=True)
parser.add_argument("--report", type=Path, required=True)
run(main, parser)
