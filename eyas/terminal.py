"""Snakemake's own lines in the terminal, without the settings that jobs carry: they bury the errors.

The complete lines stay in Snakemake's log file; `--printshellcmds` shows the commands.
"""

from __future__ import annotations

import copy
import logging
import re

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
