"""Alarms of a dataset while it is generated: what a person should look at now, and not after fifty hours.

The first answers set the standard, once the earliest are past: those are the short ones. From then on the last answers are compared with it: an alarm is raised when so many
of them are odd as the standard makes nearly impossible, and withdrawn when they no longer are. So an odd dataset is not
an alarm, a change within it is. What comes after the last request is not looked at: short answers come first, so the
last of all are the long ones, and many of those are cut at the limit.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eyas.audit import Audit
from eyas.judge import Judge
from eyas.plugins import Registry
from eyas.progress import SUFFIX, read_progress
from eyas.records import Response, Verdict

STANDARD = 100  # first answers of a job that set the standard
SETTLED = (
    2  # times as many answers as are in flight come before the mix of short and long ones is the usual one
)
RECENT = 50  # last answers that are compared with it
EVERY = 10  # answers between two comparisons
# Chance of so many odd answers by the standard. A run of 83,000 answers makes 33,000 comparisons.
RAISE, WITHDRAW = 1e-7, 1e-3
# What the check `degenerate` says. Not imported from there: alarms decide no result, checks do.
DEGENERATE = {"repeats with a short period", "few distinct n-grams"}
WITHOUT_REASONING = ("none", "empty", "unclosed")
PACE_SHARE = 0.75  # of the planned speed; below that the plan's hours are no longer true
PACE_SECONDS = 300.0  # for so long, so that a burst of long prompts is no alarm
AS_FULL = 0.9  # of the requests that run in the plan: so many in flight are as many
JUDGED = 0.05  # s between two judged answers at least, so that judging costs a fast client nothing
FRESH = 10.0  # s; an older status file is that of a job that has ended

log = logging.getLogger(__name__)


class Alarm(Struct, frozen=True, kw_only=True):
    """Something that has changed for the worse. text: what, how much, since when it was otherwise, and what to look at."""

    kind: str
    text: str


KINDS = {
    "rejected": ("of the last {} answers are rejected", "eyas show, and the checks' reasons in the report"),
    "without reasoning": (
        "of the last {} answers have no reasoning",
        "the server's template, and whether it was restarted with other settings",
    ),
    "degenerate": (
        "of the last {} answers fell into a loop",
        "a KV cache in fp8 or on disk, and how long the server has been up",
    ),
    "at the limit": (
        "of the last {} answers were cut at max_new_tokens",
        "loops in the reasoning, and whether max_new_tokens still fits",
    ),
}


def odd(verdict: Verdict, *, reasoning_expected: bool) -> frozenset[str]:
    """The kinds of alarm that a single answer counts towards."""
    found = {
        "rejected": not verdict.accepted,
        "without reasoning": reasoning_expected and verdict.reasoning_state in WITHOUT_REASONING,
        "degenerate": not DEGENERATE.isdisjoint([*verdict.reasons, *verdict.marks]),
        "at the limit": verdict.truncated,
    }
    return frozenset(kind for kind, holds in found.items() if holds)


class Watch:
    """Follows the answers of one job. `alarms` are those that hold now, by kind."""

    def __init__(self) -> None:
        self.alarms: dict[str, Alarm] = {}
        self._standard = dict.fromkeys(KINDS, 0)
        self._recent: deque[frozenset[str]] = deque(maxlen=RECENT)
        self._seen = 0

    def add(self, kinds: frozenset[str]) -> Iterator[Alarm]:
        """One more answer. Yields the alarms that it raises."""
        self._seen += 1
        if self._seen <= STANDARD:
            for kind in kinds:
                self._standard[kind] += 1
            return
        self._recent.append(kinds)
        if len(self._recent) == RECENT and self._seen % EVERY == 0:
            for kind in KINDS:
                yield from self._compare(kind)

    def _compare(self, kind: str) -> Iterator[Alarm]:
        count = sum(kind in kinds for kinds in self._recent)
        before = self._standard[kind]
        worse = count * STANDARD > before * RECENT
        chance = surprise(before, STANDARD, count, RECENT) if worse else 1.0
        if chance > WITHDRAW:
            self.alarms.pop(kind, None)
        elif chance < RAISE and kind not in self.alarms:
            what, where = KINDS[kind]
            share = f"{count / RECENT:.0%} {what.format(RECENT)}"
            told = f"{share}, of the first {STANDARD} it were {before / STANDARD:.0%}; look at {where}"
            self.alarms[kind] = Alarm(kind=kind, text=told)
            yield self.alarms[kind]


def surprise(before: int, of_before: int, now: int, of_now: int) -> float:
    """Chance of at least `now` in `of_now` if nothing has changed since `before` in `of_before`.

    The share is not known but estimated from few, so this is the tail of a beta-binomial distribution with Jeffreys'
    prior, not of a binomial one.
    """
    a, b = before + 0.5, of_before - before + 0.5

    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    return sum(
        math.comb(of_now, k) * math.exp(log_beta(k + a, of_now - k + b) - log_beta(a, b))
        for k in range(now, of_now + 1)
    )


class Pace:
    """Compares the speed of the whole server with the planned one, while it has enough to do."""

    def __init__(self, planned: float) -> None:
        """planned: output tokens/s of the plan."""
        self._planned = planned
        self._slow_since: float | None = None

    def look(self, rate: float, busy: bool, now: float) -> Alarm | None:
        """The alarm if `rate`, in tokens/s, has been too low for long enough. busy: more would be asked if it could."""
        if not busy or rate >= PACE_SHARE * self._planned:
            self._slow_since = None
            return None
        if self._slow_since is None:
            self._slow_since = now
        if now - self._slow_since < PACE_SECONDS:
            return None
        told = (
            f"{rate:,.0f} tokens/s for {PACE_SECONDS / 60:.0f} minutes, the plan has {self._planned:,.0f}; "
            "look at the server's log for retractions, at others on its GPUs, and plan again for the hours that are left"
        )
        return Alarm(kind="slow", text=told)


class Lookout:
    """Follows one job: judges answers as they come and compares the speed of all jobs with the plan's.

    Alarms go into the log when they are raised; `alarms` are those that hold now. audit: the drift audit, where the
    config has one.
    """

    def __init__(
        self,
        reasoning: Mapping[str, Any],
        checks: Mapping[str, Mapping[str, Any]],
        registry: Registry,
        *,
        reasoning_expected: bool,
        plan: str | None,
    ) -> None:
        """reasoning, checks: as Judge has them. plan: plan.json, where one was made."""
        self._judge = Judge(reasoning, checks, registry)
        self._reasoning_expected = reasoning_expected
        self._watch = Watch()
        self._slow: Alarm | None = None
        self.audit: Audit | None = None
        self._judged = float("-inf")
        self._came = self._most = 0  # answers, and most requests in flight so far
        self._busy = True
        planned = _planned(plan)
        self._pace = Pace(planned[0]) if planned else None
        self._running = planned[1] if planned else 0.0

    @property
    def alarms(self) -> list[str]:
        """What a person should look at now, a sentence each."""
        held = [*self._watch.alarms.values(), *([self._slow] if self._slow else [])]
        return [*(alarm.text for alarm in held), *(self.audit.drift.alarms.values() if self.audit else ())]

    def came(self, response: Response, in_flight: int) -> None:
        """An answer came, of one of `in_flight` requests."""
        self._came += 1
        self._most = max(self._most, in_flight)
        if not self._busy or self._came <= SETTLED * self._most:
            return
        now = time.monotonic()
        if now - self._judged < JUDGED:
            return
        self._judged = now
        verdict = self._judge.judge(response)
        for alarm in self._watch.add(odd(verdict, reasoning_expected=self._reasoning_expected)):
            log.warning("%s", alarm.text)

    def look(self, statuses: Path, *, busy: bool, at_ceiling: bool) -> None:
        """A moment has passed. statuses: folder of the status files of all jobs, which are read.

        busy: this job would ask more. at_ceiling: its lane lets it have no more in flight. Where lanes alone keep the server
        emptier than in the plan, as when a narrow one is all that is left, its speed is not the plan's.
        """
        self._busy = busy
        if self._pace is None:
            return
        rate, in_flight = of_all(statuses, time.time())
        full = not at_ceiling or in_flight >= AS_FULL * self._running
        slow = self._pace.look(rate, busy and full, time.monotonic())
        if slow and not self._slow:
            log.warning("%s", slow.text)
        self._slow = slow


def of_all(folder: Path, now: float) -> tuple[float, int]:
    """Output tokens/s and requests in flight of all jobs that have written their status lately. A file that cannot be read is
    no reason to stop."""
    rate, in_flight = 0.0, 0
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                one = read_progress(path)
                if one is not None and now - one.updated < FRESH:
                    rate, in_flight = rate + one.rate, in_flight + one.in_flight
    return rate, in_flight


def _planned(plan: str | None) -> tuple[float, float] | None:
    """Output tokens/s of plan.json, and how many requests run at that; None if there is none."""
    if plan is None or not Path(plan).is_file():
        return None
    try:
        projection = msgspec.json.decode(Path(plan).read_bytes())["projection"]
        return float(projection["tokens_per_second"]["mean"]), float(projection["running"])
    except (msgspec.DecodeError, KeyError, TypeError):
        log.warning("%s is not a plan; the speed is not compared with it", plan)
        return None
