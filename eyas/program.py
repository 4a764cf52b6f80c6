"""What the programs under scripts/ share: logging to the rule's log, and errors as one line in the terminal."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from eyas.errors import EyasError


def run(main: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> None:
    """Parses the command line, runs `main`, and ends the process: 0 done, 1 after an EyasError, 130 after Ctrl-C.

    The error stands in the log and, because Snakemake shows a job's stderr, in the terminal.
    """
    parser.add_argument("--log", type=Path, required=True, help="log file of this job")
    arguments = parser.parse_args()
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=arguments.log,
        filemode="w",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        force=True,
    )
    name = f"eyas {parser.prog}"
    try:
        main(arguments)
    except EyasError as error:
        logging.error("%s", error)
        print(f"{name}: error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        logging.error("interrupted; run the same command again to go on")
        sys.exit(130)
    except Exception:
        logging.exception("unexpected")
        raise
