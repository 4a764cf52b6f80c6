"""What `onerror` tells: which jobs failed last, why, and where their logs are."""

from __future__ import annotations

import re
import time
from pathlib import Path

RECENT = 24 * 3600.0  # seconds; older logs belong to runs that nobody is looking at
_ERROR = re.compile(r"^\S+ \S+ ERROR (?P<reason>.*)$")


def failed_jobs(logs: Path) -> list[tuple[Path, str]]:
    """(log, reason) of every job whose log ends in an error, the latest last."""
    found: list[tuple[float, Path, str]] = []
    for log in logs.rglob("*.log"):
        changed = log.stat().st_mtime
        if time.time() - changed > RECENT:
            continue
        reasons = [match["reason"] for line in _lines(log) if (match := _ERROR.match(line))]
        if reasons:
            found.append((changed, log, reasons[-1]))
    return [(log, reason) for _, log, reason in sorted(found)]


def _lines(log: Path) -> list[str]:
    """The last lines of a log; its reason for failure stands there."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        return file.read().decode(errors="replace").split("\n")
