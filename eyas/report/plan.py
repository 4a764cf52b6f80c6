"""The plan for people: what it says, as sentences and tables; plan.md and plan.html made of them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
from msgspec import Struct

from eyas.projection import Expected, Interval, Projection, Run
from eyas.report import charts
from eyas.report.charts import Drawing
from eyas.report.markdown import table
from eyas.report.words import moment, number, percent
from eyas.whatif import Lever


class Done(Struct, frozen=True, kw_only=True):
    """What was in the journal of the full run. hours: with one of these answers in flight; adopted ones are in no time.

    at: when the pilots counted it, the first of them, Unix time in s. A run that goes on leaves the plan as it is.
    """

    at: float
    answers: int
    output_tokens: int
    hours: float


class Plan(Struct, frozen=True, kw_only=True):
    """plan.json. done: before the run goes on. servers: ids of the manifests that the speed belongs to. binding: which setting bounds how many requests
    run, null where a server does not tell. queue_full: whether the pilot ever kept the server as busy as it could; if not, the
    speed is that of its busiest stretch. pilot_minutes: with a request of the pilot in flight.
    levers: settings to change, the one that saves most hours first.
    """

    servers: list[str]
    done: Done
    pilot_minutes: float
    queue_full: bool
    binding: str | None
    projection: Projection
    levers: list[Lever]


@dataclass(frozen=True)
class Table:
    """A table with a title. The first column names, the others are numbers but for those in `text`. notes: how to read it."""

    title: str
    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: str
    text: Sequence[str] = ()


def lead(plan: Plan) -> str:
    """The answer to "how long?", in a sentence; before it one that nothing is left, where that is so."""
    projection = plan.projection
    done = ""
    if _nothing_left(projection.full):
        done = f"Nothing is left to ask: all {number(plan.done.answers)} answers are in the journal. "
    elif _finished(plan):
        done = "Nothing is left to ask: the budgets are reached. "
    full = f"{done}The full run takes {hours(projection.full.total.hours)}"
    if projection.budgeted is None:
        return f"{full}."
    return f"{full}; until the budgets are reached it is {hours(projection.budgeted.total.hours)}."


def _nothing_left(run: Run) -> bool:
    return run.remaining_hours.high == 0


def _finished(plan: Plan) -> bool:
    """Whether the run that will be made, the one with budgets where there are any, has all its answers."""
    return _nothing_left(plan.projection.budgeted or plan.projection.full)


def _remaining(run: Run) -> str:
    return "nothing" if _nothing_left(run) else hours(run.remaining_hours)


def hours(value: Interval) -> str:
    """Hours or, where they are few, minutes, with the 90 % interval."""
    size, unit, digits = (1.0, "h", 1) if value.mean >= 2 else (1 / 60, "min", 0 if value.mean > 1 / 6 else 1)
    low, mean, high = (f"{part / size:,.{digits}f}" for part in (value.low, value.mean, value.high))
    return f"{mean} {unit} ({low} to {high})"


def count(value: Interval) -> str:
    """A count with its interval, or alone where it is as good as certain."""
    return _within(value, _short)


def _short(value: float) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M")):
        if value >= size:
            return f"{value / size:,.3g}{unit}"
    return number(value)


def share(value: Interval) -> str:
    """A share with its interval, or alone where it is as good as certain."""
    return _within(value, percent)


def _within(value: Interval, told: Callable[[float], str]) -> str:
    low, mean, high = told(value.low), told(value.mean), told(value.high)
    return mean if low == high else f"{mean} ({low} to {high})"


def facts(plan: Plan) -> list[str]:
    """What the numbers rest on, a sentence each."""
    projection = plan.projection
    pilot, drift = sum(projection.pilot.values()), projection.drift
    rate = projection.tokens_per_second
    servers = f"server{'s' * (len(plan.servers) > 1)} {', '.join(server[:8] for server in plan.servers)}"
    found = [
        f"Measured by {number(pilot)} answers in {plan.pilot_minutes:,.1f} minutes on {servers}, "
        f"with {projection.running:,.0f} requests running: {number(rate.mean)} tokens/s while they are busy "
        f"({number(rate.low)} to {number(rate.high)}).",
        f"Not measurable in a pilot, so assumed: the speed wanders by {drift.sd:.0%} with a correlation time of {drift.hours:g} h "
        f"(plan.drift_sd, plan.drift_hours).",
    ]
    done = plan.done
    if done.answers:
        left = [f"{name} takes {_remaining(run)} more" for name, run in _runs(plan).items()]
        found.insert(
            0,
            f"Done when the pilot counted, {moment(done.at)}: {number(done.answers)} answers of "
            f"{count(projection.full.total.responses)}, {number(done.output_tokens)} output tokens in "
            f"{hours(_certain(done.hours)).partition(' (')[0]} of server time (`eyas status` tells what is done now). "
            f"Remaining then: the {', the run '.join(left)}.",
        )
    if not plan.queue_full:
        found.append(
            "The pilot was too small to keep the server busy for long, so the run may well be faster: ask more prompts (plan.prompts)."
        )
    if projection.still_running:
        found.append(
            f"{number(projection.still_running)} answers still ran when the pilot was stopped; they count as longer than they were, not as short."
        )
    if plan.binding:
        found.append(f"{plan.binding[:1].upper()}{plan.binding[1:]}.")
    return found


def tables(plan: Plan) -> list[Table]:
    """Everything else."""
    projection = plan.projection
    made = [_datasets("The full run", projection.full)]
    if projection.budgeted:
        made.append(_datasets("Until the budgets are reached", projection.budgeted))
    runs = _runs(plan)
    made.append(
        Table(
            "What it takes",
            "All datasets together",
            ["quantity", *runs],
            [
                ["time that remains", *(_remaining(run) for run in runs.values())],
                *(
                    [name, *(told(run.total) for run in runs.values())]
                    for name, told in _TOTALS.items()
                    if any(told(run.total) for run in runs.values())
                ),
            ],
            "Hours come from generated tokens: rejected answers and what goes beyond a budget are in them.",
        )
    )
    made.append(_levers(plan.levers, finished=_finished(plan)))
    return made


def _levers(levers: Sequence[Lever], *, finished: bool) -> Table:
    return Table(
        "What else could be set",
        "Each setting changed alone",
        ["change", "time", "saved", "tokens/s", "what it costs"],
        [
            [
                f"{one.setting} {one.value}",
                hours(one.hours),
                _saved(one),
                number(one.tokens_per_second),
                one.cost,
            ]
            for one in levers
        ],
        "By a model of the server that is fitted to the pilot; a minus means that it takes longer."
        + (" Nothing is left to ask here: only another run would gain by these." if finished else ""),
        ["what it costs"],
    )


def _saved(lever: Lever) -> str:
    """Hours or, where they are few, minutes, as finely as the hours of the run are told."""
    if abs(lever.saved_hours) >= 1:
        return f"{lever.saved_hours:+,.1f} h"
    size = f"{60 * lever.saved_hours:+.{0 if lever.hours.mean > 1 / 6 else 1}f}"
    return f"{size} min" if float(size) else "nothing"


def _disk(value: Interval | None) -> str:
    if value is None:
        return ""
    size, unit = (1e12, "TB") if value.mean >= 1e12 else (1e9, "GB") if value.mean >= 1e9 else (1e6, "MB")
    return f"{value.mean / size:,.3g} {unit} ({value.low / size:,.3g} to {value.high / size:,.3g})"


_TOTALS: dict[str, Callable[[Expected], str]] = {
    "answers": lambda one: count(one.responses),
    "prompt tokens": lambda one: count(one.prompt_tokens),
    "reasoning tokens": lambda one: count(one.reasoning_tokens),
    "answer tokens": lambda one: count(one.answer_tokens),
    "accepted tokens, which training gets": lambda one: count(one.accepted_tokens),
    "GPU-hours": lambda one: (
        f"{one.gpu_hours.mean:,.1f} ({one.gpu_hours.low:,.1f} to {one.gpu_hours.high:,.1f})"
        if one.gpu_hours
        else ""
    ),
    "disk for journal and responses": lambda one: _disk(one.responses_disk),
    "disk for the training set": lambda one: _disk(one.train_disk),
    "disk for hidden states, if a trainer keeps them": lambda one: _disk(one.hidden_disk),
}


def _datasets(title: str, run: Run) -> Table:
    def row(name: str, one: Expected) -> list[str]:
        naive = "–" if one.naive_hours is None else hours(_certain(one.naive_hours)).partition(" (")[0]
        return [
            name,
            count(one.responses),
            count(one.output_tokens),
            hours(one.hours),
            naive,
            share(one.acceptance),
            share(one.at_limit),
        ]

    return Table(
        title,
        f"{title}, by dataset",
        ["dataset", "answers", "output tokens", "time", "by count ÷ rate", "accepted", "at the limit"],
        [*(row(name, one) for name, one in run.datasets.items()), row("total", run.total)],
        f"In brackets the 90 % interval. The total has the drain of {hours(run.drain_hours)}, when fewer and fewer requests run, or a narrow lane is left alone. "
        "Count ÷ rate is what one gets without looking at lengths.",
    )


def _certain(value: float) -> Interval:
    return Interval(low=value, mean=value, high=value)


def markdown(plan: Plan) -> str:
    """plan.md: tables whose columns line up in a terminal."""
    blocks = ["# Plan", f"**{lead(plan)}**", "\n".join(f"- {fact}" for fact in facts(plan))]
    for one in tables(plan):
        blocks += [f"## {one.title}", table(one.heads, one.rows), *([one.notes] if one.notes else [])]
    return "\n\n".join(blocks) + "\n"


# --- the page ----------------------------------------------------------------------------------------------------


def page(plan: Plan, model: str) -> str:
    """plan.html: one page that needs no network and no script."""
    return charts.render(
        "plan.html.j2",
        plan=plan,
        model=model,
        version=importlib.metadata.version("eyas"),
        lead=lead(plan),
        facts=facts(plan),
        tables=tables(plan),
        runs=_runs(plan),
        hours=_hours_chart(plan),
    )


def _runs(plan: Plan) -> dict[str, Run]:
    runs = {"full run": plan.projection.full, "with budgets": plan.projection.budgeted}
    return {name: run for name, run in runs.items() if run is not None}


def _hours_chart(plan: Plan) -> Drawing:
    """Time by dataset, of the run that will be made: the one with budgets, where there are any."""
    name, run = list(_runs(plan).items())[-1]
    longest = max(one.hours.high for one in run.datasets.values())
    size, unit = (1.0, "hours") if longest >= 2 else (1 / 60, "minutes")
    rows = [
        {
            "name": dataset,
            "told": hours(one.hours),
            **{part: getattr(one.hours, part) / size for part in ("low", "mean", "high")},
        }
        for dataset, one in run.datasets.items()
    ]
    said = "; ".join(f"{row['name']} {row['told']}" for row in rows)
    return charts.draw(
        f"Time by dataset, {name}, with its 90 % interval",
        f"{said}.",
        lambda width: _intervals(rows, width, unit),
    )


def _intervals(rows: Sequence[dict[str, Any]], width: int, axis: str) -> Any:
    """A bar from 0 to the mean for each row, and a line from low to high, under its name."""
    step, thick = 40, 12
    values = [
        {
            **row,
            "at": place * step + 10,
            "y": place * step + 20,
            "y2": place * step + 20 + thick,
            "middle": place * step + 26,
            "zero": 0,
        }
        for place, row in enumerate(rows)
    ]
    data = alt.InlineData(values=values)
    base, y = alt.Chart(data), alt.Y("at:Q", scale=None, axis=None)
    x = alt.X(
        "zero:Q",
        scale=alt.Scale(domainMin=0, nice=True),
        title=axis,
        axis=alt.Axis(tickCount=4 if width < 400 else 8, domain=False, ticks=False),
    )
    bar = base.mark_rect(cornerRadius=2, fill=charts.ANSWER).encode(
        x=x, x2="mean:Q", y=alt.Y("y:Q", scale=None, axis=None), y2="y2:Q", description="told:N"
    )
    line = base.mark_rule(stroke=charts.INK, strokeWidth=2).encode(
        x=alt.X("low:Q"), x2="high:Q", y=alt.Y("middle:Q", scale=None, axis=None)
    )
    names = base.mark_text(align="left", baseline="middle", fontWeight=600, aria=False).encode(
        x=alt.value(0), y=y, text="name:N"
    )
    told = base.mark_text(align="right", baseline="middle", fill=charts.QUIET, aria=False).encode(
        x=alt.value("width"), y=y, text="told:N"
    )
    return charts.sized(alt.layer(bar, line, names, told), width, max(len(rows) * step, 1))
