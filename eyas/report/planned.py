"""Plan versus actual: what plan.json expected of a run beside what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from eyas.report.figures import Part, Summary
from eyas.report.words import number, percent


class Row(Struct, frozen=True, kw_only=True):
    """One quantity, as texts. verdict: where the actual value lies by the plan's 90 % interval."""

    subject: str
    what: str
    expected: str
    interval: str
    actual: str
    verdict: str


Figure = tuple[str, str, Callable[[Part], float | None], Callable[[float], str]]
_count: Callable[[float], str] = number
FIGURES: list[Figure] = [
    ("output tokens", "output_tokens", lambda part: part.output_tokens + part.unused_tokens, _count),
    ("accepted tokens", "accepted_tokens", lambda part: part.accepted_tokens, _count),
    (
        "accepted share",
        "acceptance",
        lambda part: part.accepted / part.responses if part.responses else None,
        percent,
    ),
    ("share at the limit", "at_limit", lambda part: part.truncated_share, percent),
]
# Of a dataset they would be its share of a server that others use too, which is no time between two moments.
HOURS: Figure = (
    "hours",
    "hours",
    lambda part: part.hours,
    lambda hours: number(hours, 2 if hours >= 1 else 3),
)


def compare(plan: Path, summary: Summary) -> list[Row]:
    """The total first, then each dataset. Empty where no plan was made, or it is of other datasets or an older version."""
    try:
        projection = json.loads(plan.read_bytes())["projection"]
        run = (
            projection["budgeted"]
            if summary.total.budget_tokens and projection["budgeted"]
            else projection["full"]
        )
        if summary.unfinished or run["datasets"].keys() != summary.datasets.keys():
            return []
        rows = [_row("total", figure, run["total"], summary.total) for figure in (HOURS, *FIGURES)]
        for name, part in summary.datasets.items():
            rows += [_row(name, figure, run["datasets"][name], part) for figure in FIGURES]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return rows


def _row(subject: str, figure: Figure, expected: Mapping[str, Any], part: Part) -> Row:
    what, key, actual_of, told = figure
    low, mean, high = (float(expected[key][name]) for name in ("low", "mean", "high"))
    actual = actual_of(part)
    verdict = "–"
    if actual is not None:
        # As they are told: a share of 12.5 % is not outside of 12.5 to 12.5 %.
        verdict = (
            "below"
            if actual < low and told(actual) != told(low)
            else "above"
            if actual > high and told(actual) != told(high)
            else "inside"
        )
    return Row(
        subject=subject,
        what=what,
        expected=told(mean),
        interval=f"{told(low)} to {told(high)}",
        actual="–" if actual is None else told(actual),
        verdict=verdict,
    )
