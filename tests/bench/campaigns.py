"""Made-up campaigns whose truth is known: every answer's length, the server's rate in every minute, the moment all is done.

It shares no code with eyas.projection: lengths come from textbook families, the rate from a recursion in steps of a
minute, budgets and the end from handing one answer after the other to a fixed number of slots.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LIMIT = 10_240  # tokens
ROWS = (10_000, 14_714, 10_000, 10_002, 10_000, 15_000, 10_000, 3_572)
PILOT = 64  # prompts per dataset
SLOTS = 50  # requests that run at a time
AT_ONCE = 4  # datasets that share them
BUDGET = 10_000_000  # accepted tokens per dataset, in the budgeted run
MINUTE = 60.0

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class World:
    """What campaigns are drawn from.

    families: a dataset's lengths are of one of them. typical: range of the datasets' medians in tokens (of a bimodal one: of
    the geometric mean of its two modes). sigma: of the lognormal. alpha: of the Pareto. modes: ratio of the bimodal's
    modes. prompts: correlation of the logs of prompt size and length. rate: range of tokens/s; rate_sd, rate_hours: sd and
    correlation time of its log.
    """

    families: tuple[str, ...] = ("lognormal", "pareto", "bimodal")
    typical: tuple[float, float] = (1_000.0, 4_000.0)
    sigma: float = 1.2
    alpha: float = 2.2
    modes: float = 6.0
    prompts: float = 0.3
    rate: tuple[float, float] = (600.0, 1_400.0)
    rate_sd: float = 0.08
    rate_hours: float = 2.0


@dataclass(frozen=True)
class Dataset:
    """Length and verdict of every answer in the fixed order, and the size of its prompt."""

    lengths: Floats
    accepted: Bools
    sizes: Floats


@dataclass(frozen=True)
class Campaign:
    """pilot_rates: tokens/s in each minute of the pilot. tokens, hours: of the whole run; budgeted_…: with BUDGET."""

    datasets: list[Dataset]
    pilot_rates: Floats
    tokens: float
    hours: float
    budgeted_tokens: float
    budgeted_hours: float


def datasets_of(world: World, rows: int, seed: int) -> list[Dataset]:
    """As many datasets as a campaign has, all of so many rows; the same seed gives the same."""
    dice, noise = random.Random(seed), np.random.RandomState(seed)
    return [dataset(world, rows, dice, noise) for _ in ROWS]


def campaign(world: World, seed: int) -> Campaign:
    """One campaign; the same seed gives the same."""
    dice, noise = random.Random(seed), np.random.RandomState(seed)
    datasets = [dataset(world, rows, dice, noise) for rows in ROWS]
    asked = [one.lengths for one in datasets]
    within = [one.lengths[: submitted(one, BUDGET)] for one in datasets]
    tokens, budgeted = (sum(float(one.sum()) for one in run) for run in (asked, within))
    path = wander(world, dice.uniform(*world.rate), tokens, noise)
    done = np.cumsum(path) * MINUTE
    minutes = max(1, int(np.searchsorted(done, sum(float(one[:PILOT].sum()) for one in asked))))
    return Campaign(
        datasets, path[:minutes], tokens, finish(asked, path, noise), budgeted, finish(within, path, noise)
    )


def dataset(world: World, rows: int, dice: random.Random, noise: np.random.RandomState) -> Dataset:
    sizes = noise.standard_normal(rows)
    level = world.prompts * sizes + (1 - world.prompts**2) ** 0.5 * noise.standard_normal(rows)
    low, high = world.typical
    typical = low * (high / low) ** dice.random()
    family = dice.choice(world.families)
    if family == "lognormal":
        lengths = typical * np.exp(world.sigma * level)
    elif family == "pareto":
        lengths = typical * (2 * upper(level)) ** (-1 / world.alpha)
    else:
        thinks = upper(level) < dice.uniform(0.3, 0.7)
        lengths = (
            typical * world.modes ** np.where(thinks, 0.5, -0.5) * np.exp(0.4 * noise.standard_normal(rows))
        )
    accepted = noise.uniform(size=rows) < dice.uniform(0.9, 1.0)
    return Dataset(np.clip(np.rint(lengths), 1, LIMIT), accepted, np.rint(300 * np.exp(0.7 * sizes)) + 1)


def upper(level: Floats) -> Floats:
    """Share of a standard normal above `level` (Abramowitz and Stegun 26.2.17)."""
    t = 1 / (1 + 0.2316419 * np.abs(level))
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    beyond = np.exp(-(level**2) / 2) / (2 * np.pi) ** 0.5 * series
    return np.where(level >= 0, beyond, 1 - beyond)


def submitted(one: Dataset, budget: float) -> int:
    """Answers that are asked for until the accepted ones reach the budget, those in flight counted at the mean so far."""
    slots: list[tuple[float, float]] = []  # when each ends, and its accepted tokens
    useful = (one.lengths * one.accepted).tolist()
    lengths = one.lengths.tolist()
    finished, count, now = 0.0, 0, 0.0
    for at, (length, tokens) in enumerate(zip(lengths, useful, strict=True)):
        while slots and (
            len(slots) >= SLOTS // AT_ONCE
            or finished + len(slots) * (finished / count if count else 0) >= budget
        ):
            now, ended = heapq.heappop(slots)
            finished, count = finished + ended, count + 1
            if finished >= budget:
                return at
        heapq.heappush(slots, (now + length, tokens))
    return len(lengths)


def wander(world: World, base: float, tokens: float, noise: np.random.RandomState) -> Floats:
    """Tokens/s in each minute, for long enough."""
    minutes = int(2 * tokens / base / MINUTE) + 600
    keep = float(np.exp(-MINUTE / 3600 / world.rate_hours))
    kicks = noise.standard_normal(minutes).tolist()
    logs, now = [], kicks[0]
    for kick in kicks:
        logs.append(now)
        now = keep * now + (1 - keep**2) ** 0.5 * kick
    return np.asarray(base * np.exp(world.rate_sd * np.array(logs)))


def finish(asked: list[Floats], path: Floats, noise: np.random.RandomState) -> float:
    """Hours until the last answer: all tokens at the server's rate, and the end, when slots fall idle one by one."""
    tokens = sum(float(one.sum()) for one in asked)
    done = np.concatenate([[0.0], np.cumsum(path) * MINUTE])
    minute = int(np.searchsorted(done, tokens)) - 1
    even = minute * MINUTE + (tokens - done[minute]) / path[minute]
    ends = [0.0] * SLOTS
    for length in noise.choice(np.concatenate(asked), 10 * SLOTS).tolist():
        heapq.heappushpop(ends, ends[0] + length)
    left = np.sort(ends) - min(ends)
    token = SLOTS / path[minute]  # s a request takes for one, with all slots busy
    slower = (np.arange(SLOTS, 0, -1) / SLOTS) ** 0.345  # a step with fewer requests
    drain = float((np.diff(left, prepend=0.0) * slower).sum() * token) - float(left.sum()) / path[minute]
    return (even + drain) / 3600
