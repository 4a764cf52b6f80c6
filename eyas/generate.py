"""The generate stage: asks for every answer that the journal lacks, then writes what it holds in the fixed order.

Prompts are streamed three times, so memory does not grow with their number: once to see whether the journal already
has everything (then no server is needed), once to ask, once to write.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from eyas.alarms import Lookout
from eyas.audit import Audit
from eyas.config import AccessSettings, GenerateSettings, fingerprint
from eyas.errors import EyasError
from eyas.journal import Answered, Journal, JournalWriter
from eyas.plugins import Engine, Registry
from eyas.progress import Progress, ProgressFile
from eyas.recordfile import Writer, atomic
from eyas.records import Outcome, Response, Status
from eyas.request import FORMAT
from eyas.timing import Timing, TimingWriter
from eyas.units import Accepts, Plan, Unit, journalled_tokens, place

if TYPE_CHECKING:
    from eyas.server.lease import Lease

GC_EVERY = 20_000  # objects made and kept while asking, between two collections of the young ones
LACKS = "the journal lacks at least the answer to %s; a server is needed"
HOLDS = (
    "the journal holds %s answers; those that this config asks for are used again, others (of other settings or prompts, or "
    "of an Eyas whose request format is not %d) stay in it unused"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Paths:
    """Where a dataset's generation reads and writes."""

    prompts: Path
    journal: Path
    responses: Path
    outcomes: Path
    timing: Path
    servers: Path
    progress: Path
    audit: Path


def generate(
    settings: GenerateSettings,
    access: AccessSettings,
    paths: Paths,
    registry: Registry,
) -> None:
    """Answers all prompts of one dataset and writes responses, outcomes, timing and servers.

    Raises EyasError when the run must stop; every finished response is in the journal by then.
    """
    plan = Plan(settings, paths.prompts, registry)
    accepts = Accepts(settings, registry)
    progress = Progress(
        dataset=settings.dataset,
        state="waiting",
        planned=plan.planned,
        samples=settings.samples,
        budget_tokens=settings.budget_tokens,
        began=time.time(),
        prompts=plan.prompts,
        server=fingerprint(access.server),
        pid=os.getpid(),
        host=socket.gethostname(),
    )
    with ProgressFile(paths.progress, progress) as show:
        with JournalWriter(paths.journal) as writer:
            missing = _survey(plan, paths.journal, accepts, progress)
            if missing:
                log.info(LACKS, missing)
                _ask(plan, accepts, access, paths, registry, writer, show)
            else:
                log.info("the journal has every answer that is needed; no server is asked")
        progress.state = "finishing"
        with Journal(paths.journal) as journal:
            finalise(plan, journal, paths, accepts, progress)
        progress.state = "done"


def _survey(plan: Plan, journal_folder: Path, accepts: Accepts, progress: Progress) -> str | None:
    """The first key whose answer is needed and missing, or None if the journal suffices."""
    budget = plan.new_budget()
    counts: Counter[str] = Counter()
    with Journal(journal_folder) as journal:
        for unit in plan.units(journal):
            tokens = 0
            for sample in range(plan.settings.samples):
                for step in plan.walk(unit, sample, journal):
                    if step.status == "open":
                        if len(journal):
                            log.info(HOLDS, f"{len(journal):,}", FORMAT)
                        return unit.prompt.key
                    counts[step.status] += 1
                    tokens += journalled_tokens(step, sample, journal, accepts, budget)
            budget.submit(unit.index)
            budget.finish(unit.index, tokens)
            if budget.reached:
                break
    progress.done = progress.journalled = counts.total()
    progress.refused, progress.failed = counts["refused"], counts["failed"]
    progress.not_reached = counts["not_reached"]
    return None


def _ask(
    plan: Plan,
    accepts: Accepts,
    access: AccessSettings,
    paths: Paths,
    registry: Registry,
    writer: JournalWriter,
    show: ProgressFile,
) -> None:
    import uvloop

    from eyas.asking import Asking  # and with it what only asking needs

    lookout = lookout_of(plan, access, registry)
    if access.audit is not None:
        lookout.audit = Audit(access.audit, plan.settings, paths.audit)
    with connected(access, registry) as (engine, lease), Journal(paths.journal) as journal:
        asking = Asking(plan, accepts, access, engine, lease, journal, writer, show, lookout)
        # What is there by now stays; a full collection that looked at all of it would hold up the event loop.
        gc.collect()
        gc.freeze()
        often = gc.get_threshold()
        # A request makes hundreds of short-lived objects and hardly a cycle; looking for those took a tenth of its time.
        gc.set_threshold(GC_EVERY, *often[1:])
        try:
            uvloop.run(asking.run())
        finally:
            gc.set_threshold(*often)
            gc.unfreeze()


def lookout_of(plan: Plan, access: AccessSettings, registry: Registry) -> Lookout:
    """What raises alarms while a dataset is asked."""
    return Lookout(
        plan.settings.model.reasoning,
        access.checks,
        registry,
        reasoning_expected=plan.settings.reasoning_required,
        plan=access.plan,
    )


@contextmanager
def connected(access: AccessSettings, registry: Registry) -> Iterator[tuple[Engine, Lease]]:
    """The engine, and a lease on its server, which is started if need be. Raises EyasError if there is none to be had."""
    from eyas.server.lease import hold
    from eyas.server.verdict import heed

    heed(access)
    _raise_file_limit(access.ceiling)
    section = dict(access.server.engine)
    engine = registry.create("engine", section.pop("name"), section, "server.engine", access.model)
    assert isinstance(engine, Engine)
    with hold(access, engine, log) as lease:
        yield engine, lease


def _raise_file_limit(concurrency: int) -> None:
    """One socket a request, and some: past the soft limit connections fail with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = concurrency + 256
    if soft < wanted:
        reach = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (reach, hard))
        if reach < wanted:
            raise EyasError(
                f"server.concurrency: {concurrency} requests need {wanted} open files, the limit is {hard}; lower it or raise `ulimit -n`"
            )


def finalise(plan: Plan, journal: Journal, paths: Paths, accepts: Accepts, progress: Progress) -> None:
    """Writes responses, outcomes, timing and servers, from the journal alone, in the fixed order."""
    budget = plan.new_budget()
    servers: dict[str, Any] = {}
    output = 0  # tokens
    with (
        Writer[Response](paths.responses) as responses,
        Writer[Outcome](paths.outcomes) as outcomes,
        TimingWriter(paths.timing) as timing,
    ):
        for unit in plan.units(journal):
            needed = not budget.reached
            tokens = 0
            for sample in range(plan.settings.samples):
                for outcome, entry in _outcomes(plan, unit, sample, journal, needed=needed):
                    outcomes.write(outcome)
                    if entry is None:
                        continue
                    timing.write(Timing.of(entry, used=needed))
                    if entry.delivery.server not in servers:
                        servers[entry.delivery.server] = journal.server(entry.delivery.server)
                    if needed:
                        response = place(entry.reply, outcome.key, outcome.turn, sample)
                        responses.write(response)
                        output += len(response.output_ids)
                        if budget.limit is not None:
                            tokens += accepts.tokens(response)
            if needed:
                budget.submit(unit.index)
                budget.finish(unit.index, tokens)
    progress.tokens = output
    progress.accepted = budget.prefix_tokens if budget.limit is not None else None
    with atomic(paths.servers) as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(dict(sorted(servers.items())))))


def _outcomes(
    plan: Plan, unit: Unit, sample: int, journal: Journal, *, needed: bool
) -> Iterator[tuple[Outcome, Answered | None]]:
    """What became of each turn of one sample, with its answer if the journal has one."""
    key, turns = unit.prompt.key, 1 + len(unit.prompt.turns)
    done = 0
    for step in plan.walk(unit, sample, journal):
        if step.status == "open":
            break
        done += 1
        entry = None
        if step.status == "answered":
            assert step.request is not None
            entry = journal.answered(step.request)
        status: Status = step.status if needed else "not_needed"
        reason = step.reason if needed else "budget"
        yield Outcome(key=key, turn=step.turn, sample=sample, status=status, reason=reason), entry
    if needed and done < turns:
        raise EyasError(
            f"{key}: neither answered nor settled after generation; this is a fault of Eyas, please report it"
        )
    for turn in range(done, turns):
        yield Outcome(key=key, turn=turn, sample=sample, status="not_needed", reason="budget"), None
