"""Accepted responses → train.parquet."""

import argparse
from pathlib import Path

import msgspec

from eyas.config import TrainSettings
from eyas.program import run
from eyas.train import train


def main(a: argparse.Namespace) -> None:
    settings = msgspec.json.decode(a.settings, type=TrainSettings)
    train(settings, a.prompts, a.responses, a.verdicts, a.out)


parser = argparse.ArgumentParser("train", description=__doc__)
parser.add_argument("--settings", required=True, help="TrainSettings as JSON")
parser.add_argument("--prompts", type=Path, required=True)
parser.add_argument("--responses", type=Path, required=True)
parser.add_argument("--verdicts", type=Path, required=True)
parser.add_argument("--out", type=Path, required=True)
run(main, parser)
