"""prompts.jsonl.zst → responses.jsonl.zst, through the journal."""

import argparse
from pathlib import Path

import msgspec

from eyas.config import AccessSettings, GenerateSettings
from eyas.generate import Paths, generate
from eyas.plugins import registry
from eyas.program import run


def main(a: argparse.Namespace) -> None:
    access = msgspec.json.decode(a.access, type=AccessSettings)
    paths = Paths(
        prompts=a.prompts,
        journal=a.journal,
        responses=a.responses,
        outcomes=a.outcomes,
        timing=a.timing,
        servers=a.servers,
        progress=a.log.with_suffix(".status.json"),
        audit=a.log.with_suffix(".audit.jsonl"),
    )
    settings = msgspec.json.decode(a.settings, type=GenerateSettings)
    generate(settings, access, paths, registry(tuple(access.plugins)))


parser = argparse.ArgumentParser("generate", description=__doc__)
parser.add_argument("--settings", required=True, help="GenerateSettings as JSON")
parser.add_argument("--access", required=True, help="AccessSettings as JSON")
parser.add_argument("--prompts", type=Path, required=True)
parser.add_argument("--journal", type=Path, required=True, help="journal folder of this dataset")
parser.add_argument("--responses", type=Path, required=True)
parser.add_argument("--outcomes", type=Path, required=True)
parser.add_argument("--timing", type=Path, required=True)
parser.add_argument("--servers", type=Path, required=True)
run(main, parser)
