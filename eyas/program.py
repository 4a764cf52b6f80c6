"""What the programs under scripts/ share: logging to the rule's log, and errors as one line in the terminal."""

from __future__ import annotations

import argparse
import errno
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from eyas.errors import EyasError

INTERRUPTED = "interrupted"
DONE = "done"  # the last line in the log of a job that succeeded
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)


def run(main: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> None:
    """Parses the command line, runs `main`, and ends the process: 0 done, 1 after an error, 130 after Ctrl-C or SIGTERM.

    The error stands in the log and, because Snakemake shows a job's stderr, in the terminal. A traceback goes to the
    log alone.
    """
    parser.add_argument("--log", type=Path, required=True, help="log file of this job")
    arguments = parser.parse_args()
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    logging.raiseExceptions = False  # a log that cannot be written must not bury the reason
    logging.basicConfig(
        filename=arguments.log,
        filemode="w",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        force=True,
    )
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    try:
        main(arguments)
    except KeyboardInterrupt:
        logging.error(INTERRUPTED)
        sys.exit(130)
    except Exception as error:
        line = explain(error)
        logging.error("%s", line, exc_info=None if isinstance(error, EyasError) else error)
        print(f"eyas {parser.prog}: error: {line}", file=sys.stderr)
        sys.exit(1)
    logging.info(DONE)


def _as_ctrl_c(_number: int, frame: FrameType | None) -> None:
    """Does what Ctrl-C would do now, which an event loop may have changed, also where Ctrl-C is ignored (`command &`)."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)


def explain(error: Exception) -> str:
    """One line for a person: what is wrong, where, and what to do."""
    if isinstance(error, EyasError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (*_NO_SPACE, *_NO_ACCESS):
        remedy = (
            "free space or raise the limit"
            if error.errno in _NO_SPACE
            else "correct the permissions or choose another folder"
        )
        what = error.strerror or str(error)
        where = f"{error.filename}: " if error.filename and str(error.filename) not in what else ""
        return f"{where}{what}; {remedy}, then run the same command again: nothing finished is lost"
    return f"unexpected {type(error).__name__}: {error}; please report it with this job's log".replace(
        "\n", " "
    )
