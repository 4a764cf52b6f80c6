"""Alarms: a change for the worse is told, once, and an odd dataset or bad luck is not."""

from __future__ import annotations

import json
import random
import time
from collections import deque
from math import comb
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_results import verdict
from replies import response

import eyas.alarms
import eyas.asking
from eyas.alarms import (
    DEGENERATE,
    KINDS,
    PACE_SECONDS,
    RECENT,
    STANDARD,
    Lookout,
    Pace,
    Watch,
    odd,
    of_all,
    surprise,
)
from eyas.asking import Asking
from eyas.budget import Budget
from eyas.checks.degenerate import FEW_NGRAMS, PERIODIC
from eyas.cli.status import table
from eyas.plugins import registry
from eyas.progress import Progress, write_progress

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


# --- one job -----------------------------------------------------------------------------------------------------

REASONED, PLAIN = ["<think>", "Hm", "</think>", "Yes", "."], ["Yes", "."]
TAGS = {"name": "tags", "opened_by_prompt": False}


@pytest.fixture
def lookout(monkeypatch: pytest.MonkeyPatch) -> Lookout:
    monkeypatch.setattr(eyas.alarms, "JUDGED", 0.0)
    return Lookout(TAGS, {}, registry(), reasoning_expected=True, plan=None)


def test_reasoning_that_disappears_is_told_in_log_and_status(
    lookout: Lookout, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(STANDARD):
        lookout.came(response(REASONED), 0)
    assert lookout.alarms == []
    for _ in range(RECENT):
        lookout.came(response(PLAIN), 0)
    (alarm,) = lookout.alarms
    assert "100% of the last 50 answers have no reasoning, of the first 100 it were 0%" in alarm
    assert [record.message for record in caplog.records if record.name == "eyas.alarms"] == [alarm]


@pytest.mark.parametrize("share", [0.04, 0.2])
def test_long_answers_come_late_and_that_is_no_alarm(lookout: Lookout, share: float) -> None:
    """150 slots, lengths as in life: at the start and in the drain the last answers are not like the others."""
    draw = np.random.default_rng(1)
    lengths = draw.lognormal(6.5, 1.2, 1_500)
    limit = np.quantile(lengths, 1 - share)
    cut = lengths > limit
    free, ends, last = [0.0] * 150, [], 0.0
    for length in np.minimum(lengths, limit) * np.exp(draw.normal(0, 0.1, 1_500)):
        last = min(free)
        slot = free.index(last)
        free[slot] += length
        ends.append(free[slot])
    for at in np.argsort(ends):
        lookout.look(Path(), busy=ends[at] <= last, at_ceiling=False)
        lookout.came(response(REASONED, cut=cut[at]), 150)
        assert lookout.alarms == []


def test_a_status_file_that_nobody_can_read_stops_no_run(tmp_path: Path) -> None:
    write_progress(
        tmp_path / "a.status.json",
        Progress(dataset="a", state="generating", planned=9, rate=70, updated=time.time()),
    )
    (tmp_path / "b.status.json").write_text('{"dataset": "b"}')
    (tmp_path / "c.status.json").mkdir()
    assert of_all(tmp_path, time.time())[0] == 70


def test_a_server_from_which_nothing_comes_any_more_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(dataset="a", state="generating", planned=99)
    job: Any = SimpleNamespace(
        recent=deque((float(at), 100) for at in range(60)),
        recent_tokens=6000,
        budget=Budget(None, 99),
        completions=60,
    )
    rates = []
    for now in (60.0, 100.0, 200.0, 400.0):
        monkeypatch.setattr(eyas.asking.time, "monotonic", lambda now=now: now)
        Asking._rate(job, progress)
        rates.append(progress.rate)
    assert rates[0] == pytest.approx(100)
    assert rates == sorted(rates, reverse=True) and rates[-1] < 1


def test_a_fast_client_judges_only_some_of_its_answers(
    lookout: Lookout, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1_000))  # hundredths of a second
    monkeypatch.setattr(eyas.alarms.time, "monotonic", lambda: next(clock) / 100)
    monkeypatch.setattr(eyas.alarms, "JUDGED", 0.045)
    judged: list[Any] = []
    judge = lookout._judge.judge
    monkeypatch.setattr(lookout._judge, "judge", lambda one: judged.append(one) or judge(one))
    for _ in range(100):
        lookout.came(response(REASONED), 0)
    assert len(judged) == 20


def test_the_speed_of_all_jobs_is_held_against_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(eyas.alarms, "PACE_SECONDS", 0.0)
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps(
            {"projection": {"tokens_per_second": {"low": 900, "mean": 1000, "high": 1100}, "running": 57.0}}
        )
    )
    lookout = Lookout(TAGS, {}, registry(), reasoning_expected=True, plan=str(plan))
    now = time.time()
    for name, rate, age in (("a", 300, 0), ("b", 400, 1), ("ended", 500, 60)):
        state = Progress(
            dataset=name, state="generating", planned=9, rate=rate, in_flight=16, updated=now - age
        )
        write_progress(tmp_path / f"{name}.status.json", state)
    lookout.look(tmp_path, busy=True, at_ceiling=True)
    assert lookout.alarms == [], "a narrow lane is all that is left"
    lookout.look(tmp_path, busy=True, at_ceiling=False)
    (alarm,) = lookout.alarms
    assert alarm.startswith("700 tokens/s")
    lookout.look(tmp_path, busy=False, at_ceiling=False)
    assert lookout.alarms == []
    plan.write_text("{}")
    unplanned = Lookout(TAGS, {}, registry(), reasoning_expected=True, plan=str(plan))
    unplanned.look(tmp_path, busy=True, at_ceiling=False)
    assert unplanned.alarms == [] and "is not a plan" in caplog.text


def test_status_shows_alarms_once() -> None:
    shared = "700 tokens/s for 5 minutes"
    states = [
        (Progress(dataset=name, state="generating", planned=9, alarms=[*own, shared]), "generating")
        for name, own in (("a", ["loops"]), ("b", []))
    ]
    assert table(states)[-2:] == ["ALARM a: loops", f"ALARM a, b: {shared}"]
