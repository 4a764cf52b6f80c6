"""`eyas status`: how far the pilots or generation are, from any terminal or node; after the run, its summary."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from eyas.cli import add_directory, enter
from eyas.errors import EyasError
from eyas.progress import SUFFIX, Progress, read_progress
from eyas.recordfile import read_seal
from eyas.report.words import number, visible

GENERATE, PILOTS = Path("logs/generate"), Path("logs/pilot")
SUMMARY = Path("results/summary/summary.md")
PROMPTS = "results/{}/prompts.jsonl.zst"
STALE_AFTER = 30.0  # seconds without an update; jobs rewrite their file each second
REDRAW = 1.0  # seconds between two looks at the files
QUIET = 600.0  # seconds between two whole tables where nobody can redraw
ENDED = ("done", "failed", "interrupted")
GOES_ON = "Interrupted: run the same command again, and it goes on; no finished answer is asked for twice."
Eta = tuple[float, float, float]  # s: low, expected, high


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "status", help="show how far generation is, or the summary of a finished run"
    )
    parser.add_argument("--follow", action="store_true", help="keep the display up to date until all is done")
    parser.add_argument(
        "--pid", type=int, help="with --follow: end when this process has ended, whatever the state"
    )
    parser.add_argument(
        "--logs",
        type=Path,
        help=f"folder of the status files; default: {PILOTS} while a pilot runs and before anything is generated, else {GENERATE}",
    )
    add_directory(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    logs = arguments.logs and arguments.logs.absolute()
    enter(arguments)
    if arguments.follow:
        follow(logs, arguments.pid, sys.stdout)
        return
    head, states = look_where_it_runs(logs, time.time())
    if SUMMARY.exists() and all(state == "done" for _, state in states):
        print(summary_top(SUMMARY.read_text(encoding="utf-8", errors="replace")))
    else:
        print("\n".join(table(states, head)))


def summary_top(text: str) -> str:
    """What stands first in summary.md after its title: warnings, and the table of datasets. Raises EyasError without one."""
    _, *blocks = text.split("\n\n")
    table = next((at for at, block in enumerate(blocks) if block.startswith("|")), None)
    if table is None:
        raise EyasError(f"{SUMMARY}: damaged; delete it and run `snakemake`, which rebuilds it")
    return "\n\n".join(blocks[: table + 1]).rstrip("\n")


# --- what the files say ------------------------------------------------------------------------------------------


States = list[tuple[Progress, str]]


def look_where_it_runs(logs: Path | None, now: float) -> tuple[str, States]:
    """What `look` finds in `logs`, under the head of its first column; None: where something runs now."""
    if logs is not None:
        return "dataset", look(logs, now)
    generation, pilots = look(GENERATE, now), look(PILOTS, now)
    pilots_run = any(is_active(state) for _, state in pilots)
    if pilots and (pilots_run or not generation) and not any(is_active(state) for _, state in generation):
        return "pilot of", pilots
    return "dataset", generation


def look(logs: Path, now: float) -> States:
    """Progress and state of every dataset, by name. The state is that of the file, or `stopped` if its job is gone."""
    looks = [_look(path, now) for path in sorted(logs.glob(f"*{SUFFIX}"))]
    return [look for look in looks if look is not None]


def _look(path: Path, now: float) -> tuple[Progress, str] | None:
    progress = _read(path)
    while progress is not None and progress.state not in ENDED and _is_gone(progress, now):
        # A job's last word, or a new job, may have come in between.
        again = _read(path)
        if again == progress:
            return progress, "stopped"
        progress = again
    if progress is None:
        return None
    if progress.state == "pending" and not progress.planned:
        progress.planned = _prompts(progress.dataset) * progress.samples
    return progress, progress.state


def _read(path: Path) -> Progress | None:
    try:
        return read_progress(path)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EyasError(f"{path}: not a status file ({error}); delete it") from None


def _prompts(dataset: str) -> int:
    """How many prompts the dataset has; 0 while they are not there."""
    with contextlib.suppress(FileNotFoundError, EyasError):
        return read_seal(Path(PROMPTS.format(dataset))).rows
    return 0


def _is_gone(progress: Progress, now: float) -> bool:
    """Whether the process that wrote it has ended. From another host a pending job's Snakemake cannot be seen."""
    if progress.host == socket.gethostname() and not is_alive(progress.pid):
        return True
    return progress.state != "pending" and now - progress.updated > STALE_AFTER


def is_active(state: str) -> bool:
    """Whether it goes on or is still to come."""
    return state not in (*ENDED, "stopped")


def is_alive(pid: int) -> bool:
    """Whether a process of this host runs; one that has ended but was not waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] != "Z"


# --- how it looks ------------------------------------------------------------------------------------------------


def table(states: Sequence[tuple[Progress, str]], head: str = "dataset") -> list[str]:
    """Aligned lines: a head, a row for each dataset, and the total of several. head: of the first column."""
    if not states:
        return ["No generation has started here yet."]
    heads = [
        head,
        "state",
        "done/planned",
        "accepted",
        "tokens",
        "tok/s",
        "in flight",
        "queued",
        "KV",
        "to go",
    ]
    rows = [_row(progress, shown) for progress, shown in states]
    if len(rows) > 1:
        rows.append(_total(states))
    # Servers without a load endpoint leave columns empty; those are not shown.
    kept = [at for at in range(len(heads)) if at < 2 or any(row[at] for row in rows)]
    cells = [[row[at] or ("–" if at >= 2 else "") for at in kept] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    return [*lines, *_messages(states), *_gpus(states), *_alarms(states)]


def _messages(states: Sequence[tuple[Progress, str]]) -> list[str]:
    """What jobs say, which may hold what a server said: one line each, and nothing that moves a cursor."""
    told = [f"{progress.dataset}: {progress.message}" for progress, _ in states if progress.message]
    if any(shown in ("interrupted", "stopped") for _, shown in states):
        told.append(GOES_ON)
    return [visible(" ".join(message.split())) for message in told]


def _gpus(states: Sequence[tuple[Progress, str]]) -> list[str]:
    """How busy the GPUs of the server's host are, as the dataset that wrote last has it."""
    told = [progress for progress, shown in states if progress.gpus and is_active(shown)]
    if not told:
        return []
    busy, memory = zip(*max(told, key=lambda progress: progress.updated).gpus, strict=True)
    return [f"GPUs: {len(busy)}, {_span(busy)} busy, {_span(memory)} of their memory taken"]


def _span(shares: Sequence[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low} to {high}"


def _alarms(states: Sequence[tuple[Progress, str]]) -> list[str]:
    """A line each; one that several datasets raise, of the server they share, stands once."""
    raised: dict[str, list[str]] = {}
    for progress, _ in states:
        for text in progress.alarms:
            raised.setdefault(text, []).append(progress.dataset)
    return [f"ALARM {', '.join(names)}: {text}" for text, names in raised.items()]


def _row(progress: Progress, shown: str) -> list[str]:
    active = is_active(shown) and shown != "pending"
    return [
        progress.dataset,
        shown,
        f"{number(progress.done)}/{number(progress.planned) if _is_planned(progress) else '?'}",
        "" if progress.accepted is None else number(progress.accepted),
        _tokens([(progress, shown)]),
        number(progress.rate, 1) if active else "",
        number(progress.in_flight) if active else "",
        "" if progress.queued is None or not active else number(progress.queued),
        "" if progress.kv_use is None or not active else f"{progress.kv_use:.0%}",
        remaining(progress.eta) if active else "",
    ]


def _tokens(states: Sequence[tuple[Progress, str]]) -> str:
    """Output tokens; with a `+` where those of answers that the journal had before are not counted yet."""
    more = any(progress.journalled and shown != "done" for progress, shown in states)
    return f"{'+' if more else ''}{number(sum(progress.tokens for progress, _ in states))}"


def _is_planned(progress: Progress) -> bool:
    return progress.planned > 0 or progress.state != "pending"


def _total(states: Sequence[tuple[Progress, str]]) -> list[str]:
    all_of = [progress for progress, _ in states]
    active = [progress for progress, shown in states if is_active(shown)]
    accepted = [progress.accepted for progress in all_of if progress.accepted is not None]
    planned = number(sum(one.planned for one in all_of)) + ("" if all(map(_is_planned, all_of)) else "+")
    return [
        "total",
        "",
        f"{number(sum(one.done for one in all_of))}/{planned}",
        number(sum(accepted)) if len(accepted) == len(all_of) else "",
        _tokens(states),
        number(sum(one.rate for one in active), 1) if active else "",
        number(sum(one.in_flight for one in active)) if active else "",
        "",
        "",
        remaining(_slowest([one.eta for one in active])),
    ]


def _slowest(times: Sequence[Eta | None]) -> Eta | None:
    """When all is done at the present pace; None while one of them has yet to show its pace."""
    known = [time for time in times if time is not None]
    if not known or len(known) < len(times):
        return None
    low, expected, high = (max(bounds) for bounds in zip(*known, strict=True))
    return low, expected, high


def remaining(eta: Eta | None) -> str:
    """The expected time to go, with its interval in the same unit."""
    if eta is None:
        return ""
    low, expected, high = eta
    size, unit, digits = (
        (1, "s", 0) if expected < 60 else (60, "min", 0) if expected < 3600 else (3600, "h", 1)
    )
    return f"{expected / size:.{digits}f} {unit} ({low / size:.{digits}f}–{high / size:.{digits}f})"


# --- following ---------------------------------------------------------------------------------------------------


def follow(
    logs: Path | None,
    pid: int | None,
    out: TextIO,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Shows the table of `logs`, or of what runs, until no dataset goes on or is to come or, with `pid`, until that process has ended.

    On a terminal it redraws in place. Elsewhere it prints what is new, and the last state at the end.
    """
    show = _Redraw(out) if out.isatty() else _News(out)
    while True:
        # Asked before looking, so that the last look sees what the process wrote last.
        ended = pid is not None and not is_alive(pid)
        head, states = look_where_it_runs(logs, clock())
        if pid is None:
            ended = bool(states) and not any(is_active(shown) for _, shown in states)
        show(head, states, clock(), last=ended)
        if ended:
            return
        sleep(REDRAW)


class _Redraw:
    """Draws over the lines that it drew before; what scrolls or wraps could not be drawn over, so it is cut."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._drawn = 0

    def __call__(self, head: str, states: States, now: float, last: bool) -> None:
        size = shutil.get_terminal_size()
        visible = [line[: size.columns - 1] for line in table(states, head)[: size.lines - 1]]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        self._out.write(f"{up}\r" + "".join(f"{line}\x1b[K\n" for line in visible) + "\x1b[J")
        self._out.flush()
        self._drawn = len(visible)


class _News:
    """Prints the table once, then a line when a dataset begins or ends, and each message and alarm that is new.

    The whole table comes again where its datasets are others, at most every 10 minutes otherwise, and at the end.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._head = ""
        self._phases: dict[str, str] = {}
        self._said: set[str] = set()
        self._table: list[str] = []
        self._at = float("-inf")

    def __call__(self, head: str, states: States, now: float, last: bool) -> None:
        lines, said = table(states, head), [*_messages(states), *_alarms(states)]
        phases = {progress.dataset: _phase(shown) for progress, shown in states}
        others = (head, phases.keys()) != (self._head, self._phases.keys())
        if others or last or now - self._at >= QUIET:
            news = [""] * bool(self._table) + lines if lines != self._table else []
            self._table, self._at = lines, now
        else:
            rows = zip(phases, lines[1:], strict=False)
            news = [line for name, line in rows if phases[name] != self._phases[name]]
            news += [text for text in said if _wording(text) not in self._said]
        self._head, self._phases, self._said = head, phases, set(map(_wording, said))
        if news:
            self._out.write("\n".join(news) + "\n")
            self._out.flush()


def _phase(shown: str) -> str:
    return "running" if is_active(shown) and shown != "pending" else shown


def _wording(text: str) -> str:
    """A message without its numbers, which may be others each second."""
    return re.sub(r"\d+", "", text)
