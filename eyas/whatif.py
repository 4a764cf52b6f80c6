"""What another setting would change: hours, and what it costs in data.

Each lever is a projection of its own, from the same pilot. How the rate changes comes from the capacity model (`capacity`,
`speed`), fitted to this server's windows; how lengths change comes from the pilot's answers. So the answers are relative to
what was measured, and a lever that changes nothing saves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec import Struct

from eyas.capacity import Lengths, running, running_key, sentence
from eyas.plugins import Pool
from eyas.projection import Drift, Expected, Floats, Interval, Machine, Observed, Store, Windows, project
from eyas.speed import Point, Server, Step, fit, served

DRAWS = 1_000  # differences of the same draws need fewer
CAREFUL = 0.3  # schedule_conservativeness that is tried
MORE_MEMORY = 0.02  # of GPU memory, added to mem_fraction_static


@dataclass(frozen=True, kw_only=True)
class Now:
    """The run as it is set. Pilot as for `project`.

    pool: KV cache of one server, None if it does not tell. servers: how many share the work. in_flight: ceiling of requests, over
    all servers. halves: whether the KV cache has 16-bit numbers, which FP8 would halve. tokens_per_percent: of KV cache
    that one percent of GPU memory holds, None if unknown.
    """

    observed: Sequence[Observed]
    windows: Windows
    machine: Machine
    store: Store
    drift: Drift
    pool: Pool | None
    servers: int = 1
    in_flight: int
    halves: bool = False
    tokens_per_percent: float | None = None


class Lever(Struct, frozen=True, kw_only=True):
    """One setting changed. saved_hours: negative if it takes longer. hours, gpu_hours: of the whole run then.

    gpu_hours: null without GPUs. running, tokens_per_second: over all servers; running is null if the server does not tell its KV cache. answers_cut: share of
    answers that are cut at the limit and were not before. tokens_lost: share of the training tokens. cost: in words.
    """

    setting: str
    value: str
    hours: Interval
    gpu_hours: Interval | None
    saved_hours: float
    running: float | None
    tokens_per_second: float
    answers_cut: float
    tokens_lost: float
    cost: str

    @property
    def sentence(self) -> str:
        """For instance: max_new_tokens 5,000: 4 % of answers cut, 14 % of tokens lost, 2.1 h saved."""
        size = f"{abs(self.saved_hours):,.1f}"
        saved = f"{size} h {'saved' if self.saved_hours >= 0 else 'more'}"
        return f"{self.setting} {self.value}: {self.cost}, {saved if float(size.replace(',', '')) else 'nothing saved'}"


def binding(now: Now) -> str | None:
    """Which setting bounds how many requests run, in a sentence; None if the server does not tell its KV cache."""
    if now.pool is None:
        return None
    lengths, planned = lengths_of(now.observed), _planned(now)
    found = running(now.pool, lengths, max(min(now.in_flight, planned) // now.servers, 1))
    if found.binding == "in flight" and planned < now.in_flight:
        return (
            f"{planned:,} answers are planned in all, fewer than the {now.in_flight:,} that may be in flight: "
            f"prompts run out, and no setting binds"
        )
    told = sentence(now.pool, lengths, found)
    return f"at each of {now.servers} server processes: {told}" if now.servers > 1 else told


def _planned(now: Now) -> int:
    """Answers of the whole run, of which no more can be in flight."""
    return sum(len(one.sizes) for one in now.observed)


def step_of(now: Now) -> Step:
    """The decoding step of one server, fitted to all windows of the pilot."""
    lengths = lengths_of(now.observed)
    each = lengths.prompt + lengths.resident
    most = float("inf") if now.pool is None else running(now.pool, lengths, now.in_flight).about
    at_once = np.minimum(now.windows.running / now.servers, most)
    # What reading prompts took is no part of a step.
    reading = lengths.prompt / max(lengths.output, 1.0) / Server(pool=Pool(tokens=1)).prefill
    seconds = np.maximum(now.servers / np.maximum(now.windows.tokens_per_second, 1e-9) - reading, 1e-9)
    return fit(
        [
            Point(running=one, resident=one * each, tokens_per_second=rate)
            for one, rate in zip(at_once.tolist(), (1 / seconds).tolist(), strict=True)
        ],
        # Numbers twice as wide take twice as long to read.
        Step(per_token=Step().per_token * (2 if now.halves else 1)),
    )


def lengths_of(observed: Sequence[Observed]) -> Lengths:
    """Lengths over all prompts: each dataset's ended answers stand for its share of the run."""
    ended = [one.answers.ended for one in observed]
    weights = np.concatenate(
        [np.full(int(of.sum()), len(one.sizes) / of.sum()) for one, of in zip(observed, ended, strict=True)]
    )
    output = np.concatenate([one.answers.output_tokens[of] for one, of in zip(observed, ended, strict=True)])
    prompt = np.concatenate([one.answers.prompt_tokens[of] for one, of in zip(observed, ended, strict=True)])
    mean = float(np.average(output, weights=weights))
    return Lengths(
        prompt=float(np.average(prompt, weights=weights)),
        output=mean,
        output_sd=float(np.average((output - mean) ** 2, weights=weights) ** 0.5),
        max_new_tokens=max(one.max_new_tokens for one in observed),
    )


# --- levers ------------------------------------------------------------------------------------------------------


def levers(now: Now) -> list[Lever]:
    """All levers that the engine has, the one that saves most first."""
    trial = _Trial(now)
    found = [*_of_data(now, trial), *_of_requests(now, trial), *_of_memory(now, trial)]
    twice = "GPUs" if now.machine.gpus else "hardware"
    cost = f"no data lost, twice the {twice}, with {_in_flight(now, 2 * now.in_flight)}"
    found.append(trial.lever("servers", f"{2 * now.servers}", cost, servers=2 * now.servers))
    by_length = sorted(now.observed, key=lambda one: float(one.answers.output_tokens.mean()))
    if len(by_length) > 1:
        for value, last in (("short answers last", by_length[0]), ("long answers last", by_length[-1])):
            found.append(trial.lever("order", value, "no data lost", last=[last.dataset]))
    return sorted(found, key=lambda lever: -lever.saved_hours)


def _of_data(now: Now, trial: _Trial) -> list[Lever]:
    """Fewer tokens: lower limits and budgets."""
    longest = max(one.max_new_tokens for one in now.observed)
    found = [trial.limited(longest // part) for part in (2, 4) if longest // part > 0]
    budgets = [one.budget_tokens for one in now.observed if one.budget_tokens]
    typical = float(np.median([part.accepted_tokens.mean for part in trial.parts.values()]))
    budget = min(budgets) // 2 if budgets else int(float(f"{typical / 2:.1g}"))
    if budget:
        found.append(trial.budgeted(budget))
    return found


def _of_requests(now: Now, trial: _Trial) -> list[Lever]:
    """More requests at once."""
    if now.pool is None:
        return []
    double = 2 * now.in_flight
    lanes = f", with {_in_flight(now, double)}" if _lanes(now) else ""
    found = [trial.lever("concurrency", f"{double:,}", f"no data lost{lanes}", in_flight=double)]
    most = now.pool.max_running
    if most is not None and most * now.servers <= now.in_flight:
        # A server without a reserve (llama.cpp) gives each slot a cache of its own.
        tokens = now.pool.tokens * (1 if now.pool.conservativeness else 2)
        pool = msgspec.structs.replace(now.pool, max_running=2 * most, tokens=tokens)
        cost = "no data lost" + ("" if now.pool.conservativeness else ", twice the KV cache's memory")
        asked = max(2 * most * now.servers, now.in_flight)
        if asked > now.in_flight:
            cost += f", with {_in_flight(now, asked)}"
        found.append(trial.lever(running_key(pool), f"{2 * most:,}", cost, pool=pool, in_flight=asked))
    return found


def _lanes(now: Now) -> list[str]:
    """Lanes with a ceiling of their own."""
    return [lane for lane in now.machine.ceilings if lane]


def _in_flight(now: Now, asked: int) -> str:
    """So many requests in flight, and the keys that say so; each lane's ceiling grows with the others."""
    keys = ["server.concurrency"] * (not _lanes(now) or "" in now.machine.ceilings)
    return f"{asked:,} in flight ({', '.join([*keys, *(f'server.lanes.{lane}' for lane in _lanes(now))])})"


def _of_memory(now: Now, trial: _Trial) -> list[Lever]:
    """A larger KV cache or a smaller reserve. None for a server whose slots have a cache of their own (llama.cpp)."""
    pool = now.pool
    if pool is None or not pool.conservativeness:
        return []
    found = []
    if now.halves:
        found.append(
            trial.lever(
                "kv_dtype",
                "fp8",
                "another distribution, so all answers are asked again",
                pool=msgspec.structs.replace(pool, tokens=2 * pool.tokens),
                per_token=0.5,
            )
        )
    if now.tokens_per_percent is not None:
        more = int(now.tokens_per_percent * 100 * MORE_MEMORY)
        found.append(
            trial.lever(
                "mem_fraction_static",
                f"+{MORE_MEMORY}",
                "no data lost, less memory to spare",
                pool=msgspec.structs.replace(pool, tokens=pool.tokens + more),
            )
        )
    if pool.conservativeness > CAREFUL:
        bold = msgspec.structs.replace(pool, conservativeness=CAREFUL)
        pushed = served(
            Server(pool=bold, step=trial.step), trial.lengths, trial.each(now.in_flight, now.servers)
        )
        cost = "no data lost" + (
            ", requests are pushed out and read again now and then" if pushed.pushed_out else ""
        )
        found.append(trial.lever("schedule_conservativeness", f"{CAREFUL}", cost, pool=bold))
    return found


class _Change(Struct, frozen=True, kw_only=True):
    """Times as much as now. asked: requests in flight, in each lane: what a server does not run of them waits."""

    rate: float = 1.0
    running: float = 1.0
    asked: float = 1.0
    servers: float = 1.0


class _Trial:
    """Projections of the run with something changed, against the run as it is."""

    def __init__(self, now: Now) -> None:
        self.now = now
        self.step = step_of(now)
        self.lengths = lengths_of(now.observed)
        self.rate, self.running = self._rate(now.pool, self.step, self.lengths, now.in_flight, now.servers)
        self.base, self.parts = self._project(now.observed, _Change())

    @staticmethod
    def each(in_flight: int, servers: int) -> int:
        """Requests in flight at one of several servers."""
        return max(in_flight // servers, 1)

    def _rate(
        self, pool: Pool | None, step: Step, lengths: Lengths, in_flight: int, servers: int
    ) -> tuple[float, float]:
        """Tokens/s and running requests of all servers, by the model."""
        each = self.each(min(in_flight, _planned(self.now)), servers)
        roomy = pool or Pool(tokens=2**60, conservativeness=0.0)
        found = served(Server(pool=roomy, step=step), lengths, each)
        return found.tokens_per_second * servers, found.running * servers

    def _project(
        self, observed: Sequence[Observed], change: _Change, last: Sequence[str] | None = None
    ) -> tuple[Expected, dict[str, Expected]]:
        now = self.now
        windows = dataclasses.replace(
            now.windows,
            tokens_per_second=now.windows.tokens_per_second * change.rate,
            completions_per_minute=now.windows.completions_per_minute * change.rate,
            running=now.windows.running * change.running,
        )
        machine = msgspec.structs.replace(
            now.machine,
            gpus=round(now.machine.gpus * change.servers),
            ceilings={lane: round(most * change.asked) for lane, most in now.machine.ceilings.items()},
        )
        told = project(observed, windows, machine, now.store, now.drift, DRAWS, last)
        run = told.budgeted or told.full
        return run.total, run.datasets

    def lever(
        self,
        setting: str,
        value: str,
        cost: str,
        *,
        observed: Sequence[Observed] | None = None,
        pool: Pool | None = None,
        per_token: float = 1.0,
        in_flight: int | None = None,
        servers: int | None = None,
        last: Sequence[str] | None = None,
    ) -> Lever:
        """The lever with these changes; what is not given stays. More servers are asked as much more at once."""
        now, of = self.now, observed or self.now.observed
        many = servers or now.servers
        asked = in_flight or now.in_flight * many // now.servers
        step = msgspec.structs.replace(self.step, per_token=self.step.per_token * per_token)
        rate, run = self._rate(pool or now.pool, step, lengths_of(of), asked, many)
        change = _Change(
            rate=rate / self.rate,
            running=run / self.running,
            asked=asked / now.in_flight,
            servers=many / now.servers,
        )
        total, _ = self._project(of, change, last)
        lost = 1 - total.accepted_tokens.mean / max(self.base.accepted_tokens.mean, 1e-9)
        return Lever(
            setting=setting,
            value=value,
            hours=total.hours,
            gpu_hours=total.gpu_hours,
            saved_hours=self.base.hours.mean - total.hours.mean,
            running=run if now.pool is not None else None,
            tokens_per_second=total.output_tokens.mean / total.hours.mean / 3600,
            answers_cut=max(total.at_limit.mean - self.base.at_limit.mean, 0.0),
            tokens_lost=max(lost, 0.0),
            cost=cost,
        )

    def limited(self, limit: int) -> Lever:
        """max_new_tokens at `limit`, wherever it is higher."""
        found = self.lever(
            "max_new_tokens", f"{limit:,}", "", observed=[_limited(one, limit) for one in self.now.observed]
        )
        cost = f"{found.answers_cut:.0%} of answers cut, {found.tokens_lost:.0%} of tokens lost"
        return msgspec.structs.replace(found, cost=cost.replace("%", " %"))

    def budgeted(self, budget: int) -> Lever:
        """A budget of so many accepted tokens for each dataset that has none or a larger one."""
        of = [
            dataclasses.replace(one, budget_tokens=min(one.budget_tokens or budget, budget))
            for one in self.now.observed
        ]
        found = self.lever("budget_tokens", f"{budget:,}", "", observed=of)
        return msgspec.structs.replace(
            found, cost=f"{found.tokens_lost:.0%} of tokens lost".replace("%", " %")
        )


def _limited(one: Observed, limit: int) -> Observed:
    """The dataset as if answers ended at `limit` tokens; reasoning comes first, so the answer is what is lost."""
    if one.max_new_tokens <= limit:
        return one
    had = one.answers
    output: Floats = np.minimum(had.output_tokens, limit)
    answers = dataclasses.replace(
        had,
        output_tokens=output,
        reasoning_tokens=np.minimum(had.reasoning_tokens, output),
        # One that still runs stays so, also past the limit: nobody knows yet whether it is accepted.
        cut=had.cut | (had.output_tokens > limit),
    )
    return dataclasses.replace(one, max_new_tokens=limit, answers=answers)
