"""report.html: one page that needs no network, no script and no other file.

Text from data reaches the page only through the template, which escapes it; charts are computed here and drawn there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from eyas.report import words
from eyas.report.figures import Summary
from eyas.report.trainers import tables
from eyas.stats import KINDS, Bin, DatasetStats

# The chart's own units; the page scales it to the space there is.
WIDTH, HEIGHT = 480, 230
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 56, 34
MARK_ROW = 16  # height of one row of mark labels above the bars
LETTER = 9  # at least the width of a letter where letters are largest, on a phone
MOST_TICKS = 9
ROUND = (2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 30, 40, 50, 60, 80, 100)


@dataclass(frozen=True)
class Bar:
    """One bin: accepted responses at the bottom, rejected on top of them. `label` is shown on hover."""

    x: float
    width: float
    accepted_y: float
    accepted_height: float
    rejected_y: float
    rejected_height: float
    label: str


@dataclass(frozen=True)
class Mark:
    """A vertical line at a statistic, with its label in a row of its own, so that labels never overlap."""

    name: str
    x: float
    label: str
    label_y: float
    anchor: str


@dataclass(frozen=True)
class Chart:
    """The length histogram of one dataset. ticks: (position, label)."""

    title: str
    text: str
    bars: list[Bar]
    marks: list[Mark]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def render(summary: Summary, stats: Mapping[str, DatasetStats], manifest: Mapping[str, Any]) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("number", "percent", "duration", "hours", "megabytes", "commonest", "listed"):
        environment.filters[name] = getattr(words, name)
    return environment.get_template("page.html.j2").render(
        summary=summary,
        stats=stats,
        kinds=KINDS,
        charts=charts(stats),
        frame={
            "width": WIDTH,
            "height": HEIGHT,
            "left": LEFT,
            "right": WIDTH - RIGHT,
            "top": TOP,
            "floor": HEIGHT - BOTTOM,
        },
        manifest=manifest,
        trainers=tables(summary),
    )


def charts(stats: Mapping[str, DatasetStats]) -> dict[str, Chart]:
    """One histogram per dataset that has answers, all on the same axis of tokens so that they can be compared."""
    filled = {name: one for name, one in stats.items() if one.histogram}
    if not filled:
        return {}
    axis = Axis.over([one for each in filled.values() for one in each.histogram])
    return {name: chart(name, one, axis) for name, one in filled.items()}


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis of token counts. low, high: powers of two, as exponents."""

    low: int
    high: int

    @classmethod
    def over(cls, bins: Sequence[Bin]) -> Axis:
        low = math.floor(_log(min(one.low for one in bins)))
        high = math.ceil(_log(max(one.high for one in bins)))
        return cls(low, max(high, low + 1))

    def x(self, tokens: float) -> float:
        share = (_log(tokens) - self.low) / (self.high - self.low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> list[tuple[float, str]]:
        step = math.ceil((self.high - self.low + 1) / MOST_TICKS)
        return [(self.x(2**at), f"{2**at:,}") for at in range(max(self.low, 0), self.high + 1, step)]


def _log(tokens: float) -> float:
    # Zero has no logarithm; it gets the octave below one.
    return math.log2(max(tokens, 0.5))


def chart(name: str, stats: DatasetStats, axis: Axis) -> Chart:
    """The histogram of `stats`."""
    top = nice(max(one.accepted + one.rejected for one in stats.histogram))
    floor = HEIGHT - BOTTOM
    scale = (floor - TOP) / top
    bars = []
    for one in stats.histogram:
        x, end = axis.x(one.low), axis.x(one.high)
        accepted, rejected = one.accepted * scale, one.rejected * scale
        bars.append(
            Bar(
                x=x,
                width=max(end - x - 1, 0.5),
                accepted_y=floor - accepted,
                accepted_height=accepted,
                rejected_y=floor - accepted - rejected,
                rejected_height=rejected,
                label=f"{one.low:,} to {one.high - 1:,} tokens: "
                f"{one.accepted:,} accepted, {one.rejected:,} rejected",
            )
        )
    output = stats.tokens["output"].all
    values = {"median": output.median, "mean": output.mean, "p95": output.quantiles["p95"]}
    marks = []
    for row, (mark, value) in enumerate(values.items()):
        x, label = axis.x(value or 0), f"{mark} {words.number(value)}"
        anchor = "end" if x + 4 + len(label) * LETTER > WIDTH else "start"
        marks.append(Mark(name=mark, x=x, label=label, label_y=(row + 1) * MARK_ROW - 2, anchor=anchor))
    said = ", ".join(mark.label for mark in marks)
    return Chart(
        title=name,
        text=f"Histogram of output tokens per response of {name} on a logarithmic axis: {stats.accepted.rows:,} accepted "
        f"and {stats.rejected.rows:,} rejected responses; {said} tokens, longest {words.number(output.max)}.",
        bars=bars,
        marks=marks,
        x_ticks=axis.ticks(),
        y_ticks=[
            (floor - count * scale, f"{count:,}") for count in (0, top // 2, top) if count or not top % 2
        ],
    )


def nice(count: int) -> int:
    """The next round even number that is not below `count`, for the top of an axis."""
    power = int(10 ** max(len(str(count)) - 2, 0))
    return next(lead * power for lead in ROUND if lead * power >= count)
