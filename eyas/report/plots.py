"""The charts of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import altair as alt

from eyas.report import charts, words
from eyas.report.charts import ACCEPTED, ANSWER, INK, QUIET, REASONING, REJECTED, Drawing
from eyas.report.figures import Part, StageUse
from eyas.stats import Bin, DatasetStats
from eyas.timeline import Timeline

MARK_ROW = 16  # px of one row of labels above the bars
LETTER = 7.5  # px, at least the width of a letter of such a label
DASHES = {"median": [], "mean": [6, 3], "p95": [2, 2], "limit": [8, 3, 2, 3]}


# --- lengths -----------------------------------------------------------------------------------------------------


def lengths(stats: Mapping[str, DatasetStats], limits: Mapping[str, int]) -> list[Drawing]:
    """One histogram per dataset that has answers, all on the same axis of tokens so that they can be compared.

    limits: the most new tokens of an answer, by dataset.
    """
    filled = {name: one for name, one in stats.items() if one.histogram}
    if not filled:
        return []
    bins = [one for each in filled.values() for one in each.histogram]
    domain = (
        2 ** math.floor(math.log2(_shown(min(one.low for one in bins)))),
        2 ** math.ceil(math.log2(max(*(one.high for one in bins), *(limits[name] for name in filled)))),
    )
    return [_histogram(name, one, limits[name], domain) for name, one in filled.items()]


def _shown(tokens: float) -> float:
    """Zero has no place on a logarithmic axis; it is shown in the octave below one."""
    return max(tokens, 0.5)


def _histogram(name: str, stats: DatasetStats, limit: int, domain: tuple[float, float]) -> Drawing:
    output = stats.tokens["output"].all
    values = {"median": output.median, "mean": output.mean, "p95": output.quantiles["p95"], "limit": limit}
    marks = [(mark, float(value or 0)) for mark, value in values.items()]
    said = ", ".join(f"{mark} {words.number(value)}" for mark, value in marks)
    about = (
        f"histogram of output tokens per response on a logarithmic axis: {stats.accepted.rows:,} accepted and "
        f"{stats.rejected.rows:,} rejected responses; {said} tokens, longest {words.number(output.max)}."
    )
    return charts.draw(
        name, about, lambda width: _histogram_of(stats.histogram, marks, domain, width), charts.HALF
    )


def _histogram_of(
    bins: Sequence[Bin], marks: Sequence[tuple[str, float]], domain: tuple[float, float], width: int
) -> Any:
    top, height = len(marks) * MARK_ROW + 6, 210
    rows = []
    for one in bins:
        told = f"{one.low:,} to {one.high - 1:,} tokens: {one.accepted:,} accepted, {one.rejected:,} rejected"
        span = {"low": _shown(one.low), "high": _shown(one.high), "told": told}
        ends = (("accepted", 0, one.accepted), ("rejected", one.accepted, one.accepted + one.rejected))
        rows += [{**span, "what": what, "y": y, "y2": y2} for what, y, y2 in ends if y2 > y]
    counts = whole_ticks(max(one.accepted + one.rejected for one in bins))
    octaves = math.log2(domain[1] / domain[0])
    ticks = [
        domain[0] * 2**at for at in range(0, round(octaves) + 1, math.ceil((octaves + 1) / (width / 62)))
    ]
    x = alt.X(
        "low:Q",
        scale=alt.Scale(type="log", base=2, domain=list(domain), nice=False),
        axis=alt.Axis(
            values=[tick for tick in ticks if tick >= 1], format=",d", grid=False, labelOverlap=False
        ),
        title="output tokens",
    )
    drawn = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_rect(stroke=charts.CARD, strokeWidth=0.5)
        .encode(
            x=x,
            x2="high:Q",
            y=alt.Y(
                "y:Q",
                scale=alt.Scale(domain=[0, counts[-1]], range=[height, top]),
                axis=alt.Axis(values=counts, format=",d", domain=False, ticks=False, minExtent=30),
                title=None,
            ),
            y2="y2:Q",
            color=_colours({"accepted": ACCEPTED, "rejected": REJECTED}, "what"),
            description="told:N",
        )
    )
    plot = width - 40  # what the axis leaves, about
    layers: list[alt.Chart] = [drawn]
    places = {mark: math.log2(_shown(value) / domain[0]) / octaves * plot for mark, value in marks}
    labels = {mark: f"{mark} {words.number(value)}" for mark, value in marks}
    values, lefts = dict(marks), _left(places, labels, plot)
    # A line goes down from its label, so it crosses none of those below that are on its own side, the outer ones first.
    inwards = sorted(places, key=lambda mark: (places[mark], mark))
    order = [mark for mark in reversed(inwards) if mark in lefts]
    order += [mark for mark in inwards if mark not in lefts]
    for row, mark in enumerate(order):
        value, label, to_left = values[mark], labels[mark], mark in lefts
        data = alt.Chart(
            alt.InlineData(
                values=[{"x": _shown(value), "y": row * MARK_ROW + 2, "y2": height, "label": label}]
            )
        )
        pixel = alt.Y("y:Q", scale=None, axis=None)
        place = alt.X("x:Q")
        layers.append(
            data.mark_rule(stroke=INK, strokeDash=DASHES[mark], aria=False).encode(
                x=place, y=pixel, y2="y2:Q"
            )
        )
        layers.append(
            data.mark_text(
                align="right" if to_left else "left", dx=-4 if to_left else 4, baseline="top", aria=False
            ).encode(x=place, y=pixel, text="label:N")
        )
    return charts.sized(alt.layer(*layers).resolve_scale(y="independent"), width, height)


def _left(places: Mapping[str, float], labels: Mapping[str, str], plot: float) -> set[str]:
    """The marks whose labels stand to the left of their lines: there is no room for them on the right, up to the plot's end or
    the line of another such mark. places: px of each line."""
    lefts: set[str] = set()
    end = plot
    for mark in sorted(places, key=places.__getitem__, reverse=True):
        size = 4 + len(labels[mark]) * LETTER
        if places[mark] + size > end and places[mark] >= size:
            lefts.add(mark)
            end = places[mark]
    return lefts


def whole_ticks(most: int) -> list[int]:
    """Round whole numbers from 0 to the first that is not below `most`, at most four steps."""
    step = next(lead * 10**power for power in range(20) for lead in (1, 2, 5) if lead * 10**power * 4 >= most)
    return list(range(0, most + step, step)) if most % step else list(range(0, most + 1, step))


def _colours(colours: Mapping[str, str], field: str) -> alt.Color:
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return alt.Color(f"{field}:N", scale=scale, legend=None)


# --- reasoning, acceptance, budget -------------------------------------------------------------------------------


def reasoning(parts: Mapping[str, Part]) -> Drawing | None:
    """Mean reasoning and answer tokens of a response, for each dataset."""
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "told": f"{words.percent(part.reasoning_tokens / part.output_tokens)} reasoning",
            "reasoning": part.reasoning_tokens / part.responses,
            "answer": part.answer_tokens / part.responses,
        }
        for name, part in parts.items()
        if part.output_tokens
    ]
    if not rows:
        return None
    said = "; ".join(
        f"{row['name']} {words.number(row['reasoning'])} + {words.number(row['answer'])}" for row in rows
    )
    colours = {"reasoning": REASONING, "answer": ANSWER}
    return charts.draw(
        "Reasoning and answer, mean tokens of a response",
        f"stacked bars, reasoning + answer: {said}.",
        lambda width: charts.bars(rows, colours, width, axis="tokens of a response, mean"),
    )


def acceptance(buckets: Sequence[Bin]) -> Drawing | None:
    """What share of the answers of each length the checks accept, over all datasets."""
    rows: list[dict[str, Any]] = [
        {
            "bucket": f"{one.low:,}–{one.high - 1:,}" if one.high - one.low > 1 else f"{one.low:,}",
            "accepted": one.accepted / (one.accepted + one.rejected),
            "count": words.number(one.accepted + one.rejected),
            "told": f"{one.low:,} to {one.high - 1:,} tokens: {one.accepted:,} of {one.accepted + one.rejected:,} accepted",
        }
        for one in buckets
        if one.accepted + one.rejected
    ]
    if not rows:
        return None
    said = "; ".join(f"{row['bucket']} {words.percent(row['accepted'])} of {row['count']}" for row in rows)
    return charts.draw(
        "Accepted share by length of the answer",
        f"bars by output tokens: {said}.",
        lambda width: _acceptance(rows, width),
    )


def _acceptance(rows: Sequence[Mapping[str, Any]], width: int) -> Any:
    height, step = 26 * len(rows), 26
    values = [
        {**row, "y": at * step + 4, "y2": at * step + step - 4, "one": 1} for at, row in enumerate(rows)
    ]
    base = alt.Chart(alt.InlineData(values=values))
    y = alt.Y(
        "bucket:N",
        sort=None,
        title="output tokens",
        scale=alt.Scale(paddingInner=0.3, paddingOuter=0.15),
        axis=alt.Axis(domain=False, ticks=False, labelLimit=140, titlePadding=12),
    )
    x = alt.X(
        "accepted:Q",
        scale=alt.Scale(domain=[0, 1.0]),
        axis=alt.Axis(
            format=".0%",
            values=[0, 0.5, 1] if width < 400 else [0, 0.25, 0.5, 0.75, 1],
            domain=False,
            ticks=False,
        ),
        title="accepted",
    )
    layers = [
        base.mark_bar(fill=charts.FAINT, aria=False).encode(y=y, x=alt.X("one:Q", title="accepted")),
        base.mark_bar(fill=ACCEPTED).encode(y=y, x=x, description="told:N"),
        base.mark_text(align="right", dx=-6, aria=False, fill=INK).encode(
            y=y, x=alt.value("width"), text="count:N"
        ),
    ]
    return charts.sized(alt.layer(*layers), width, height)


def budgets(parts: Mapping[str, Part]) -> Drawing | None:
    """How much of its budget each dataset reached; None if none has one."""
    rows = [
        {
            "name": name,
            "told": f"{words.number(part.accepted_tokens)} of {words.number(part.budget_tokens)}",
            "accepted": 100 * (part.budget_use or 0),
        }
        for name, part in parts.items()
        if part.budget_tokens
    ]
    if not rows:
        return None
    said = "; ".join(f"{row['name']} {row['accepted']:.1f} %" for row in rows)
    return charts.draw(
        "Accepted tokens, in percent of the budget",
        f"bars: {said}.",
        lambda width: charts.bars(rows, {"accepted": ACCEPTED}, width, axis="percent of the budget"),
    )


# --- time --------------------------------------------------------------------------------------------------------


def course(timeline: Timeline | None) -> list[Drawing]:
    """Output tokens per second, and requests in flight, over the time of the run, with its events as numbered lines."""
    if timeline is None:
        return []
    hour = len(timeline.in_flight) * timeline.width > 3 * 3600
    size, unit = (3600, "hours") if hour else (60, "minutes")
    marks = [
        {"x": event.seconds / size, "n": str(at), "told": event.what}
        for at, event in enumerate(timeline.events, 1)
    ]
    rates = ("Output tokens per second", "tokens/s", timeline.tokens_per_second, ACCEPTED)
    flight = ("Requests in flight", "requests", timeline.in_flight, ANSWER)
    drawings = []
    for title, what, numbers, colour in (rates, flight):
        steps = [
            {
                "x": at * timeline.width / size,
                "x2": (at + 1) * timeline.width / size,
                "y": value,
                "told": f"{at * timeline.width / size:,.3g} to {(at + 1) * timeline.width / size:,.3g} {unit}: {value:,.1f} {what}",
            }
            for at, value in enumerate(numbers)
        ]
        about = f"by {unit} since the first request; at most {max(numbers):,.1f}, {len(marks)} events, listed below."
        make = partial(_steps, steps, marks, colour, f"{unit} since the first request")
        drawings.append(charts.draw(title, about, make))
    return drawings


def _steps(
    steps: Sequence[dict[str, Any]], marks: Sequence[dict[str, Any]], colour: str, axis: str, width: int
) -> Any:
    height, top = 180, 18
    end = steps[-1]["x2"]
    x = alt.X(
        "x:Q",
        scale=alt.Scale(domain=[0, end], nice=False),
        axis=alt.Axis(tickCount=4 if width < 400 else 8, grid=False),
        title=axis,
    )
    drawn = (
        alt.Chart(alt.InlineData(values=list(steps)))
        .mark_rect(fill=colour)
        .encode(
            x=x,
            x2="x2:Q",
            y=alt.Y(
                "y:Q",
                scale=alt.Scale(domainMin=0, nice=True, range=[height, top]),
                axis=alt.Axis(tickCount=4, format=",~r", domain=False, ticks=False, minExtent=40),
                title=None,
            ),
            y2=alt.datum(0),
            description="told:N",
        )
    )
    events = alt.Chart(alt.InlineData(values=_apart(marks, end, width)))
    place = alt.X("x:Q")
    rule = events.mark_rule(stroke=INK, strokeDash=[3, 3], aria=False).encode(
        x=place, y=alt.value(top - 2), y2=alt.value(height)
    )
    label = events.mark_text(baseline="top", fontWeight=600, aria=False).encode(
        x=place, y=alt.value(0), text="label:N"
    )
    return charts.sized(alt.layer(drawn, rule, label), width, height)


def _apart(marks: Sequence[dict[str, Any]], end: float, width: int) -> list[dict[str, Any]]:
    """The events with their numbers; one whose label would lie on the one before has its line alone."""
    placed, free = [], -1.0
    for mark in marks:
        fits = mark["x"] >= free
        placed.append({**mark, "label": mark["n"] if fits else ""})
        if fits:
            free = mark["x"] + 18 / width * end
    return placed


def stages(used: Mapping[str, StageUse]) -> Drawing | None:
    """Wall time of each stage, all its jobs added up."""
    if not used:
        return None
    rows = [
        {
            "name": stage,
            "told": f"{words.duration(use.seconds)}, {words.megabytes(use.peak_memory_mb)}",
            "wall time": use.seconds / 60,
        }
        for stage, use in used.items()
    ]
    said = "; ".join(f"{row['name']} {row['told']}" for row in rows)
    return charts.draw(
        "Wall time of all jobs, and the largest memory of one",
        f"bars: {said}.",
        lambda width: charts.bars(rows, {"wall time": QUIET}, width, axis="minutes"),
    )
