"""The first prompts of a dataset → what the pilot saw, through the journal."""

import argparse
from pathlib import Path

import msgspec

from eyas.config import AccessSettings, PilotSettings
from eyas.pilot import pilot
from eyas.plugins import registry
from eyas.program import run


def main(a: argparse.Namespace) -> None:
    access = msgspec.json.decode(a.access, type=AccessSettings)
    pilot(
        msgspec.json.decode(a.settings, type=PilotSettings),
        access,
        minutes=a.minutes,
        prompts=a.prompts,
        journal=a.journal,
        out=a.out,
        progress=a.log.with_suffix(".status.json"),
        run=a.run,
        registry=registry(tuple(access.plugins)),
    )


parser = argparse.ArgumentParser("pilot", description=__doc__)
parser.add_argument("--settings", required=True, help="PilotSettings as JSON")
parser.add_argument("--access", required=True, help="AccessSettings as JSON")
parser.add_argument("--minutes", type=float, required=True, help="longest time of the pilot")
parser.add_argument("--prompts", type=Path, required=True)
parser.add_argument("--journal", type=Path, required=True, help="journal folder of this dataset")
parser.add_argument("--run", type=Path, required=True, help="status file of the dataset's generation")
parser.add_argument("--out", type=Path, required=True)
run(main, parser)
