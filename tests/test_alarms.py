"""Alarms: a change for the worse is told, once, and an odd dataset or bad luck is not."""

from __future__ import annotations

import random
from math import comb
from typing import Any

import pytest
from made_results import verdict

from eyas.alarms import DEGENERATE, KINDS, PACE_SECONDS, RECENT, STANDARD, Pace, Watch, odd, surprise
from eyas.checks.degenerate import FEW_NGRAMS, PERIODIC

NONE: frozenset[str] = frozenset()


def fed(watch: Watch, share: float, count: int, kind: str, seed: int = 0) -> list[str]:
    """The alarms that `count` answers raise, of which about `share` are odd."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        found += [one.kind for one in watch.add(frozenset({kind}) if draw.random() < share else NONE)]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.9, 1.0])
def test_an_odd_dataset_that_stays_as_it_is_raises_nothing(kind: str, share: float) -> None:
    assert fed(Watch(), share, 3_000, kind) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_for_the_worse_is_told_once_and_withdrawn_when_it_is_over(kind: str) -> None:
    watch = Watch()
    assert fed(watch, 0.05, 300, kind) == []
    assert fed(watch, 0.6, 400, kind, seed=1) == [kind]
    assert list(watch.alarms) == [kind]
    assert "the first 100 it were" in watch.alarms[kind].text
    assert fed(watch, 0.05, 200, kind, seed=2) == [] and watch.alarms == {}
    assert fed(watch, 0.6, 400, kind, seed=3) == [kind], "and again when it comes again"


def test_a_change_for_the_better_is_no_alarm() -> None:
    watch = Watch()
    assert fed(watch, 0.5, STANDARD, "rejected") + fed(watch, 0.0, 1_000, "rejected") == []


def test_an_alarm_comes_within_a_hundred_answers() -> None:
    watch = Watch()
    fed(watch, 0.02, 500, "without reasoning")
    assert fed(watch, 1.0, 2 * RECENT, "without reasoning") == ["without reasoning"]


def test_the_chance_is_that_of_drawing_from_all_balls_at_once() -> None:
    """With a flat prior instead of Jeffreys' there is a closed form; at the ends both agree."""
    assert surprise(3, 10, 0, 5) == pytest.approx(1.0)
    # A certain standard leaves the binomial tail.
    assert surprise(500_000, 1_000_000, 9, 10) == pytest.approx((comb(10, 9) + 1) / 2**10, rel=1e-3)
    assert surprise(0, 100, 50, 50) < 1e-20


def test_what_an_answer_counts_towards() -> None:
    assert {PERIODIC, FEW_NGRAMS} == DEGENERATE

    def kinds(expected: bool = True, **fields: Any) -> frozenset[str]:
        return odd(verdict("k", 100, **fields), reasoning_expected=expected)

    assert kinds() == NONE
    assert kinds(reasons=(PERIODIC,)) == {"rejected", "degenerate"}
    assert kinds(marks=[FEW_NGRAMS]) == {"degenerate"}
    assert kinds(truncated=True) == {"at the limit"}
    for state in ("none", "empty", "unclosed"):
        assert kinds(reasoning_state=state) == {"without reasoning"}
        assert kinds(expected=False, reasoning_state=state) == NONE


def test_a_slow_server_is_told_of_after_five_minutes_of_work() -> None:
    pace = Pace(1_000)
    assert pace.look(700, True, 0) is None
    assert pace.look(700, True, PACE_SECONDS - 1) is None
    alarm = pace.look(700, True, PACE_SECONDS)
    assert alarm is not None and "700 tokens/s" in alarm.text and "1,000" in alarm.text
    assert pace.look(800, True, PACE_SECONDS + 1) is None, "it is fast enough again"
    assert pace.look(700, True, PACE_SECONDS + 2) is None
    assert pace.look(100, False, 3 * PACE_SECONDS) is None, "nothing more to ask: the drain is no alarm"
    assert pace.look(700, True, 3 * PACE_SECONDS + 1) is None
