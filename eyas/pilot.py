"""The pilot of one dataset: its first answers, and how fast this server makes them.

It asks the run's own first requests, so their answers go into the journal and nothing is wasted. Where most of them are
there already, they tell how long answers are but not how fast they come now: then the same prompts are asked again under
other request hashes, timed, and thrown away. Only a run that asked no more than the pilots do, under the same settings and of
the same server, tells its speed by itself.
"""

from __future__ import annotations

import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from eyas.config import AccessSettings, PilotSettings, fingerprint
from eyas.generate import connected, lookout_of
from eyas.journal import Journal, JournalWriter
from eyas.judge import Judge
from eyas.pilot_report import Journalled, Observation, PilotReport
from eyas.plugins import Registry
from eyas.progress import SUFFIX, Progress, ProgressFile, read_progress
from eyas.recordfile import atomic, read_records
from eyas.records import Delivery, Prompt
from eyas.units import Accepts, Plan, Step, place

if TYPE_CHECKING:
    from eyas.asking import Asked

TIMED_SHARE = 0.5  # of the pilot's answers must be asked by it, or speed is measured by a probe
PROBE_SAMPLE = 1 << 20  # sample numbers from here on are no run's


def pilot(
    settings: PilotSettings,
    access: AccessSettings,
    minutes: float,
    prompts: Path,
    journal: Path,
    out: Path,
    progress: Path,
    run: Path,
    registry: Registry,
) -> PilotReport:
    """Asks for the first answers of a dataset, for `minutes` at most, and writes what was seen to `out`.

    progress, run: status files of this pilot and of the dataset's generation.
    Raises EyasError when there is no server or the run must stop; finished answers are in the journal by then.
    """
    generation = settings.generate
    plan = Plan(generation, prompts, registry, first=settings.prompts)
    shown = Progress(
        dataset=generation.dataset,
        state="waiting",
        planned=plan.planned,
        samples=generation.samples,
        pid=os.getpid(),
        host=socket.gethostname(),
    )
    with (
        ProgressFile(progress, shown) as show,
        connected(access, registry) as (engine, lease),
    ):
        lookout = lookout_of(plan, access, registry)

        def ask(plan: Plan, folder: Path) -> list[Asked]:
            """Fills the journal in `folder`; returns what was not finished in time."""
            import uvloop

            from eyas.asking import Asking

            with JournalWriter(folder) as writer, Journal(folder) as known:
                accepts = Accepts(generation, registry)
                asking = Asking(
                    plan, accepts, access, engine, lease, known, writer, show, lookout, minutes * 60
                )
                uvloop.run(asking.run())
                return asking.unfinished

        began = time.time()
        unfinished = ask(plan, journal)
        servers = dict(map(lease.server, lease.manifests))
        since = _told_since(run, settings)

        def is_timed(delivery: Delivery) -> bool:
            return delivery.started >= (min(since, began) if delivery.server in servers else began)

        with Journal(journal) as known:
            judge = Judge(generation.model.reasoning, settings.checks, registry)
            answers = list(_answers(plan, known, judge, is_timed))
            sizes = {unit.prompt.key: bytes_of(unit.prompt) for unit in plan.units(known)}
            journalled = _journalled(Plan(generation, prompts, registry), known)
            without_answer = sum(
                step.status in ("refused", "not_reached") for _, _, step in _steps(plan, known)
            )
        seen = [*answers, *_running(unfinished, answers, sizes)]
        if sum(one.timed for one in answers) < TIMED_SHARE * len(answers):
            probe = Plan(generation, prompts, registry, first=settings.prompts, from_sample=PROBE_SAMPLE)
            shown.planned += probe.planned
            with tempfile.TemporaryDirectory() as folder:
                late = ask(probe, Path(folder))
                with Journal(folder) as known:
                    came = list(_answers(probe, known, None, is_timed))
            # What is cut off kept the server busy too.
            seen += [*came, *(replace(one, kind="probe") for one in _running(late, came, sizes))]
        shown.state = "done"
    report = PilotReport(
        dataset=generation.dataset,
        prompt_bytes=[
            bytes_of(prompt) for prompt in read_records(prompts, Prompt) for _ in range(plan.answers(prompt))
        ],
        without_answer=without_answer,
        journalled=journalled,
        servers=servers,
        observations=seen,
    )
    with atomic(out) as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return report


def _steps(plan: Plan, journal: Journal) -> Iterator[tuple[Prompt, int, Step]]:
    """Every answer that `plan` has, with the first prompt of its conversation and its sample."""
    for unit in plan.units(journal):
        for sample in range(plan.settings.samples):
            for step in plan.walk(unit, sample, journal):
                yield unit.prompt, sample, step


def _journalled(whole: Plan, journal: Journal) -> Journalled:
    """What is there of the whole run."""
    answers = tokens = 0
    spans: list[tuple[float, float]] = []
    for _, _, step in _steps(whole, journal):
        if step.status != "answered":
            continue
        assert step.request is not None
        entry = journal.answered(step.request)
        assert entry is not None
        answers, tokens = answers + 1, tokens + len(entry.reply.output_ids)
        if entry.delivery.started:
            spans.append((entry.delivery.started, entry.delivery.finished))
    return Journalled(at=time.time(), answers=answers, output_tokens=tokens, busy=union(spans))


def union(spans: Sequence[tuple[float, float]]) -> list[list[float]]:
    """The stretches that `spans` cover, in order and apart."""
    found: list[list[float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def _told_since(run: Path, settings: PilotSettings) -> float:
    """When the last generation of a dataset began, Unix time in s, if its times tell the speed under `settings`; else infinity.

    They do not where one of the datasets has more prompts than its pilot looks at, which shared the server unseen.
    """
    wanted = fingerprint(settings.server)
    jobs = {path: _last(path) for path in run.parent.glob(f"*{SUFFIX}")}
    for job in jobs.values():
        if job is None or job.state != "done" or job.server != wanted or job.prompts > settings.prompts:
            return math.inf
    own = jobs.get(run)
    return own.began if own else math.inf


def _last(path: Path) -> Progress | None:
    try:
        return read_progress(path)
    except msgspec.DecodeError:
        return None


def _answers(
    plan: Plan, journal: Journal, judge: Judge | None, is_timed: Callable[[Delivery], bool]
) -> Iterator[Observation]:
    """The answers of `plan` that are there; without a judge they are a probe's."""
    for prompt, sample, step in _steps(plan, journal):
        if step.status != "answered":
            continue
        assert step.request is not None
        entry = journal.answered(step.request)
        assert entry is not None
        verdict = judge.judge(place(entry.reply, prompt.key, step.turn, sample)) if judge else None
        yield Observation(
            kind="answer" if judge else "probe",
            key=prompt.key,
            turn=step.turn,
            sample=sample,
            timed=is_timed(entry.delivery),
            started=entry.delivery.started,
            finished=entry.delivery.finished,
            prompt_bytes=bytes_of(prompt),
            prompt_tokens=len(entry.reply.prompt_ids),
            output_tokens=len(entry.reply.output_ids),
            reasoning_tokens=verdict.reasoning_tokens if verdict else None,
            accepted=verdict.accepted if verdict else None,
            truncated=verdict.truncated if verdict else None,
        )


def _running(
    unfinished: Sequence[Asked], answers: Sequence[Observation], sizes: Mapping[str, int]
) -> Iterator[Observation]:
    """What was still at the server. It had as many tokens as its time allows at the speed of the answers that this pilot
    got, or of those that were there where it got none: fewer would make lengths short and the server slow.

    sizes: bytes of the first prompts, by key.
    """
    like = [one for one in answers if one.timed] or answers
    took = sum(one.finished - one.started for one in like)
    speed = sum(one.output_tokens for one in like) / took if took > 0 else 0.0
    for one in unfinished:
        assert one.unit.ids is not None
        yield Observation(
            kind="running",
            key=one.unit.prompt.key,
            turn=one.unit.turn,
            sample=one.sample,
            timed=True,
            started=one.started,
            finished=one.ended,
            prompt_bytes=sizes[one.unit.prompt.key],
            prompt_tokens=len(one.unit.ids),
            output_tokens=int(speed * (one.ended - one.started)),
        )


def bytes_of(prompt: Prompt) -> int:
    """Size of a prompt: messages and tools as JSON."""
    return len(msgspec.json.encode(prompt.messages)) + len(msgspec.json.encode(prompt.tools))
