"""Alarms of a dataset while it is generated: what a person should look at now, and not after fifty hours.

The first answers set the standard. From then on the last answers are compared with it: an alarm is raised when so many
of them are odd as the standard makes nearly impossible, and withdrawn when they no longer are. So an odd dataset is not
an alarm, a change within it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from msgspec import Struct

from eyas.checks.degenerate import FEW_NGRAMS, PERIODIC
from eyas.records import Verdict

STANDARD = 100  # first answers of a job that set the standard
RECENT = 50  # last answers that are compared with it
EVERY = 10  # answers between two comparisons
# Chance of so many odd answers by the standard. A run of 83,000 answers makes 33,000 comparisons.
RAISE, WITHDRAW = 1e-7, 1e-3
WITHOUT_REASONING = ("none", "empty", "unclosed")
PACE_SHARE = 0.75  # of the planned speed; below that the plan's hours are no longer true
PACE_SECONDS = 300.0  # for so long, so that a burst of long prompts is no alarm


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
        "degenerate": not {PERIODIC, FEW_NGRAMS}.isdisjoint([*verdict.reasons, *verdict.marks]),
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
