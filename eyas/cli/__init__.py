"""The `eyas` command. Each module in this folder is a subcommand: it has `add_parser(subparsers)`, which sets `run`.

Start-up is part of the interface: nothing here imports pandas or pyarrow before it needs them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

from eyas.errors import EyasError


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(prog="eyas", description="Training data for EAGLE-3 drafters.")
    subparsers = top.add_subparsers(metavar="COMMAND", required=True)
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}").add_parser(subparsers)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status: 0 done, 1 after an EyasError, 130 after Ctrl-C."""
    arguments = parser().parse_args(argv)
    try:
        arguments.run(arguments)
        # Here and not at exit, where Python would report a closed pipe itself.
        sys.stdout.flush()
    except EyasError as error:
        print(f"eyas: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone (`eyas status | head`); what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
