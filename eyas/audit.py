"""The drift audit: a few prompts of a dataset, asked greedily again and again while it is generated.

The answers of a run are samples, of which only the shares of many tell a change (eyas.alarms). Here the prompts stay the
same, so each is compared with itself. Greedy answers of a busy server differ from round to round: batches of other
sizes are summed in another order, and from the first other token on it is another text. So it is not the text that is
compared but its length, its reasoning share and how much it repeats. The answers go into a log, never into the journal.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from eyas.config import AuditConfig, GenerateSettings, SamplingConfig, fingerprint
from eyas.plugins import Split

if TYPE_CHECKING:
    from eyas.records import Reply

NGRAM = 4  # tokens; as the check `degenerate` has it
LEAST_ROUNDS = 4  # before anything is compared
MOST_ROUNDS = 12  # of the last ones that set the standard: a step is looked for, not what creeps over days
CONFIRM = 60.0  # s until a round that stands out is asked again; only two in a row are a step
# Standard errors of the mean of a round that are a step. Of 600 simulated campaigns (100 rounds of 4 prompts) none has a false alarm where
# lengths vary by 30 % from round to round, and some 1 % where one prompt in five falls into a loop now and then.
FAR = 4.0
PRIOR = 4  # degrees of freedom that the noise expected beforehand counts for: a few equal rounds do not prove that there is none
EVENTS = 3  # last events that an alarm names

log = logging.getLogger(__name__)


class AuditAnswer(Struct, frozen=True, kw_only=True):
    """What is kept of one answer. distinct: share of distinct 4-grams of its ids. ids: hash of them."""

    key: str
    output_tokens: int
    reasoning_tokens: int
    distinct: float
    ids: str

    @classmethod
    def of(cls, key: str, reply: Reply, split: Split) -> AuditAnswer:
        ids = reply.output_ids
        grams = [*zip(*(ids[shift:] for shift in range(NGRAM)), strict=False)]
        return cls(
            key=key,
            output_tokens=len(ids),
            reasoning_tokens=split.reasoning_tokens,
            distinct=round(len(set(grams)) / len(grams), 4) if grams else 1.0,
            ids=hashlib.sha256(msgspec.json.encode(ids[:])).hexdigest()[:16],
        )


Event = tuple[float, str]  # Unix time in s, and what happened to a server


class Round(Struct, frozen=True, kw_only=True):
    """One time that all prompts were asked, as a line of the log.

    began, ended: Unix time in s. asked: hash of model, prompts and sampling; rounds of other ones are not compared. servers:
    manifest ids of all servers that are in use. events: since the round before.
    """

    began: float
    ended: float
    asked: str
    servers: list[str]
    events: list[Event]
    answers: list[AuditAnswer]


class Measure(Struct, frozen=True):
    """What of an answer is compared. noise: its sd from round to round as expected beforehand. least: the smallest step told of a prompt."""

    of: Callable[[AuditAnswer], float]
    noise: float
    least: float
    told: Callable[[float, float], str]


def _percent(what: str) -> Callable[[float, float], str]:
    return lambda before, after: f"{what} {after:.0%} of the tokens, {before:.0%} before"


MEASURES = {
    "length": Measure(
        lambda answer: math.log(max(answer.output_tokens, 1)),
        0.25,
        math.log(1.25),
        lambda before, after: f"are {math.exp(after - before):.2g} times as long",
    ),
    "reasoning": Measure(
        lambda answer: answer.reasoning_tokens / max(answer.output_tokens, 1),
        0.1,
        0.1,
        _percent("reason in"),
    ),
    "repetition": Measure(lambda answer: 1 - answer.distinct, 0.05, 0.05, _percent("repeat 4-grams in")),
}


class Drift:
    """Compares each round with those before. `alarms`: the last step of each measure, by its name.

    A step stays told: what came before it and what came after it are in one dataset. From then on the new level is the standard.
    """

    def __init__(self) -> None:
        self.alarms: dict[str, str] = {}
        self._standard: deque[Round] = deque(maxlen=MOST_ROUNDS)
        self._suspect: Round | None = None

    @property
    def suspects(self) -> bool:
        """Whether the last round stands out, so that another one should tell soon."""
        return self._suspect is not None

    def add(self, found: Round) -> Iterator[str]:
        """One more round. Yields the alarms that it raises."""
        if self._standard and self._standard[-1].asked != found.asked:
            self._standard.clear()
            self._suspect = None
        steps = self._steps(found)
        if (suspect := self._suspect) is not None:
            before = self._steps(suspect)
            held = [name for name in steps if before.get(name, 0.0) * steps[name] > 0]
            self._suspect = None
            if held:
                for name in held:
                    self.alarms[name] = self._tell(name, suspect)
                    yield self.alarms[name]
                self._standard.clear()
                steps = {}
            self._standard.append(suspect)
        if steps:
            self._suspect = found
        else:
            self._standard.append(found)

    def _steps(self, found: Round) -> dict[str, float]:
        """By measure, how far the mean of a round is from the standard, where that is too far for chance."""
        rounds, prompts = len(self._standard), len(found.answers)
        if rounds < LEAST_ROUNDS:
            return {}
        steps = {}
        for name, measure in MEASURES.items():
            standard = [_values(measure, one) for one in self._standard]
            means = [fmean(of_prompt) for of_prompt in zip(*standard, strict=True)]
            squares = sum((x - mean) ** 2 for one in standard for x, mean in zip(one, means, strict=True))
            freedom = PRIOR + (rounds - 1) * prompts
            variance = (PRIOR * measure.noise**2 + squares) / freedom
            moved = [x - mean for x, mean in zip(_values(measure, found), means, strict=True)]
            step = fmean(moved)
            # One prompt whose answer now ends in a loop is no change of the server.
            together = sum(one * math.copysign(1.0, step) >= measure.least for one in moved)
            if 2 * together > prompts and abs(step) > FAR * math.sqrt(variance * (1 + 1 / rounds) / prompts):
                steps[name] = step
        return steps

    def _tell(self, name: str, first: Round) -> str:
        """first: the first round after the step."""
        measure = MEASURES[name]
        earlier, last = list(self._standard)[-2:]
        before = fmean(fmean(_values(measure, one)) for one in self._standard)
        what = measure.told(before, fmean(_values(measure, first)))
        return (
            f"audit: since {_clock(first.ended)} the answers to the same {len(first.answers)} greedy prompts {what}; "
            f"{_cause(earlier, last, first)}"
        )


def _values(measure: Measure, of: Round) -> list[float]:
    return [measure.of(answer) for answer in of.answers]


def _cause(earlier: Round, last: Round, first: Round) -> str:
    """What happened to the servers between two rounds, or amid the last one before the step, part of which is of after it."""
    amid = [event for event in last.events if event[0] >= last.began]
    events = [f"{what} ({_clock(moment)})" for moment, what in [*amid, *first.events]]
    servers = earlier.servers if amid else last.servers
    if servers != first.servers:
        was, now = (", ".join(name[:8] for name in ids) for ids in (servers, first.servers))
        events.append(f"server manifest {was} → {now}")
    if not events:
        return f"no server event was seen since {_clock(last.began)}; look at the server's log"
    return f"before that: {'; '.join(events[-EVENTS:])}"


def _clock(moment: float) -> str:
    return time.strftime("%d %b %H:%M:%S", time.localtime(moment))


def greedy(sampling: SamplingConfig, limit: int) -> SamplingConfig:
    """The likeliest token each time, of `limit` at most; all else as the run has it."""
    return replace(
        sampling,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_new_tokens=min(sampling.max_new_tokens, limit),
    )


class AuditPrompt(Struct, frozen=True):
    """A prompt of the set. request: hash of all that decides its greedy answer."""

    key: str
    ids: list[int]
    request: str


class Audit:
    """Which prompt is to be asked when, and the log of what came. Holds no connection: eyas.asking asks.

    sampling: with which it is asked. drift: what the rounds tell, those of earlier jobs included.
    """

    def __init__(self, config: AuditConfig, settings: GenerateSettings, path: Path) -> None:
        """path: the log, which is appended to."""
        from eyas.request import Hasher  # a report reads rounds, and asks nothing

        self.sampling = greedy(settings.sampling, config.max_new_tokens)
        self.drift = Drift()
        self._config, self._path = config, path
        self._hasher = Hasher(settings.model, self.sampling)
        self._set: list[AuditPrompt] = []
        self._todo: deque[AuditPrompt] = deque()
        self._came: dict[str, AuditAnswer | None] = {}
        self._began: float | None = None
        self._due = 0.0
        self._events: list[Event] = []  # of this job, before the servers' own
        self._seen = 0  # of all events of this job, those that a round has
        for earlier in read_rounds(path):
            list(self.drift.add(earlier))
            self._events = [(time.time(), "this job began")]
        self.drift.alarms.clear()  # they were told when they came

    def offer(self, key: str, ids: list[int] | None) -> None:
        """A first turn, in the fixed order; the first ones that can be asked are the set."""
        if len(self._set) < self._config.prompts and ids is not None:
            self._set.append(AuditPrompt(key, ids, self._hasher.hash(ids, 0, len(self._set))))

    def next(self, *, begin: bool) -> AuditPrompt | None:
        """The prompt to be asked now, if there is one. begin: whether a new round may begin."""
        whole = len(self._set) == self._config.prompts
        if begin and whole and self._began is None and time.monotonic() >= self._due:
            self._began, self._due = time.time(), time.monotonic() + 60 * self._config.minutes
            self._todo.extend(self._set)
        return self._todo.popleft() if self._todo else None

    def came(
        self, key: str, answer: AuditAnswer | None, servers: Iterable[str], events: Sequence[Event]
    ) -> Iterator[str]:
        """An answer came, or None in its place. Yields the alarms that its round raises, if it is the last of it.

        servers: manifest ids of all in use. events: all that the servers had since this job began. A round that is
        not whole is left out.
        """
        assert self._began is not None
        self._came[key] = answer
        if len(self._came) < len(self._set):
            return
        began, self._began = self._began, None
        answers = [one for asked in self._set if (one := self._came[asked.key]) is not None]
        self._came = {}
        if len(answers) < len(self._set):
            return
        all_events = [*self._events, *events]
        found = Round(
            began=began,
            ended=time.time(),
            asked=fingerprint([asked.request for asked in self._set]),
            servers=sorted(set(servers)),
            events=all_events[self._seen :],
            answers=answers,
        )
        self._seen = len(all_events)
        _append(self._path, found)
        yield from self.drift.add(found)
        if self.drift.suspects:
            self._due = min(self._due, time.monotonic() + CONFIRM)


def read_rounds(path: Path) -> Iterator[Round]:
    """The rounds in the log. A line that a killed job left half is none."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            yield msgspec.json.decode(line, type=Round)


def _append(path: Path, found: Round) -> None:
    try:
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.write(b"\n")
            file.write(msgspec.json.encode(found) + b"\n")
    except OSError as error:  # a log is no reason to stop a run
        log.warning("%s cannot be written: %s", path, error)
