"""From a pilot's answers and the server's rate to the whole run: tokens, hours and disk, each with a 90 % interval.

Everything is drawn DRAWS times and told by the 5 %, 95 % and mean of the draws, so parts add up.

Lengths: the pilot's answers get random weights (the Bayesian bootstrap, Rubin 1981), within classes of prompt size
that are weighted as in all prompts. Answers that still ran stand for the lengths that they may reach (`censoring`), and
answers that a small pilot has not met have a weight too (`unseen`).

Rate: the pilot is a short stretch of a server whose speed drifts over hours. The logarithm of the rate is taken as a
mean plus an Ornstein-Uhlenbeck process of known size and correlation time, and the mean rate of the run is predicted
from the pilot's windows by best linear prediction with an unknown mean (universal kriging).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from eyas import censoring, unseen
from eyas.errors import EyasError
from eyas.hours import FULL_SHARE

DRAWS = 4_000
CLASSES, CLASS_LEAST = 4, 16  # classes of prompt size, and the answers that each needs
WINDOWS_LEAST, WINDOWS_MOST = 10, 600
OPEN_POINTS = 16  # by which the length of an answer that still ran is told
NUGGET_LEAST = 0.005  # sd of a window's log rate that is no drift, in windows too few to tell
LOW, HIGH = 5.0, 95.0  # percentiles of the 90 % interval

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


# --- what was seen -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A dataset's pilot answers, arrays of one length n.

    sizes: of their prompts, in the unit of Observed.sizes. prompt_tokens, output_tokens, reasoning_tokens: counts of ids.
    ended: false for an answer that still ran when the pilot was stopped; its output_tokens are those it had by then, and its
    reasoning_tokens, cut and accepted are not looked at. cut: it ended at the limit. accepted: by the checks.
    """

    sizes: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    reasoning_tokens: Floats
    ended: Bools
    cut: Bools
    accepted: Bools

    def __len__(self) -> int:
        return len(self.output_tokens)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A dataset, its prompts and its pilot.

    sizes: of the prompt of every answer that a full run asks for, the pilot's too (samples and turns counted): tokens,
    or characters, or ones if nothing is known. budget_tokens: accepted output tokens, None for no budget. done: answers of the
    full run that are there, the pilot's too. lane: of Machine.ceilings, where there are some.
    """

    dataset: str
    sizes: Floats
    answers: Answers
    max_new_tokens: int
    budget_tokens: int | None = None
    done: int = 0
    lane: str = ""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """How fast the server was, in equal stretches of time; arrays of one length.

    hours: middle of each since the first began. tokens_per_second, completions_per_minute: over all datasets.
    running: requests in flight or, where the server tells, running. queued: whether requests were waiting throughout;
    the others do not count.
    """

    hours: Floats
    tokens_per_second: Floats
    completions_per_minute: Floats
    running: Floats
    queued: Bools


class Drift(Struct, frozen=True, kw_only=True):
    """How the rate wanders over hours, which a short pilot cannot show. sd: of its logarithm. hours: correlation time.

    sd 0: the rate stays as it was.
    """

    sd: float = 0.08
    hours: float = 2.0


class Machine(Struct, frozen=True, kw_only=True):
    """gpus: that the server holds; 0 for one on a CPU. ceilings: requests of each lane that may be in flight; none where all datasets
    share one. exponent: how a decoding step slows with the requests in it, step ~ running^exponent.

    0.345 is a fit to published points of Kimi-K2.6 on eight GPUs; `whatif.step_of` tells that of a server.
    """

    gpus: int = 0
    ceilings: dict[str, int] = {}
    exponent: float = 0.345


class Store(Struct, frozen=True, kw_only=True):
    """Bytes on disk. response_bytes, train_bytes: per prompt and output token, as the pilot's own files have it.

    hidden_size, hidden_layers: of the states that a trainer would keep for each token; None if none are kept.
    """

    response_bytes: float
    train_bytes: float
    hidden_size: int | None = None
    hidden_layers: int = 4  # EAGLE-3: three layers and the last
    hidden_bytes: int = 2  # bf16


# --- what is told ------------------------------------------------------------------------------------------------


class Interval(Struct, frozen=True, kw_only=True):
    """A mean and the 90 % interval about it."""

    low: float
    mean: float
    high: float

    @classmethod
    def of(cls, draws: Floats) -> Interval:
        low, high = np.percentile(draws, [LOW, HIGH])
        return cls(low=float(low), mean=float(draws.mean()), high=float(high))


class Expected(Struct, frozen=True, kw_only=True):
    """One dataset or all of them, in a full or a budgeted run.

    output_tokens are what must be generated: rejected answers and what goes beyond a budget are in it, and hours follow from
    it. accepted_tokens: what training gets. acceptance: of answers; at_limit: share of answers. hours: those that the
    server spends on it; in the total with the drain, the time at the end when fewer and fewer requests run, or those of a narrow lane alone.
    gpu_hours: null without GPUs. disk in bytes. naive_hours: answers ÷ the pilot's completions per minute, as one would count by hand; null without completions.
    """

    responses: Interval
    prompt_tokens: Interval
    reasoning_tokens: Interval
    answer_tokens: Interval
    output_tokens: Interval
    accepted_tokens: Interval
    acceptance: Interval
    at_limit: Interval
    hours: Interval
    gpu_hours: Interval | None
    responses_disk: Interval
    train_disk: Interval
    hidden_disk: Interval | None
    naive_hours: float | None


class Run(Struct, frozen=True, kw_only=True):
    """A run of all datasets. drain_hours: what the total has more than the datasets together. remaining_hours: of the total, for the
    answers that are not there yet."""

    datasets: dict[str, Expected]
    total: Expected
    drain_hours: Interval
    remaining_hours: Interval


class Projection(Struct, frozen=True, kw_only=True):
    """full: every prompt. budgeted: until the budgets are reached; null if no dataset has one.

    tokens_per_second: mean rate of a full run. drift: as assumed. pilot: answers by dataset. running: requests, by time.
    still_running: answers of the pilot that had not ended.
    """

    full: Run
    budgeted: Run | None
    tokens_per_second: Interval
    drift: Drift
    pilot: dict[str, int]
    still_running: int
    running: float


# --- windows -----------------------------------------------------------------------------------------------------


def windows_of(started: Floats, finished: Floats, tokens: Floats, seconds: float = 60.0) -> Windows:
    """Windows of replies that were in flight from `started` to `finished`, in Unix s; tokens: output tokens of each.

    A reply's tokens count evenly over its time. Time with nothing in flight (a night between two sessions) is in no window, though
    in their hours. A window had a queue if on average FULL_SHARE of the most requests were in flight: with a few requests each gap
    between two of them would undo a stricter rule. There are WINDOWS_LEAST to WINDOWS_MOST windows; none without replies.
    """
    if not len(started):
        none = np.empty(0)
        return Windows(
            hours=none,
            tokens_per_second=none,
            completions_per_minute=none,
            running=none,
            queued=np.empty(0, dtype=bool),
        )
    begin = started - started.min()
    end = np.maximum(finished - started.min(), begin + 1e-3)
    instants, where = np.unique(np.concatenate([begin, end]), return_inverse=True)
    first, last = where[: len(begin)], where[len(begin) :]
    widths = np.diff(instants)

    def in_each(amount: Floats) -> Floats:
        """Sum of `amount` over the replies in flight, for each stretch between instants."""
        size = len(instants)
        return np.cumsum(np.bincount(first, amount, size) - np.bincount(last, amount, size))[:-1]

    in_flight = np.rint(in_each(np.ones_like(begin)))
    busy = np.concatenate([[0.0], np.cumsum(widths * (in_flight > 0))])
    count = int(np.clip(round(busy[-1] / seconds), WINDOWS_LEAST, WINDOWS_MOST))
    edges, middles = (
        np.interp(at * busy[-1] / count, busy, instants)
        for at in (np.arange(count + 1), np.arange(count) + 0.5)
    )

    def over(amount: Floats) -> Floats:
        """What a window holds of `amount` per second and reply, by its busy seconds."""
        so_far = np.concatenate([[0.0], np.cumsum(in_each(amount) * widths)])
        rate: Floats = np.diff(np.interp(edges, instants, so_far)) / (busy[-1] / count)
        return rate

    speed = 1 / (end - begin)
    running = over(np.ones_like(begin))
    return Windows(
        hours=middles / 3600,
        tokens_per_second=over(speed * tokens),
        completions_per_minute=over(speed) * 60,
        running=running,
        queued=running >= FULL_SHARE * in_flight.max(),
    )


# --- projecting --------------------------------------------------------------------------------------------------


def project(
    observed: Sequence[Observed],
    windows: Windows,
    machine: Machine,
    store: Store,
    drift: Drift | None = None,
    draws: int = DRAWS,
    last: Sequence[str] | None = None,
) -> Projection:
    """The whole run. The same arguments give the same numbers. last: datasets that run at the end; None if all may.

    Raises EyasError if a dataset has no ended answer, or no window had a queue.
    """
    drift = drift or Drift()
    random = np.random.default_rng(0)
    rate = rates(windows, drift)
    lengths = draw_lengths(observed, random, draws)
    noise = random.standard_normal(draws)
    shares = random.random(draws)  # of the running requests that are of a dataset when its budget is reached
    leftover = random.random((draws, max(1, round(rate.running))))

    def run(*, budgeted: bool) -> tuple[Run, Floats]:
        parts = {
            one.dataset: _amounts(one, lengths[one.dataset], rate.running * shares if budgeted else None)
            for one in observed
        }
        tokens = np.sum([part.output for part in parts.values()], axis=0)
        per_second = rate.draw(float(tokens.mean()), noise)
        ending = {name: part for name, part in parts.items() if last is None or name in last}
        drain = _drain(lengths, ending, rate, machine, leftover) * rate.at_pilot / per_second
        drain = drain + _alone(_by_lane(observed, parts), machine, rate.running, per_second)
        datasets = {
            name: _expected(part, part.output / per_second / 3600, rate, machine, store)
            for name, part in parts.items()
        }
        total = _expected(
            _sum(list(parts.values())), tokens / per_second / 3600 + drain, rate, machine, store
        )
        left = np.sum(
            [parts[one.dataset].output * _left(one, parts[one.dataset]) for one in observed], axis=0
        )
        remaining = left / per_second / 3600 + np.where(left > 0, drain, 0.0)
        made = Run(
            datasets=datasets,
            total=total,
            drain_hours=Interval.of(drain),
            remaining_hours=Interval.of(remaining),
        )
        return made, per_second

    full, per_second = run(budgeted=False)
    return Projection(
        full=full,
        budgeted=run(budgeted=True)[0] if any(one.budget_tokens for one in observed) else None,
        tokens_per_second=Interval.of(per_second),
        drift=drift,
        pilot={one.dataset: len(one.answers) for one in observed},
        still_running=sum(int((~one.answers.ended).sum()) for one in observed),
        running=rate.running,
    )


# --- rate --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """The pilot's rate in tokens/s, and what it says about a longer run. running: requests at that rate."""

    at_pilot: float
    completions: float  # per minute
    running: float
    hours: Floats  # of the windows
    logs: Floats
    nugget: float
    drift: Drift

    def draw(self, tokens: float, noise: Floats) -> Floats:
        """Draws of the mean rate, in tokens/s, of a run of so many tokens that starts when the pilot ends."""
        horizon = tokens / self.at_pilot / 3600
        mean, sd = predict(self.hours, self.logs, self.nugget, self.drift, horizon)
        return np.exp(mean + sd * noise)


def rates(windows: Windows, drift: Drift) -> Rate:
    """From the windows with a queue. Raises EyasError if there is none."""
    used = windows.queued & (windows.tokens_per_second > 0)
    if not used.any():
        raise EyasError(
            "the pilot never kept the server's queue filled, so its throughput is unknown; "
            "ask more prompts (plan.prompts) or lower server.concurrency"
        )
    logs = np.log(windows.tokens_per_second[used])
    return Rate(
        at_pilot=float(windows.tokens_per_second[used].mean()),
        completions=float(windows.completions_per_minute[used].mean()),
        running=float(windows.running[used].mean()),
        hours=windows.hours[used],
        logs=logs,
        nugget=_nugget(logs),
        drift=drift,
    )


def _nugget(logs: Floats) -> float:
    """Sd of a window's log rate that neighbours do not share: half the mean square of differences (von Neumann 1941)."""
    if len(logs) < 3:
        return NUGGET_LEAST
    return max(float(np.sqrt(np.mean(np.diff(logs) ** 2) / 2)), NUGGET_LEAST)


def predict(hours: Floats, logs: Floats, nugget: float, drift: Drift, horizon: float) -> tuple[float, float]:
    """Mean and sd of the log of the mean rate over `horizon` hours after the last of the windows.

    hours: middles of the windows; logs: log rates in them; nugget: their own sd.
    """
    count, tau, variance = len(hours), drift.hours, drift.sd**2
    between = np.exp(-np.abs(hours[:, None] - hours[None, :]) / tau)
    covariance = variance * between + nugget**2 * np.eye(count)
    end = hours[-1] + (hours[-1] - hours[0]) / max(count - 1, 1) / 2
    span = max(horizon, 1e-6) / tau
    # Integrals of exp(-|s - t| / tau) over the horizon, once with each window and twice with itself.
    ahead = variance * np.exp(-(end - hours) / tau) * -np.expm1(-span) / span
    itself = variance * 2 / span * (1 + np.expm1(-span) / span)
    ones = np.ones(count)
    solved = np.linalg.solve(covariance, np.column_stack([ones, ahead, logs]))
    precision = ones @ solved[:, 0]
    mean = solved[:, 2].sum() / precision
    lack = 1 - ones @ solved[:, 1]
    predicted = mean + ahead @ (solved[:, 2] - mean * solved[:, 0])
    spread = itself - ahead @ solved[:, 1] + lack**2 / precision
    # The mean of a rate is more than the exponential of its mean logarithm.
    return float(predicted + (variance - itself) / 2), float(np.sqrt(max(spread, 0.0)))


# --- lengths -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Means:
    """Draws for one dataset of the mean, per answer, of each quantity; output_squares: mean square of output tokens.

    known: the same means of the pilot's own answers.
    """

    prompt: Floats
    output: Floats
    output_squares: Floats
    reasoning: Floats
    accepted: Floats
    accepted_output: Floats
    accepted_prompt: Floats
    cut: Floats
    sample: Floats  # output tokens that answers may have, for the drain
    sample_parts: Floats  # of an answer that each of them stands for
    known: Mapping[str, float]


def draw_lengths(observed: Sequence[Observed], random: np.random.Generator, draws: int) -> dict[str, Means]:
    """Draws of the means by dataset. Raises EyasError for a dataset without an ended answer."""
    for one in observed:
        if not one.answers.ended.any():
            raise EyasError(
                f"{one.dataset}: the pilot has no finished answer; let it run longer, or ask more prompts (plan.prompts)"
            )
    points = [_points(one) for one in observed]
    weights = [_weights(of, one.sizes, random, draws) for one, of in zip(observed, points, strict=True)]
    seen = [
        unseen.Seen(output=of.output, parts=expected * of.parts.sum(), cut=of.cut, limit=one.max_new_tokens)
        for one, of, (_, expected) in zip(observed, points, weights, strict=True)
    ]
    answers = sum(float(of.parts.sum()) for of in points)
    # Jeffreys' rule: where all of a few were accepted, the next may not be.
    accepted = (sum(float(of.parts @ of.accepted) for of in points) + 0.5) / (answers + 1)
    return {
        one.dataset: _draw(one, of, drawn, more, random.random(more.shape) < accepted, random)
        for one, of, drawn, more in zip(
            observed, points, weights, unseen.lengths(seen, random, draws), strict=True
        )
    }


@dataclass(frozen=True)
class _Points:
    """What a dataset's answers may be like; arrays of one length. parts: of an answer that each point stands for."""

    parts: Floats
    sizes: Floats
    prompt: Floats
    output: Floats
    reasoning: Floats
    accepted: Floats
    cut: Bools


def _points(one: Observed) -> _Points:
    """An answer that ended is a point. One that still ran is OPEN_POINTS of the lengths that it may reach, each with the
    dataset's shares of reasoning and acceptance."""
    answers, ended = one.answers, one.answers.ended
    output = answers.output_tokens[ended]
    reasoning = answers.reasoning_tokens[ended]
    accepted = answers.accepted[ended].astype(np.float64)
    reached = censoring.reached(answers.output_tokens, ended, one.max_new_tokens, OPEN_POINTS).ravel()
    of_open = np.ones_like(reached)
    return _Points(
        parts=np.concatenate([np.ones(len(output)), of_open / OPEN_POINTS]),
        sizes=np.concatenate([answers.sizes[ended], np.repeat(answers.sizes[~ended], OPEN_POINTS)]),
        prompt=np.concatenate(
            [answers.prompt_tokens[ended], np.repeat(answers.prompt_tokens[~ended], OPEN_POINTS)]
        ),
        output=np.concatenate([output, reached]),
        reasoning=np.concatenate([reasoning, reached * reasoning.sum() / max(output.sum(), 1.0)]),
        accepted=np.concatenate([accepted, of_open * accepted.mean()]),
        cut=np.concatenate([answers.cut[ended], reached >= one.max_new_tokens]),
    )


def _draw(
    one: Observed,
    points: _Points,
    weighted: tuple[Floats, Floats],
    more: Floats,
    more_accepted: Bools,
    random: np.random.Generator,
) -> Means:
    """weighted: as `_weights` tells. more: output tokens of unseen answers, shape (draws, unseen.EACH); they have the
    dataset's share of reasoning."""
    weights, expected = weighted
    reasoning = float(points.parts @ points.reasoning) / max(float(points.parts @ points.output), 1.0)
    prompt = np.broadcast_to((weights @ points.prompt)[:, None], more.shape)
    seen_columns = _columns(points.prompt, points.output, points.reasoning, points.accepted, points.cut)
    more_columns = _columns(prompt, more, more * reasoning, more_accepted, more >= one.max_new_tokens)
    of_more = random.standard_gamma(unseen.ANSWERS / unseen.EACH, more.shape)
    share = of_more.sum(axis=1) / (of_more.sum(axis=1) + random.standard_gamma(points.parts.sum(), len(more)))
    of_more *= (share / of_more.sum(axis=1))[:, None]
    known, means = {}, {}
    for name, values in seen_columns.items():
        known[name] = float(expected @ values)
        drawn = weights @ values
        # The draws' own mean is known, so it is set.
        drawn += known[name] - drawn.mean()
        means[name] = (1 - share) * drawn + (of_more * more_columns[name]).sum(axis=1)
    # All prompts' sizes are known, so their tokens are uncertain only by tokens per size.
    means["prompt"] *= one.sizes.mean() / (weights @ points.sizes)
    return Means(sample=points.output, sample_parts=points.parts, known=known, **means)


def _columns(
    prompt: Floats, output: Floats, reasoning: Floats, accepted: Floats | Bools, cut: Floats | Bools
) -> dict[str, Floats]:
    """What means are taken of, for each answer."""
    return {
        "prompt": prompt,
        "output": output,
        "output_squares": output**2,
        "reasoning": reasoning,
        "accepted": accepted.astype(np.float64),
        "accepted_output": accepted * output,
        "accepted_prompt": accepted * prompt,
        "cut": cut.astype(np.float64),
    }


def _weights(
    points: _Points, sizes: Floats, random: np.random.Generator, draws: int
) -> tuple[Floats, Floats]:
    """Random weights of the points, shape (draws, points), that sum to 1, and what they are expected to be. sizes: of all prompts.

    In each class of prompt size they are those of the Bayesian bootstrap, a little wider so that the variance is that of a
    mean of so few; the classes weigh as in all prompts.
    """
    classes = min(CLASSES, int(points.parts.sum()) // CLASS_LEAST)
    edges = (
        np.unique(np.quantile(points.sizes, np.arange(1, classes) / classes)) if classes > 1 else np.empty(0)
    )
    of_point = np.searchsorted(edges, points.sizes)
    share = np.bincount(np.searchsorted(edges, sizes), minlength=len(edges) + 1) / len(sizes)
    weights, expected = np.empty((draws, len(points.sizes))), np.empty(len(points.sizes))
    for kind in np.unique(of_point):
        members = np.flatnonzero(of_point == kind)
        parts = points.parts[members]
        few = max(1 - 2 / parts.sum(), 0.5)
        drawn = random.standard_gamma(few * parts, (draws, len(members)))
        weights[:, members] = share[kind] * drawn / drawn.sum(axis=1, keepdims=True)
        expected[members] = share[kind] * parts / parts.sum()
    return weights / weights.sum(axis=1, keepdims=True), expected / expected.sum()


# --- amounts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Amounts:
    """Draws for one dataset, or all, in one run."""

    responses: Floats
    prompt: Floats
    reasoning: Floats
    output: Floats
    accepted: Floats  # answers
    accepted_output: Floats
    accepted_prompt: Floats
    cut: Floats


def _amounts(one: Observed, lengths: Means, running: Floats | None) -> _Amounts:
    """What the dataset takes. running: requests of it that run when its budget is reached; None for a run without budgets.

    Answers that are there were generated, whatever the budget; training gets no more of them than it takes.
    """
    planned, done = len(one.sizes), len(one.answers)
    means = {
        name: _predicted(getattr(lengths, name), lengths.known[name], done, planned)
        for name in ("prompt", "output", "reasoning", "accepted", "accepted_output", "accepted_prompt", "cut")
    }
    answers = used = np.full_like(lengths.output, planned)
    over = np.zeros_like(answers)
    if running is not None and one.budget_tokens is not None:
        per_answer = np.maximum(means["accepted_output"], 1e-9)
        needed = one.budget_tokens / per_answer + 0.5  # the unit that crosses the budget is finished
        # Long answers are more often met running than short ones: E[L^2] / E[L] each, where the plan counts E[L].
        excess = running * (lengths.output_squares / np.maximum(lengths.output, 1e-9) - lengths.output)
        there = min(max(done, one.done), planned)
        over = np.where((needed > there) & (needed < planned), np.maximum(excess, 0.0), 0.0)
        used = np.minimum(needed, planned)
        answers = np.maximum(used, there)
    return _Amounts(
        responses=answers,
        prompt=answers * means["prompt"],
        reasoning=answers * means["reasoning"],
        output=answers * means["output"] + over,
        accepted=answers * means["accepted"],
        accepted_output=used * means["accepted_output"],
        accepted_prompt=used * means["accepted_prompt"],
        cut=answers * means["cut"],
    )


def _left(one: Observed, part: _Amounts) -> Floats:
    """Share of the dataset's answers that are still to be asked for, per draw."""
    left: Floats = np.maximum(1 - one.done / part.responses, 0.0)
    return left


def _predicted(means: Floats, known: float, done: int, planned: int) -> Floats:
    """Draws of the mean of all `planned` answers, of which `done` have the mean `known`, from draws of the distribution's mean.

    A pilot that has every answer gives their sum and nothing else. What is known does not vary, and what is not varies by chance besides: the variance is (1 - done / planned) of that of
    the estimate, as for a sample from a finite population.
    """
    rest, centre = max(1 - done / planned, 0.0), means.mean()
    of_all: Floats = np.maximum(known + (centre - known) * rest + (means - centre) * rest**0.5, 0.0)
    return of_all


def _sum(parts: Sequence[_Amounts]) -> _Amounts:
    return _Amounts(
        *(np.sum(column, axis=0) for column in zip(*(vars(part).values() for part in parts), strict=True))
    )


def _expected(part: _Amounts, hours: Floats, rate: Rate, machine: Machine, store: Store) -> Expected:
    stored = part.prompt + part.output
    trained = part.accepted_prompt + part.accepted_output
    hidden = store.hidden_size and store.hidden_size * store.hidden_layers * store.hidden_bytes
    return Expected(
        responses=Interval.of(part.responses),
        prompt_tokens=Interval.of(part.prompt),
        reasoning_tokens=Interval.of(part.reasoning),
        answer_tokens=Interval.of(part.output - part.reasoning),
        output_tokens=Interval.of(part.output),
        accepted_tokens=Interval.of(part.accepted_output),
        # The draws were shifted to a known mean, so a few may be more than all.
        acceptance=Interval.of(np.minimum(part.accepted / part.responses, 1.0)),
        at_limit=Interval.of(np.minimum(part.cut / part.responses, 1.0)),
        hours=Interval.of(hours),
        gpu_hours=Interval.of(hours * machine.gpus) if machine.gpus else None,
        responses_disk=Interval.of(stored * store.response_bytes),
        train_disk=Interval.of(trained * store.train_bytes),
        hidden_disk=Interval.of(trained * hidden) if hidden else None,
        naive_hours=float(part.responses.mean() / rate.completions / 60) if rate.completions else None,
    )


# --- the end -----------------------------------------------------------------------------------------------------


def _by_lane(observed: Sequence[Observed], parts: Mapping[str, _Amounts]) -> dict[str, Floats]:
    """Draws of the output tokens of each lane."""
    found: dict[str, Floats] = {}
    for one in observed:
        found[one.lane] = found.get(one.lane, 0.0) + parts[one.dataset].output
    return found


def _alone(tokens: Mapping[str, Floats], machine: Machine, running: float, per_second: Floats) -> Floats:
    """Hours that lanes make the run longer, per draw: when the others are done, a narrow one does not fill the server.

    Lanes share what runs in proportion to their ceilings, and what runs is at most `running` (the KV cache may hold no more);
    the rate of fewer is that of the drain. tokens: by lane. per_second: with all of them at work.
    """
    if len(tokens) < 2 or not machine.ceilings:
        return np.zeros_like(per_second)
    ceilings = np.array([machine.ceilings[lane] for lane in tokens], dtype=np.float64)
    left = np.column_stack(list(tokens.values()))
    even = left.sum(axis=1) / per_second
    most = min(running, ceilings.sum())
    seconds = np.zeros_like(per_second)
    for _ in tokens:  # in each round at least one lane ends
        active = ceilings * (left > 0)
        wide = np.maximum(active.sum(axis=1), 1e-9)
        rate = per_second * (np.minimum(wide, most) / most) ** (1 - machine.exponent)
        each = active * (rate / wide)[:, None]
        needs = np.divide(left, each, out=np.full_like(left, np.inf), where=each > 0)
        takes = np.where(np.isfinite(needs.min(axis=1)), needs.min(axis=1), 0.0)
        left = np.where(needs <= takes[:, None], 0.0, left - each * takes[:, None])
        seconds += takes
    longer: Floats = np.maximum(seconds - even, 0.0) / 3600
    return longer


def _drain(
    lengths: Mapping[str, Means],
    parts: Mapping[str, _Amounts],
    rate: Rate,
    machine: Machine,
    leftover: Floats,
) -> Floats:
    """Hours that the end takes longer than its tokens would at the full rate, per draw.

    When nothing is left to ask, the running requests end one by one. Their whole lengths are met in proportion to length, and
    what is left of each is a uniform share. leftover: uniform numbers, shape (draws, running).
    """
    lengths_of = np.concatenate([lengths[name].sample for name in parts])
    weight = np.concatenate(
        [
            lengths[name].sample_parts / lengths[name].sample_parts.sum() * float(part.responses.mean())
            for name, part in parts.items()
        ]
    )
    weight *= lengths_of
    chance = np.cumsum(weight) / weight.sum()
    running = leftover.shape[1]
    which = np.searchsorted(chance, leftover)
    # The same number again, stretched over its own step, is uniform and independent of which step it fell on.
    before = np.concatenate([[0.0], chance[:-1]])
    share = (leftover - before[which]) / np.maximum(chance[which] - before[which], 1e-12)
    left = np.sort(lengths_of[which] * share, axis=1)
    steps = np.diff(left, axis=1, prepend=0.0)
    at_work = np.arange(running, 0, -1) / running
    token = running / rate.at_pilot  # s a request needs for a token, with all of them running
    seconds = (steps * at_work**machine.exponent).sum(axis=1) * token
    even = left.sum(axis=1) / rate.at_pilot
    extra: Floats = np.maximum(seconds - even, 0.0) / 3600
    return extra
