"""What `onerror` tells last: which jobs failed in this run, why, where their logs are, and how to go on."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from eyas.program import DONE, INTERRUPTED

SILENT = "its log ends without a reason; it was killed, ran out of memory, or could not write (see above)"
SERVE = "serve.log"  # grows while another terminal holds a server
_LINE = re.compile(r"^\S+ \S+ (?P<level>[A-Z]+) (?P<message>.*)$")
_TAIL = 65536  # bytes of a log in which its end is looked for


def log_versions(logs: Path) -> dict[Path, int]:
    """The logs of earlier runs and when they changed, by the file system's own clock."""
    versions = {}
    for log in logs.rglob("*.log"):
        with contextlib.suppress(FileNotFoundError):
            versions[log] = log.stat().st_mtime_ns
    return versions


def failed_jobs(
    logs: Path, earlier: Mapping[Path, int], foreign: Collection[str] = ()
) -> list[tuple[Path, str]]:
    """(log, reason) of every job of this run that failed, the latest last.

    earlier: log_versions at its start. foreign: folders of `logs` whose logs are not Eyas' own, and tell nothing.
    """
    found = []
    for log, changed in log_versions(logs).items():
        if earlier.get(log) == changed or log.relative_to(logs).parts[0] in foreign:
            continue
        lines = [match for line in _last_lines(log) if (match := _LINE.match(line))]
        if lines and lines[-1]["message"] == DONE:
            continue
        reasons = [line["message"] for line in lines if line["level"] == "ERROR"]
        if not reasons and log.name == SERVE:
            continue
        found.append((changed, log, reasons[-1] if reasons else SILENT))
    return [(log, reason) for _, log, reason in sorted(found)]


def report_failures(
    logs: Path, earlier: Mapping[Path, int], argv: Sequence[str], foreign: Collection[str] = ()
) -> str:
    """The report, with the command that resumes. argv: Snakemake's own command line. foreign: as in failed_jobs."""
    # Eight datasets that fail for one reason are one line.
    by_reason: dict[str, list[str]] = {}
    for log, reason in failed_jobs(logs, earlier, foreign):
        by_reason.setdefault(reason, []).append(str(log))
    if not by_reason and "serve" in argv[1:]:
        lines = ["Eyas: serve has ended. Start it again with:"]
    elif set(by_reason) == {INTERRUPTED}:
        lines = ["Eyas: interrupted. Nothing finished is lost. Go on with:"]
    else:
        count = sum(map(len, by_reason.values()))
        lines = [
            f"Eyas: {count} jobs failed:" if count > 1 else "Eyas: a job failed:",
            *(f"  {reason}\n    log: {', '.join(where)}" for reason, where in by_reason.items()),
            *([] if by_reason else ["  it could not say why; see above"]),
            "Nothing finished is lost. Mend that, then go on with:",
        ]
    return "\n".join(["", *lines, f"  {command(argv)}", ""])


def command(argv: Sequence[str]) -> str:
    """The command line as a user would type it again."""
    program = Path(argv[0])
    if program.name == "__main__.py" or shutil.which(program.name) == argv[0]:
        return shlex.join([program.parent.name if program.name == "__main__.py" else program.name, *argv[1:]])
    return shlex.join(argv)


def _last_lines(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        return file.read().decode(errors="replace").split("\n")
