"""All pilots → plan.json, plan.md and plan.html."""

import argparse
from pathlib import Path

import msgspec

from eyas.config import PlanSettings
from eyas.plan import plan
from eyas.program import run


def main(a: argparse.Namespace) -> None:
    plan(msgspec.json.decode(a.settings, type=PlanSettings), a.pilots, a.out.parent)


parser = argparse.ArgumentParser("plan", description=__doc__)
parser.add_argument("--settings", required=True, help="PlanSettings as JSON")
parser.add_argument("--pilots", type=Path, nargs="+", required=True)
parser.add_argument("--out", type=Path, required=True, help="plan.json; the others go beside it")
run(main, parser)
