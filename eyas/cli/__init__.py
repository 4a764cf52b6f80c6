"""The `eyas` command. Each module in this folder is a subcommand: it has `add_parser(subparsers)`, which sets `run`.

Start-up is part of the interface: nothing here imports pandas or pyarrow before it needs them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import eyas
from eyas.errors import EyasError

if TYPE_CHECKING:
    from eyas.config import Stages

ROOT = Path(eyas.__file__).resolve().parent.parent


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


def add_configfile(parser: argparse.ArgumentParser) -> None:
    """The option that says which run a subcommand is about."""
    parser.add_argument(
        "--configfile",
        type=Path,
        nargs="+",
        help="as for snakemake; default: the config.yaml of this folder, else the shipped one",
    )


def add_directory(parser: argparse.ArgumentParser) -> None:
    """The option that says in which working directory the run is; `enter` heeds it."""
    parser.add_argument(
        "--directory", type=Path, help="working directory of the run, as for snakemake; default: this one"
    )


def enter(arguments: argparse.Namespace, *paths: str, make: bool = False) -> None:
    """Goes to `--directory`; config files, and the paths in the arguments `paths`, stay those of the caller.

    make: the folder, if it is not there, as snakemake does. Raises EyasError if there is no such folder.
    """
    if arguments.directory is None:
        return
    for name in ("configfile", *paths):
        given = getattr(arguments, name, None)
        setattr(arguments, name, given and [file.absolute() for file in given])
    try:
        if make:
            arguments.directory.mkdir(parents=True, exist_ok=True)
        os.chdir(arguments.directory)
    except OSError as error:
        raise EyasError(
            f"--directory: {arguments.directory} cannot be entered ({error.strerror}); correct the path"
        ) from None


def again(arguments: argparse.Namespace, target: str = "") -> str:
    """The snakemake command about the same run, as it can be typed where `eyas` was."""
    words = ["snakemake", *target.split(), "--cores", "1"]
    if arguments.directory is not None:
        words += ["--directory", str(arguments.directory)]
    if getattr(arguments, "configfile", None):
        words += ["--configfile", *map(str, arguments.configfile)]
    return shlex.join(words)


def run_of(arguments: argparse.Namespace, *, check_files: bool = True) -> tuple[dict[str, Any], Stages]:
    """The run of `--configfile`: the config as it is written, and its stages. Raises EyasError as `load` does."""
    from eyas.config import Stages, load

    files = list(arguments.configfile or [])
    raw = _merged(files)
    if "datasets" not in raw:  # as in the Snakefile
        here = Path("config.yaml")
        files.insert(0, here if here.is_file() else ROOT / "config.yaml")
        raw = _merged(files)
    return raw, Stages(load(raw, files, ROOT, check_files=check_files), ROOT)


def _merged(files: Sequence[Path]) -> dict[str, Any]:
    """The config as Snakemake merges several files: later ones win, key by key."""
    from snakemake.utils import update_config

    from eyas.config import read_yaml

    merged: dict[str, Any] = {}
    for file in files:
        try:
            read = read_yaml(file)
        except OSError as error:
            raise EyasError(
                f"--configfile: {file} cannot be read ({error.strerror}); correct the path"
            ) from None
        update_config(merged, read or {})
    return merged
