"""From completions and tokens to hours, and from the journal's timing to rates.

Projections are plain arithmetic on means. Rates are measured on the union of busy time: latencies of requests
that ran side by side are not added up, and gaps with nothing in flight (a pause, a night between two sessions)
do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

FULL_SHARE = 0.9  # of the peak of requests in flight; from there on the server counts as full

Floats = npt.NDArray[np.float64]
Times = Sequence[float] | Floats


def minutes(rows: int, completions_per_minute: float) -> float:
    """Minutes to get one completion for each of `rows` at a steady rate."""
    return rows / completions_per_minute


def token_rate(completions_per_minute: float, mean_tokens: float) -> float:
    """Output tokens per second of so many completions per minute, `mean_tokens` long on average."""
    return completions_per_minute * mean_tokens / 60


def planned_tokens(rows: int, mean_tokens: float, budget: float | None = None) -> float:
    """Output tokens that `rows` prompts will yield: their mean length each, or the budget if that is less."""
    whole = rows * mean_tokens
    return whole if budget is None else min(whole, budget)


def hours(tokens: float, tokens_per_second: float) -> float:
    """Hours to generate `tokens` at a steady rate in tokens per second."""
    return tokens / tokens_per_second / 3600


class Pace(Struct, frozen=True, kw_only=True):
    """What was done in a stretch of time. seconds: busy time only. The rates are null if there was none.

    A reply that lies partly inside the stretch counts with that share of its tokens and of itself, as if its
    tokens had come evenly.
    """

    seconds: float
    completions: float
    output_tokens: float
    tokens_per_second: float | None
    completions_per_minute: float | None


class Throughput(Struct, frozen=True, kw_only=True):
    """Rates over the whole run, while the server was full, and over the drain.

    full: at least 90 % of the peak of requests in flight. drain: from the start of the last request on.
    """

    peak_in_flight: int
    run: Pace
    full: Pace
    drain: Pace


def throughput(started: Times, finished: Times, tokens: Sequence[int] | npt.NDArray[np.int64]) -> Throughput:
    """Rates of replies that were in flight from `started` to `finished`, in Unix s.

    tokens: output tokens of each reply.
    """
    begin, amounts = np.asarray(started, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    if not len(begin):
        none = _pace(0.0, 0.0, 0.0)
        return Throughput(peak_in_flight=0, run=none, full=none, drain=none)
    # Unix time is too large a number to take small differences of; and a clock may have been set back.
    end = np.maximum(np.asarray(finished, dtype=np.float64), begin) - begin.min()
    begin = begin - begin.min()
    lasted = end - begin
    speed = np.divide(1.0, lasted, out=np.zeros_like(lasted), where=lasted > 0)

    # Between two neighbouring instants the set of replies in flight does not change.
    instants, where = np.unique(np.concatenate([begin, end]), return_inverse=True)
    widths = np.diff(instants)
    first, last = where[: len(begin)], where[len(begin) :]

    def in_each(amount: Floats) -> Floats:
        """Sum of `amount` over the replies in flight, for each stretch between instants."""
        size = len(instants)
        steps = np.bincount(first, amount, size) - np.bincount(last, amount, size)
        return np.asarray(np.cumsum(steps)[:-1], dtype=np.float64)

    in_flight = np.rint(in_each(np.ones_like(begin)))
    completed, generated = in_each(speed) * widths, in_each(speed * amounts) * widths
    peak = int(in_flight.max()) if len(in_flight) else 0

    def over(chosen: npt.NDArray[np.bool_]) -> Pace:
        seconds, completions, output = (part[chosen].sum() for part in (widths, completed, generated))
        return _pace(float(seconds), float(completions), float(output))

    return Throughput(
        peak_in_flight=peak,
        run=_pace(float(widths[in_flight > 0].sum()), float(len(begin)), float(amounts.sum())),
        full=over((in_flight > 0) & (in_flight >= FULL_SHARE * peak)),
        drain=over((in_flight > 0) & (instants[:-1] >= begin.max())),
    )


def come_by(instants: Floats, start: Floats, end: Floats, amount: Floats) -> Floats:
    """How much of the replies' `amount` had come by each of `instants`, if it came evenly from `start` to `end`."""
    lasted = np.maximum(end - start, 1e-9)
    return np.array([(amount * np.clip((instant - start) / lasted, 0, 1)).sum() for instant in instants])


def _pace(seconds: float, completions: float, output_tokens: float) -> Pace:
    busy = seconds > 0
    return Pace(
        seconds=seconds,
        completions=completions,
        output_tokens=output_tokens,
        tokens_per_second=output_tokens / seconds if busy else None,
        completions_per_minute=completions / seconds * 60 if busy else None,
    )
