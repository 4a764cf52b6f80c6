"""Whether a plan's intervals are true: made-up campaigns, a pilot of each, and the hours that it promised.

Full size: 1,000 campaigns of the first world and 200 of the others; otherwise 60 with loose bounds, and three of the others. Of small
pilots, where each dataset counts for itself, 250 campaigns, else 40 with loose bounds.
EYAS_BENCH_CAMPAIGNS sets the number for all, EYAS_BENCH_SEED the first seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from campaigns import BUDGET, LIMIT, PILOT, SLOTS, Campaign, Dataset, Floats, World, campaign, datasets_of

from eyas.projection import Answers, Drift, Interval, Machine, Observed, Projection, Store, Windows, project

FULL, SMALL = 1_000, 60  # campaigns of the world that counts
OTHER_FULL, OTHER_SMALL = 200, 3
FEW_FULL, FEW_SMALL = 250, 40  # campaigns, of eight datasets each
# Answers of a small pilot, and rows of a dataset; 3 of 8 is what a first try looks like.
FEW = [(3, 2_000), (5, 2_000), (8, 2_000), (3, 8)]

# The first is what is asserted; the others tell how much it depends on the shape of the lengths.
WORLDS = {
    "mixed": World(),
    "lognormal": World(families=("lognormal",)),
    "pareto": World(families=("pareto",)),
    "bimodal": World(families=("bimodal",)),
    "short answers": World(typical=(400.0, 1_600.0)),
    "sigma 0.8": World(families=("lognormal",), sigma=0.8),
    "sigma 1.5": World(families=("lognormal",), sigma=1.5),
}


@dataclass(frozen=True)
class Score:
    """Of 90 % intervals: share that covers the truth; median width and absolute error by estimate and truth; mean interval
    score by truth (Gneiting and Raftery 2007: width, and 20 times what is missed)."""

    coverage: float
    width: float
    error: float
    interval_score: float

    @classmethod
    def of(cls, truths: list[float], intervals: list[Interval]) -> Score:
        truth = np.array(truths)
        low, mean, high = np.array([(one.low, one.mean, one.high) for one in intervals]).T
        missed = np.maximum(low - truth, 0) + np.maximum(truth - high, 0)
        return cls(
            coverage=float(np.mean(missed == 0)),
            width=float(np.median((high - low) / mean)),
            error=float(np.median(np.abs(mean / truth - 1))),
            interval_score=float(np.mean((high - low + 20 * missed) / truth)),
        )


def observed(datasets: list[Dataset], count: int, budget: int | None) -> list[Observed]:
    """What a pilot of `count` answers sees of each dataset."""
    return [
        Observed(
            dataset=f"d{at}",
            sizes=one.sizes,
            max_new_tokens=LIMIT,
            budget_tokens=budget,
            answers=Answers(
                sizes=one.sizes[:count],
                prompt_tokens=one.sizes[:count],
                output_tokens=one.lengths[:count],
                reasoning_tokens=np.rint(one.lengths[:count] / 2),
                ended=np.ones(count, dtype=bool),
                cut=one.lengths[:count] >= LIMIT,
                accepted=one.accepted[:count],
            ),
        )
        for at, one in enumerate(datasets)
    ]


def windows_of(rates: Floats) -> Windows:
    """A pilot of so many minutes, at these tokens/s."""
    filled: Floats = np.ones(len(rates))
    return Windows(
        hours=(np.arange(len(rates)) + 0.5) / 60,
        tokens_per_second=rates,
        completions_per_minute=26 * filled,
        running=SLOTS * filled,
        queued=filled > 0,
    )


def planned(made: Campaign, draws: int) -> Projection:
    seen = observed(made.datasets, PILOT, BUDGET)
    store = Store(response_bytes=1.0, train_bytes=1.0)
    return project(seen, windows_of(made.pilot_rates), Machine(), store, draws=draws)


def scores(world: World, seeds: range, draws: int) -> dict[str, Score]:
    """Of hours of full and of budgeted runs, and of the tokens of full ones."""
    truths: dict[str, list[float]] = {"full": [], "budgeted": [], "tokens": []}
    told: dict[str, list[Interval]] = {"full": [], "budgeted": [], "tokens": []}
    for seed in seeds:
        made = campaign(world, seed)
        plan = planned(made, draws)
        assert plan.budgeted is not None
        for kind, truth, interval in (
            ("full", made.hours, plan.full.total.hours),
            ("budgeted", made.budgeted_hours, plan.budgeted.total.hours),
            ("tokens", made.tokens, plan.full.total.output_tokens),
        ):
            truths[kind].append(truth)
            told[kind].append(interval)
    return {kind: Score.of(truths[kind], told[kind]) for kind in truths}


@pytest.mark.parametrize("name", WORLDS)
def test_intervals_are_true(name: str, full: bool, benchmark: Any, tell: Callable[..., None]) -> None:
    """Hours of full and budgeted runs, and the tokens of full ones, from 64 prompts of each of eight datasets."""
    counts = name == "mixed"
    count = (FULL if full else SMALL) if counts else (OTHER_FULL if full else OTHER_SMALL)
    count = int(os.environ.get("EYAS_BENCH_CAMPAIGNS", count))
    first = int(os.environ.get("EYAS_BENCH_SEED", 0))
    found = benchmark.pedantic(
        scores, args=(WORLDS[name], range(first, first + count), 1_000 if full else 500), rounds=1
    )
    for kind, score in found.items():
        tell(f"plan, {name}, {kind}", **vars(score))
    # Of the error of a full run 5.2 % is the server's drift alone, which no pilot of minutes can see: 5.8 % is what to expect, and
    # 1,000 campaigns tell it to 0.2, so with other seeds it may be found just above 6.
    (low, high), width, error = ((0.86, 0.94), 0.35, 0.06) if full else ((0.75, 1.0), 0.4, 0.09)
    for kind in ("full", "budgeted") if counts else ():
        assert low <= found[kind].coverage <= high
        assert found[kind].width <= width
        assert found[kind].error <= error


def few_scores(world: World, seeds: range, count: int, rows: int) -> dict[str, Score]:
    """Of what each dataset takes, and all together, as a pilot of `count` answers of each tells."""
    truths: dict[str, list[float]] = {"output": [], "accepted": [], "total": []}
    told: dict[str, list[Interval]] = {"output": [], "accepted": [], "total": []}
    store = Store(response_bytes=1.0, train_bytes=1.0)
    for seed in seeds:
        made = datasets_of(world, rows, seed)
        seen = observed(made, count, None)
        plan = project(
            seen, windows_of(np.full(10, 1_000.0)), Machine(), store, Drift(sd=0.0), draws=500
        ).full
        for one, part in zip(made, plan.datasets.values(), strict=True):
            truths["output"].append(float(one.lengths.sum()))
            told["output"].append(part.output_tokens)
            truths["accepted"].append(float(one.lengths @ one.accepted))
            told["accepted"].append(part.accepted_tokens)
        truths["total"].append(sum(float(one.lengths.sum()) for one in made))
        told["total"].append(plan.total.output_tokens)
    return {kind: Score.of(truths[kind], told[kind]) for kind in truths}


@pytest.mark.parametrize(("count", "rows"), FEW)
@pytest.mark.parametrize("name", ["mixed", "pareto", "bimodal"])
def test_intervals_of_a_small_pilot_are_true(
    name: str, count: int, rows: int, full: bool, benchmark: Any, tell: Callable[..., None]
) -> None:
    """Tokens of each dataset, from three to eight of its answers."""
    campaigns = int(os.environ.get("EYAS_BENCH_CAMPAIGNS", FEW_FULL if full else FEW_SMALL))
    first = int(os.environ.get("EYAS_BENCH_SEED", 0))
    seeds = range(first, first + campaigns)
    found = benchmark.pedantic(few_scores, args=(WORLDS[name], seeds, count, rows), rounds=1)
    for kind, score in found.items():
        tell(f"plan, {name}, {count} of {rows}, {kind}", **vars(score))
    low, high = (0.83, 0.97) if full else (0.78, 0.99)
    for kind in ("output", "accepted"):
        assert low <= found[kind].coverage <= high
