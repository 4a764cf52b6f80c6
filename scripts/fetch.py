"""Brings a tokenizer or a dataset's file from the hub."""

import argparse

from eyas.fetch import fetch
from eyas.hub import reference
from eyas.program import run


def main(a: argparse.Namespace) -> None:
    fetch(reference(a.reference), a.key, code=a.code)


parser = argparse.ArgumentParser("fetch", description=__doc__)
parser.add_argument("--reference", required=True, help="hub://…, as the config names it")
parser.add_argument("--key", required=True, help="the config key that asks for it")
parser.add_argument("--code", action="store_true", help="with the tokenizer's Python files")
run(main, parser)
