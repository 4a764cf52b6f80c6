"""What Snakemake does in the terminal, made fit for people: its lines, and what Ctrl-C means to `serve`.

Its lines come without the settings that jobs carry, which bury the errors. The complete lines stay in Snakemake's log
file; `--printshellcmds` shows the commands.
"""

from __future__ import annotations

import copy
import logging
import re
import signal
from collections.abc import Collection

HANDLER = "DefaultStreamHandler"  # as snakemake.logging names the one that writes to the terminal
_COMMAND = re.compile(r"\bCommand '.*' (?=returned non-zero|died with)", re.DOTALL)


def shorten(logger: logging.Logger) -> None:
    """Shortens what `logger` (Snakemake's) writes to the terminal; a user's own log handlers are left alone."""
    for handler in logger.handlers:
        if handler.name == HANDLER and handler.formatter and not isinstance(handler.formatter, Brief):
            handler.setFormatter(Brief(handler.formatter))


class Brief(logging.Formatter):
    """Snakemake's formatter, given records without command lines and resources that are texts."""

    def __init__(self, full: logging.Formatter) -> None:
        super().__init__()
        self._full = full

    def format(self, record: logging.LogRecord) -> str:
        brief = copy.copy(record)
        if isinstance(brief.msg, str):
            brief.msg = _COMMAND.sub("The command ", brief.msg)
        if getattr(brief, "shellcmd", None):
            brief.shellcmd = None
        if items := getattr(getattr(brief, "resources", None), "items", None):
            brief.resources = {name: value for name, value in items() if not isinstance(value, str)}
        return self._full.format(brief)


def leave_ctrl_c_to_serve(targets: Collection[str], *, local: bool) -> None:
    """Lets the first Ctrl-C reach `serve` alone, which ends well by itself; Snakemake would call that a failure.

    targets: what Snakemake was asked for; anything but `serve` is left as it is. local: whether jobs run on this
    machine, where the terminal's Ctrl-C reaches them. A second Ctrl-C is Snakemake's again.
    """
    if set(targets) != {"serve"} or not local:
        return

    def first(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, earlier)

    earlier = signal.signal(signal.SIGINT, first)
