"""The generate stage: asks for every answer that the journal lacks, then writes what it holds in the fixed order.

Prompts are streamed three times, so memory does not grow with their number: once to see whether the journal already
has everything (then no server is needed), once to ask, once to write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import resource
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from eyas.budget import Budget
from eyas.config import AccessSettings, GenerateSettings
from eyas.errors import EyasError
from eyas.journal import Answered, AnyEntry, Journal, JournalWriter, Rendered, ServerSeen, Unanswered
from eyas.judge import Judge
from eyas.plugins import Engine, GenerateRequest, Reasoning, Registry, Reject, Retry
from eyas.progress import Progress, write_progress
from eyas.recordfile import Writer, atomic, read_records, read_seal
from eyas.records import Delivery, Outcome, Prompt, Reply, Response
from eyas.render import Refused, Renderer, render_hash, render_identity
from eyas.request import Hasher, seed_of
from eyas.timing import Timing, TimingWriter

if TYPE_CHECKING:
    from eyas.server.lease import Lease

BACKOFF_FIRST, BACKOFF_MOST = 0.5, 60.0  # seconds between attempts
SILENT_LIMIT = 20  # completions without any reasoning after which a thinking dataset stops
TICK = 0.5  # seconds between looks at the server's ceiling
NO_REASONING = ("none", "empty", "unclosed")

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


@dataclass(frozen=True)
class Unit:
    """One key of the fixed order. `ids` is None while its rendering is unknown; `refusal` says why it has none."""

    index: int
    prompt: Prompt
    ids: list[int] | None
    refusal: str | None

    @property
    def known(self) -> bool:
        return self.ids is not None or self.refusal is not None


class Plan:
    """What is to be answered: units in the fixed order, and the request behind each of their samples."""

    def __init__(self, settings: GenerateSettings, prompts: Path, reasoning: Reasoning) -> None:
        self.settings, self._prompts = settings, prompts
        self.prompts = read_seal(prompts).rows
        self.planned = self.prompts * settings.samples
        self._hasher = Hasher(settings.model, settings.sampling)
        self.identity = render_identity(settings.model, reasoning.prefill)

    def units(self, journal: Journal) -> Iterator[Unit]:
        """All units, rendered as far as the journal knows them."""
        for index, prompt in enumerate(read_records(self._prompts, Prompt)):
            known = journal.rendered(render_hash(prompt, self.identity))
            yield self.unit(index, prompt, known)

    def unit(self, index: int, prompt: Prompt, rendered: Rendered | None) -> Unit:
        """A unit; a prompt that leaves no room for the whole answer is refused before anyone is asked."""
        ids = rendered.ids if rendered else None
        refusal = rendered.refusal if rendered else None
        room = self.settings.model.context - self.settings.sampling.max_new_tokens
        if ids is not None and len(ids) > room:
            ids, refusal = None, "prompt and max_new_tokens exceed the context"
        return Unit(index, prompt, ids, refusal)

    def requests(self, unit: Unit) -> list[str]:
        """The request hash of each sample; empty for a refused unit."""
        if unit.ids is None:
            return []
        samples = range(self.settings.samples)
        return [self._hasher.hash(unit.ids, sample, unit.prompt.occurrence) for sample in samples]

    def new_budget(self) -> Budget:
        return Budget(
            self.settings.budget_tokens, self.settings.samples * self.settings.sampling.max_new_tokens
        )


class Accepts:
    """Accepted output tokens of a reply; counts all of them where no budget asks for a verdict."""

    def __init__(self, settings: GenerateSettings, registry: Registry) -> None:
        self._judge = (
            Judge(settings.model.reasoning, settings.checks, registry)
            if settings.checks is not None
            else None
        )

    def tokens(self, response: Response) -> int:
        if self._judge is not None and not self._judge.judge(response).accepted:
            return 0
        return len(response.output_ids)


def place(reply: Reply, key: str, sample: int) -> Response:
    """A reply at its place in the dataset."""
    fields = {name: getattr(reply, name) for name in reply.__struct_fields__}
    return Response(key=key, turn=0, sample=sample, **fields)


# --- the stage ---------------------------------------------------------------------------------------------------


def generate(
    settings: GenerateSettings,
    access: AccessSettings,
    paths: Paths,
    registry: Registry,
) -> None:
    """Answers all prompts of one dataset and writes responses, outcomes, timing and servers.

    Raises EyasError when the run must stop; every finished response is in the journal by then.
    """
    reasoning = _reasoning(settings, registry)
    plan = Plan(settings, paths.prompts, reasoning)
    accepts = Accepts(settings, registry)
    progress = Progress(
        dataset=settings.dataset,
        state="waiting",
        planned=plan.planned,
        budget_tokens=settings.budget_tokens,
        pid=os.getpid(),
        host=socket.gethostname(),
    )
    show = _Show(paths.progress, progress)
    try:
        with JournalWriter(paths.journal) as writer:
            with Journal(paths.journal) as journal:
                missing = _survey(plan, journal, accepts, progress)
            if missing:
                log.info("the journal lacks at least the answer to %s; a server is needed", missing)
                _ask(plan, access, paths, registry, reasoning, accepts, writer, show)
            else:
                log.info("the journal has every answer that is needed; no server is asked")
        progress.state = "finishing"
        show(force=True)
        with Journal(paths.journal) as journal:
            _write(plan, journal, paths, accepts, progress)
        progress.state = "done"
    except BaseException as error:
        progress.state, progress.message = "failed", str(error)[:300]
        raise
    finally:
        progress.in_flight, progress.rate, progress.eta = 0, 0.0, None
        show(force=True)


def _reasoning(settings: GenerateSettings, registry: Registry) -> Reasoning:
    section = dict(settings.model.reasoning)
    reasoning = registry.create("reasoning", section.pop("name"), section, "model.reasoning")
    assert isinstance(reasoning, Reasoning)
    return reasoning


def _survey(plan: Plan, journal: Journal, accepts: Accepts, progress: Progress) -> str | None:
    """The first key whose answer is needed and missing, or None if the journal suffices."""
    budget = plan.new_budget()
    for unit in plan.units(journal):
        if not unit.known:
            return unit.prompt.key
        tokens = 0
        for sample, request in enumerate(plan.requests(unit)):
            if journal.has_answer(request):
                tokens += journalled_tokens(unit, sample, request, journal, accepts, budget)
            elif not journal.unanswered(request):
                return unit.prompt.key
        budget.submit(unit.index)
        budget.finish(unit.index, tokens)
        if budget.reached:
            break
    progress.done = progress.journalled = budget.prefix * plan.settings.samples
    return None


def journalled_tokens(
    unit: Unit, sample: int, request: str, journal: Journal, accepts: Accepts, budget: Budget
) -> int:
    """Accepted tokens of an answer that is already there; read only where a budget counts them."""
    if budget.limit is None:
        return 0
    entry = journal.answered(request)
    assert entry is not None
    return accepts.tokens(place(entry.reply, unit.prompt.key, sample))


class _Show:
    """Writes the progress file at most once a second."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self._path, self._progress, self._last = path, progress, 0.0

    @property
    def progress(self) -> Progress:
        return self._progress

    def __call__(self, *, force: bool = False) -> None:
        now = time.time()
        if force or now - self._last >= 1.0:
            self._last = self._progress.updated = now
            # A full disk must end in the journal's message, not in this one.
            with contextlib.suppress(OSError):
                write_progress(self._path, self._progress)


# --- asking ------------------------------------------------------------------------------------------------------


def _ask(
    plan: Plan,
    access: AccessSettings,
    paths: Paths,
    registry: Registry,
    reasoning: Reasoning,
    accepts: Accepts,
    writer: JournalWriter,
    show: _Show,
) -> None:
    from eyas.server.lease import hold

    _raise_file_limit(access.server.concurrency)
    section = dict(access.server.engine)
    engine = registry.create("engine", section.pop("name"), section, "server.engine", plan.settings.model)
    assert isinstance(engine, Engine)
    show(force=True)
    with hold(access, engine, log) as lease, Journal(paths.journal) as journal:
        if journal.server(lease.manifest_id) is None:
            writer.append(ServerSeen(id=lease.manifest_id, manifest=lease.manifest))
        tokenizer = engine.tokenizer(lease.urls[0], lease.key)
        renderer = Renderer(plan.settings.model, tokenizer, reasoning.prefill)
        asking = _Asking(
            plan, access, engine, lease, journal, writer, reasoning, accepts, tokenizer, renderer, show
        )
        asyncio.run(asking.run())


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


@dataclass
class _Pending:
    """A unit on its way: what its samples have brought so far."""

    unit: Unit
    left: int
    tokens: int = 0


@dataclass(frozen=True)
class _Job:
    """One request to make."""

    pending: _Pending
    sample: int
    request: str


class _Asking:
    """Keeps as many requests in flight as the lease allows, until the plan or its budget is fulfilled."""

    def __init__(
        self,
        plan: Plan,
        access: AccessSettings,
        engine: Engine,
        lease: Lease,
        journal: Journal,
        writer: JournalWriter,
        reasoning: Reasoning,
        accepts: Accepts,
        tokenizer: Any,
        renderer: Renderer,
        show: _Show,
    ) -> None:
        self.plan, self.server, self.engine, self.lease = plan, access.server, engine, lease
        self.journal, self.writer, self.reasoning, self.accepts = journal, writer, reasoning, accepts
        self.tokenizer, self.renderer, self.show = tokenizer, renderer, show
        self.budget = plan.new_budget()
        # Given up after the last retry; settled in the journal only if the job may succeed with them.
        self.failures: dict[str, str] = {}
        self.in_flight: set[asyncio.Task[None]] = set()
        self.outstanding: dict[str, int] = {}
        self.exhausted = False
        self.completions = self.silent = 0
        self.recent: deque[tuple[float, int]] = deque()
        self.alive: asyncio.Task[None] | None = None

    async def run(self) -> None:
        import aiohttp

        headers = {"Authorization": f"Bearer {self.lease.key}"} if self.lease.key else {}
        # keep-alive shorter than the server's 5 s; the deadline is per request, so no client time-out
        # (aiohttp's own total of 300 s would silently cut long answers).
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        self.show.progress.state = "generating"
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers
        ) as self.session:
            ticker = asyncio.create_task(self._tick())
            try:
                await self._loop(ticker)
            finally:
                for task in [*self.in_flight, ticker, *([self.alive] if self.alive else [])]:
                    task.cancel()
                await asyncio.gather(*self.in_flight, ticker, return_exceptions=True)
        self._settle()

    async def _loop(self, ticker: asyncio.Task[None]) -> None:
        jobs = self._jobs()
        while not self.budget.reached:
            if ticker.done():
                ticker.result()
            while not self.exhausted and len(self.in_flight) < self.show.progress.allowance:
                job = await anext(jobs, None)
                if job is None:
                    break
                task = asyncio.create_task(self._answer(job))
                self.in_flight.add(task)
            if not self.in_flight and self.exhausted:
                return
            if not self.in_flight:
                await asyncio.sleep(TICK / 10)
                continue
            done, _ = await asyncio.wait(self.in_flight, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self.in_flight.discard(task)
                task.result()

    async def _jobs(self) -> AsyncIterator[_Job | None]:
        """Requests in the fixed order; None when the budget wants to see answers before it asks for more."""
        for found in self.plan.units(self.journal):
            while not self.budget.wants_more():
                if self.budget.reached:
                    return
                yield None
            unit = found if found.known else await self._rendered(found)
            requests = self.plan.requests(unit)
            pending = _Pending(unit, left=len(requests))
            self.budget.submit(unit.index)
            if unit.refusal is not None:
                self.show.progress.rejected += self.plan.settings.samples
                self.show.progress.done += self.plan.settings.samples
                self.budget.finish(unit.index, 0)
            if unit.index % 100 == 99:
                await asyncio.sleep(0)  # a long journalled prefix must not block the requests in flight
            for sample, request in enumerate(requests):
                if self.journal.has_answer(request):
                    self.show.progress.journalled += 1
                    self._finish(
                        pending,
                        journalled_tokens(unit, sample, request, self.journal, self.accepts, self.budget),
                    )
                elif self.journal.unanswered(request):
                    self._finish(pending, 0)
                else:
                    yield _Job(pending, sample, request)
        self.exhausted = True

    async def _rendered(self, unit: Unit) -> Unit:
        """The unit with its rendering, for which the server may be needed."""
        for attempt in range(1, self.server.retries + 2):
            try:
                return await asyncio.to_thread(self._render, unit)
            except Retry as failure:
                cause = str(failure)
                await self._pause(attempt)
        raise EyasError(
            f"{unit.prompt.key}: the server cannot encode the prompt ({cause}); mend it and run the same command again"
        )

    def _render(self, unit: Unit) -> Unit:
        ids: list[int] | None = None
        refusal: str | None = None
        try:
            ids = self.renderer.render(unit.prompt)
        except (Refused, Reject) as error:
            refusal = str(error)
        if ids is not None and not (ids and max(ids) < self.tokenizer.vocabulary_size):
            ids, refusal = None, "rendered to nothing or outside the vocabulary"
        rendered = Rendered(render=render_hash(unit.prompt, self.plan.identity), ids=ids, refusal=refusal)
        self.writer.append(rendered)
        return self.plan.unit(unit.index, unit.prompt, rendered)

    async def _answer(self, job: _Job) -> None:
        """Asks until the request is answered, refused or given up, and journals what came of it."""
        unit, sampling = job.pending.unit, self.plan.settings.sampling
        assert unit.ids is not None
        ask = GenerateRequest(prompt_ids=unit.ids, sampling=sampling, seed=seed_of(job.request))
        deadline = sampling.max_new_tokens / self.server.slowest_rate + self.server.queue_wait
        cause = ""
        for attempt in range(1, self.server.retries + 2):
            url = min(self.lease.urls, key=lambda url: self.outstanding.get(url, 0))
            self.outstanding[url] = self.outstanding.get(url, 0) + 1
            started = time.time()
            try:
                async with asyncio.timeout(deadline):
                    completion = await self.engine.generate(self.session, url, ask)
            except Reject as refused:
                self.writer.append(Unanswered(request=job.request, status="rejected", reason=str(refused)))
                self.show.progress.rejected += 1
                self._finish(job.pending, 0)
                return
            except (Retry, TimeoutError) as failure:
                cause = str(failure) or f"no answer within the deadline of {deadline:.0f} s"
                log.warning("%s sample %d, attempt %d: %s", unit.prompt.key, job.sample, attempt, cause)
            else:
                delivery = Delivery(
                    attempt=attempt,
                    server=self.lease.manifest_id,
                    started=started,
                    finished=time.time(),
                    usage=completion.usage,
                )
                text, ends = self.tokenizer.decode(completion.output_ids)
                reply = Reply(
                    request=job.request,
                    prompt_ids=unit.ids,
                    output_ids=completion.output_ids,
                    finish=completion.finish,
                    text=text,
                    text_ends=ends,
                    stop_ids=self.tokenizer.stop_ids,
                    control_ids=self.tokenizer.control_ids,
                    effective_max_new=completion.effective_max_new,
                    constrained=sampling.grammar is not None,
                )
                self._keep(job, Answered(reply=reply, delivery=delivery))
                return
            finally:
                self.outstanding[url] -= 1
            await self._pause(attempt)
        self.failures[job.request] = cause
        self.show.progress.failed += 1
        self._finish(job.pending, 0)

    def _keep(self, job: _Job, entry: Answered) -> None:
        self.writer.append(entry)
        reply, progress = entry.reply, self.show.progress
        progress.tokens += len(reply.output_ids)
        self.recent.append((time.monotonic(), len(reply.output_ids)))
        self._finish(job.pending, self.accepts.tokens(place(reply, job.pending.unit.prompt.key, job.sample)))
        self.completions += 1
        self.silent += self.reasoning.split(reply).state in NO_REASONING
        expected = self.reasoning.expects_reasoning and self.plan.settings.reasoning_required
        if expected and self.silent == self.completions == SILENT_LIMIT:
            raise EyasError(
                f"datasets.{self.plan.settings.dataset}: none of the first {SILENT_LIMIT} answers has any reasoning; "
                f"check model.reasoning and model.template_options, or set reasoning_required: false"
            )

    def _finish(self, pending: _Pending, tokens: int) -> None:
        pending.left -= 1
        pending.tokens += tokens
        self.show.progress.done += 1
        if pending.left == 0:
            self.budget.finish(pending.unit.index, pending.tokens)
            if self.budget.limit is not None:
                self.show.progress.accepted = self.budget.prefix_tokens

    async def _pause(self, attempt: int) -> None:
        """Waits before the next attempt: with jitter, and for as long as no server really generates."""
        await asyncio.sleep(min(BACKOFF_MOST, BACKOFF_FIRST * 2 ** (attempt - 1)) * random.uniform(0.5, 1.5))
        if self.alive is None or self.alive.done():
            self.alive = asyncio.create_task(self._wait_alive())
        await asyncio.shield(self.alive)

    async def _wait_alive(self) -> None:
        patience = time.monotonic() + self.server.start_timeout
        while not await asyncio.to_thread(self.lease.healthy):
            self.show.progress.message = "the server does not answer; waiting for it"
            if time.monotonic() > patience:
                raise EyasError(
                    f"the server has not generated anything for {self.server.start_timeout:.0f} s "
                    f"({', '.join(self.lease.urls)}); start it again and run the same command: finished responses are kept"
                )
            await asyncio.sleep(2)
        self.show.progress.message = ""

    async def _tick(self) -> None:
        progress = self.show.progress
        while True:
            # Who wants no more lends the rest of the ceiling to others.
            more = self.budget.wants_more() and not self.exhausted
            demand = progress.planned - progress.done if more else len(self.in_flight)
            progress.in_flight = len(self.in_flight)
            with contextlib.suppress(OSError):  # as above: the last share stays good
                progress.allowance = await asyncio.to_thread(self.lease.share, len(self.in_flight), demand)
            self._rate(progress)
            self.show()
            await asyncio.sleep(TICK)

    def _rate(self, progress: Progress) -> None:
        now = time.monotonic()
        while self.recent and now - self.recent[0][0] > 60:
            self.recent.popleft()
        if len(self.recent) < 2:
            return
        span = max(now - self.recent[0][0], 1.0)
        progress.rate = sum(tokens for _, tokens in self.recent) / span
        per_unit = span / len(self.recent)
        left = progress.planned - progress.done
        if self.budget.limit is not None and self.completions:
            mean = max(self.budget.prefix_tokens / max(self.budget.prefix, 1), 1.0)
            left = min(left, int((self.budget.limit - self.budget.prefix_tokens) / mean) + 1)
        expected = max(left, 0) * per_unit
        # Poisson error of the recent count; lengths and drift are the plan's business.
        slack = 1.645 / len(self.recent) ** 0.5
        progress.eta = (expected * max(1 - slack, 0.0), expected, expected * (1 + slack))

    def _settle(self) -> None:
        """Counts failures against the accepted share; settles them only if the job may succeed with them."""
        causes = self.failures
        if len(causes) > self.server.failure_share * self.plan.planned:
            cause = next(iter(causes.values()))
            raise EyasError(
                f"datasets.{self.plan.settings.dataset}: {len(causes)} of {self.plan.planned} requests failed for good (first cause: {cause}); "
                f"more than server.failure_share allows. Mend the server and run again: only these are asked"
            )
        for request, cause in causes.items():
            self.writer.append(Unanswered(request=request, status="failed", reason=cause))


# --- writing -----------------------------------------------------------------------------------------------------


def _write(plan: Plan, journal: Journal, paths: Paths, accepts: Accepts, progress: Progress) -> None:
    """responses, outcomes, timing and servers, from the journal alone, in the fixed order."""
    budget = plan.new_budget()
    servers: dict[str, Any] = {}
    with (
        Writer[Response](paths.responses) as responses,
        Writer[Outcome](paths.outcomes) as outcomes,
        TimingWriter(paths.timing) as timing,
    ):
        for unit in plan.units(journal):
            needed = not budget.reached
            tokens = 0
            settled = list(_settled(plan, unit, journal))
            for sample, entry in enumerate(settled):
                status, reason = _status(unit, entry, needed)
                outcomes.write(
                    Outcome(key=unit.prompt.key, turn=0, sample=sample, status=status, reason=reason)  # type: ignore[arg-type]
                )
                if not isinstance(entry, Answered):
                    continue
                timing.write(Timing.of(entry, used=needed))
                if entry.delivery.server not in servers:
                    servers[entry.delivery.server] = journal.server(entry.delivery.server)
                if needed:
                    response = place(entry.reply, unit.prompt.key, sample)
                    responses.write(response)
                    if budget.limit is not None:
                        tokens += accepts.tokens(response)
            if needed:
                budget.submit(unit.index)
                budget.finish(unit.index, tokens)
    progress.accepted = budget.prefix_tokens if budget.limit is not None else None
    with atomic(paths.servers) as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(dict(sorted(servers.items())))))


def _settled(plan: Plan, unit: Unit, journal: Journal) -> Iterator[AnyEntry | None]:
    """The journal's word on each sample of a unit."""
    requests = plan.requests(unit)
    for request in requests:
        yield journal.answered(request) or journal.unanswered(request)
    for _ in range(plan.settings.samples - len(requests)):
        yield None


def _status(unit: Unit, entry: AnyEntry | None, needed: bool) -> tuple[str, str | None]:
    if not needed:
        return "not_needed", "budget"
    if unit.refusal is not None:
        return "rejected", unit.refusal
    if isinstance(entry, Answered):
        return "answered", None
    if isinstance(entry, Unanswered):
        return entry.status, entry.reason
    raise EyasError(
        f"{unit.prompt.key}: neither answered nor settled after generation; this is a fault of Eyas, please report it"
    )
