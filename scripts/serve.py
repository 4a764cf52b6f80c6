"""Holds a server until interrupted."""

import argparse
import logging

import msgspec

from eyas.config import AccessSettings
from eyas.plugins import Engine, registry
from eyas.program import run
from eyas.server.serve import serve


def main(a: argparse.Namespace) -> None:
    access = msgspec.json.decode(a.access, type=AccessSettings)
    section = dict(access.server.engine)
    found = registry(tuple(access.plugins))
    engine = found.create("engine", section.pop("name"), section, "server.engine", access.model)
    assert isinstance(engine, Engine)
    serve(access, engine, logging.getLogger())


parser = argparse.ArgumentParser("serve", description=__doc__)
parser.add_argument("--access", required=True, help="AccessSettings as JSON")
run(main, parser)
