"""Throughput over time, and what happened to the servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
from made_results import verdict
from test_report import report

from eyas.report.planned import compare
from eyas.timeline import timeline

T0 = 1_700_000_000.0


def replies(*rows: tuple[str, float, float, int, int]) -> pd.DataFrame:
    """server, started and finished in s after T0, output tokens, attempt."""
    frame = pd.DataFrame(rows, columns=["server", "started", "finished", "output_tokens", "attempt"])
    return frame.assign(started=frame["started"] + T0, finished=frame["finished"] + T0)


def test_tokens_and_requests_are_spread_over_the_time_they_took() -> None:
    """Nothing is lost: bins times width are all tokens and all time in flight."""
    told = timeline(replies(("s", 0, 10, 100, 1), ("s", 5, 10, 10, 1), ("s", 0.5, 0.5, 7, 1)), {})
    assert told is not None and told.began == T0 and told.width == 1
    assert told.tokens_per_second == [17, 10, 10, 10, 10, 12, 12, 12, 12, 12]
    assert told.in_flight == [1] * 5 + [2] * 5


@pytest.mark.parametrize("days", [0.001, 0.1, 2.4, 400])
def test_bins_are_few_and_add_up(days: float) -> None:
    at = np.linspace(0, days * 86400, 500)
    told = timeline(replies(*(("s", start, start + days * 900, 50, 1) for start in at)), {})
    assert told is not None and 40 <= len(told.in_flight) <= 121
    assert sum(told.tokens_per_second) * told.width == pytest.approx(25_000, rel=0.02, abs=told.width)


def test_a_change_of_server_is_an_event_that_names_what_changed() -> None:
    manifests = {
        "old": {"engine": "sglang", "tp": 8, "flags": {"a": 1}},
        "new": {"engine": "sglang", "tp": 4, "flags": {}},
    }
    told = timeline(
        replies(("old", 0, 100, 10, 1), ("new", 90, 200, 10, 1), ("old", 150, 160, 1, 1)), manifests
    )
    assert told is not None
    assert [(event.seconds, event.what) for event in told.events] == [
        (0, "First request to server old"),
        (90, "First request to server new: flags changed, tp 8 → 4"),
    ]


def test_a_long_pause_is_an_event_and_a_short_one_is_not() -> None:
    told = timeline(replies(("s", 0, 100, 1, 1), ("s", 130, 400, 1, 1), ("s", 40_000, 40_100, 1, 1)), {})
    assert told is not None
    assert [event.what for event in told.events] == [
        "First request to server s",
        "Nothing in flight for 11.0 hours",
    ]
    assert told.events[1].seconds == 400


def test_replies_that_were_asked_again_are_counted_when_they_came() -> None:
    told = timeline(replies(("s", 0, 10, 1, 1), ("s", 0, 4.5, 1, 2), ("s", 0, 10, 1, 3)), {})
    assert told is not None and told.asked_again == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]


def test_without_answers_there_is_no_course() -> None:
    assert timeline(replies(), {}) is None


# --- plan and actual ---------------------------------------------------------------------------------------------


def interval(low: float, mean: float, high: float) -> dict[str, float]:
    return {"low": low, "mean": mean, "high": high}


def plan_of(**figures: dict[str, float]) -> dict[str, Any]:
    known = {
        "output_tokens": interval(90, 100, 110),
        "accepted_tokens": interval(1, 2, 3),
        "acceptance": interval(0.2, 0.5, 1),
    }
    return {**known, "at_limit": interval(0, 0, 0), "hours": interval(1, 2, 3), **figures}


def test_the_plan_stands_beside_what_came(tmp_path: Path) -> None:
    _, summary = report(tmp_path, {"A": ([verdict("a", 60), verdict("b", 40)], ())})
    plan = tmp_path / "plan.json"
    assert compare(plan, summary) == []
    run = {"datasets": {"A": plan_of(accepted_tokens=interval(150, 160, 170))}, "total": plan_of()}
    plan.write_text(json.dumps({"projection": {"full": run, "budgeted": None}}))
    rows = [
        (row.subject, row.what, row.expected, row.interval, row.actual, row.verdict)
        for row in compare(plan, summary)
    ]
    assert rows[0] == ("total", "hours", "2.00", "1.00 to 3.00", "0.003", "below")
    assert ("A", "output tokens", "100", "90 to 110", "100", "inside") in rows
    assert ("A", "accepted tokens", "160", "150 to 170", "100", "below") in rows
    assert ("total", "accepted tokens", "2", "1 to 3", "100", "above") in rows
    unknown = msgspec.structs.replace(summary, datasets={"B": summary.total})
    assert compare(plan, unknown) == [], "a plan of other datasets tells nothing"
    plan.write_text('{"projection": 3}')
    assert compare(plan, summary) == []
