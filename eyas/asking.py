"""Asks for every answer that the journal lacks, as many at a time as the lease allows, and journals what comes.

Workers ask, one request at a time each. Before them, requests are rendered a few ahead; behind them, answers are decoded,
journalled, judged and counted as they come. Each step is done for all whose replies were handed out together (eyas.wire)
before the next one: a request at a time, each step would find the processor's caches full of what the others need, which
costs half as much again (docs/benchmarks.md).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from eyas.alarms import Lookout
from eyas.audit import AuditAnswer, AuditPrompt
from eyas.capacity import Moments, running, sentence
from eyas.config import AccessSettings, ModelConfig, SamplingConfig
from eyas.deadlines import Deadlines
from eyas.errors import EyasError
from eyas.fleet import PROBE_MOST, TICK, Fleet, backoff, in_own_thread
from eyas.journal import Answered, Journal, JournalWriter, Rendered, ServerSeen, Unanswered
from eyas.lengths import Array, places
from eyas.plugins import Busy, Completion, Engine, GenerateRequest, Reasoning, Reject, Retry, Tokenizer
from eyas.progress import Progress, ProgressFile
from eyas.records import Delivery, Message, Origin, Prompt, Reply
from eyas.render import Refused, Renderer, render_hash
from eyas.request import seed_of
from eyas.units import Accepts, Plan, Step, Unit, journalled_tokens, place
from eyas.wire import Session

if TYPE_CHECKING:
    from eyas.server.lease import Lease, Server

SILENT_LIMIT = 20  # completions without any reasoning after which a thinking dataset stops
LONG_PROMPT = 20_000  # bytes; rendering more would hold up the event loop, so it goes to a thread
BATCH, BATCH_TOKENS = 32, 50_000  # answers journalled or judged in a row, with so many tokens at most
WAITING = 128  # answers that may wait for that
AHEAD_SHARE = 4  # one request rendered ahead for so many in flight, up to 2 * BATCH
TURN = 0.003  # s of rendering after which whatever else has waited has its turn
KNOWN_LENGTHS = 50  # completions after which it is said how many requests really run
NO_REASONING = ("none", "empty", "unclosed")
PLAIN_PROMPT = Prompt(
    key="self-test",
    messages=[Message(role="user", content="What is the capital of France?")],
    turns=[],
    tools=[],
    origin=Origin(source="self-test", revision=None, file="", row=1),
    occurrence=0,
    group="",
)

log = logging.getLogger(__name__)


def _size(prompt: Prompt) -> int:
    """Bytes of a prompt's messages and tools."""
    return len(msgspec.json.encode(prompt.messages)) + len(msgspec.json.encode(prompt.tools))


def prepare(
    engine: Engine, lease: Lease, model: ModelConfig, reasoning: Reasoning
) -> tuple[Tokenizer, Renderer]:
    """Tokenizer and renderer of the served model, tested: known texts, and a plain question in the chat template."""
    try:
        tokenizer = engine.tokenizer(lease.urls[0], lease.key)
        renderer = Renderer(model, tokenizer, reasoning.prefill)
        tail = None
        try:
            ids = renderer.render(PLAIN_PROMPT)
            text, lengths = tokenizer.decode(places(ids))
            # Written as it is, and a journal with anything else could not be read again.
            if not isinstance(lengths, str) or len(lengths) != len(ids):
                raise EyasError(
                    f"engine {engine.name!r}: its tokenizer's decode must give text and one character for each id "
                    f"(eyas.lengths.spell), not {type(lengths).__name__}; correct the plugin"
                )
            tail = text.rpartition(PLAIN_PROMPT.messages[0].content)[2]
        except Refused as reason:
            log.warning(
                "how prompts end is not tested: the chat template refuses a plain question (%s)", reason
            )
        reasoning.self_test(tokenizer, tail)
    except Retry as cause:
        raise EyasError(
            f"{lease.urls[0]}: the server went away while its tokenizer was tested ({cause}); run the same command again"
        ) from cause
    return tokenizer, renderer


class _Pending(Struct):
    """A key on its way. left: samples whose conversations have not ended. tokens: what all of them have brought so far."""

    index: int
    left: int
    tokens: int = 0


class _Job(Struct, frozen=True):
    """One request to make."""

    pending: _Pending
    unit: Unit
    sample: int
    request: str


class _Arrival(Struct, frozen=True):
    """What came of a request, still to be journalled."""

    job: _Job
    ask: GenerateRequest
    completion: Completion
    server: Server
    delivery: Delivery


class Asked(Struct, frozen=True):
    """A request that was at a server from `started` until all asking ended, both Unix time in s."""

    unit: Unit
    sample: int
    started: float
    ended: float = math.inf


class _Failure(Struct, frozen=True):
    """Given up after the last retry: one request, or all samples of a prompt that the server cannot encode."""

    index: int  # the key's
    entry: Unanswered
    samples: int


class Asking:
    """Keeps as many requests in flight as the lease allows, until the plan or its budget is fulfilled."""

    def __init__(
        self,
        plan: Plan,
        accepts: Accepts,
        access: AccessSettings,
        engine: Engine,
        lease: Lease,
        journal: Journal,
        writer: JournalWriter,
        show: ProgressFile,
        lookout: Lookout,
        seconds: float = math.inf,
    ) -> None:
        """Reads from `journal`, appends to `writer`; `journal` may be older than what is appended.

        seconds: after which it ends although not all is answered.
        """
        self.plan, self.accepts, self.engine, self.lease = plan, accepts, engine, lease
        self.server, self.ceiling = access.server, access.ceiling
        self.journal, self.writer, self.show, self.lookout = journal, writer, show, lookout
        self.audit = lookout.audit
        self.end = time.monotonic() + seconds
        self.asked: dict[str, Asked] = {}  # what is at a server, by request
        self.stopped: float | None = None  # when there was no more time, Unix time in s
        self.unfinished: list[Asked] = []  # what was at a server then, and has not come since
        self.tokenizer, self.renderer = prepare(engine, lease, plan.settings.model, plan.reasoning)
        self.added = {token: text for text, token in self.tokenizer.added_tokens.items()}
        self.own = frozenset(self.added)
        self.is_own = np.zeros(2 + max(self.own, default=0), bool)  # the last stands for all behind it
        self.is_own[list(self.own)] = True
        self.control = frozenset(self.tokenizer.control_ids)
        self.budget = plan.new_budget()
        # Given up after the last retry; settled in the journal only if the job may succeed with them.
        self.failures: list[_Failure] = []
        self.in_flight: set[asyncio.Task[None]] = set()  # workers
        self.later: deque[_Job] = deque()  # turns of conversations on their way, before any new key
        self.ready: deque[_Job] = deque()  # of new keys
        self.arrived: deque[_Arrival] = deque()  # not journalled yet
        self.landed: deque[tuple[_Job, Reply]] = deque()  # journalled, and neither judged nor counted yet
        self.following: set[asyncio.Task[None]] = set()  # what renders later turns
        self.beside: set[asyncio.Task[None]] = set()  # what runs as long as there is something to ask
        self.deadlines = Deadlines()
        self.failure: BaseException | None = None
        self.step: asyncio.Handle | None = None  # the next one for what has come
        self.closing = False
        self.stirred = asyncio.Event()  # there may be something to ask or to end
        self.fleet = Fleet(lease, engine, self.server, show.progress)
        self.seen: set[str] = set()  # servers whose manifests are in the journal
        self.exhausted = False
        self.completions = self.silent = 0
        self.lengths = Moments()
        self.recent: deque[tuple[float, int]] = deque()  # when answers came, and their tokens
        self.recent_tokens = 0  # their sum

    def _added_in(self, prompt_ids: Sequence[int], output: Array) -> dict[str, int]:
        found = self.own.intersection(prompt_ids).union(
            output[self.is_own.take(output, mode="clip")].tolist()
        )
        return {self.added[token]: token for token in sorted(found)}

    async def run(self) -> None:
        self.show.progress.state = "generating"
        async with Session(self.lease.key) as self.session:
            self.fleet.start(self.session)
            self._begin(self.beside, self._tick())
            self._begin(self.beside, self.deadlines.look(TICK))
            try:
                await self._loop()
            finally:
                failure = await self._close()
        if failure is not None:
            raise failure
        self._settle()

    async def _close(self) -> Exception | None:
        """Ends all that runs, and journals what has come, though nobody wants more of it. Gives back what failed in that."""
        self.closing = True
        if self.step is not None:
            self.step.cancel()
        try:
            self.session.hand_out()
            await asyncio.sleep(0)
        finally:
            if self.stopped is not None:
                self.unfinished = [replace(one, ended=self.stopped) for one in self.asked.values()]
            tasks = [*self.in_flight, *self.following, *self.beside, *self.fleet.tasks()]
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                failure = self._journal_all()
        return failure

    async def _loop(self) -> None:
        jobs = self._jobs()
        while not self.budget.reached:
            self.stirred.clear()
            self._raise_failures()
            if self._is_over():
                self.stopped = time.time()
                return
            await self._fill(jobs)
            self._employ()
            if self.exhausted and not (
                self.in_flight or self.arrived or self.landed or self.following or self.later or self.ready
            ):
                self._raise_failures()
                return
            await self.stirred.wait()

    def _is_over(self) -> bool:
        """Whether nothing more is to be asked."""
        return self.closing or bool(self.failure) or self.budget.reached or time.monotonic() > self.end

    def _begin(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        """Lets `work` run beside the rest, in `tasks` until it ends; an error in it ends the run."""

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (failure := task.exception()):
                self.failure = self.failure or failure
            self.stirred.set()

        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(ended)

    # --- what is asked next ------------------------------------------------------------------------------------------

    def _ahead(self) -> int:
        """How many requests should be ready before their turn."""
        return 0 if self._is_near() else min(2 * BATCH, self.show.progress.allowance // AHEAD_SHARE)

    def _is_near(self) -> bool:
        """Whether the next answers may fulfil the budget, so that each is to be known before more is asked."""
        left = self.budget.answers_left()
        return self.budget.limit is not None and (left is None or left <= 2 * self.show.progress.allowance)

    async def _fill(self, jobs: AsyncIterator[_Job | None]) -> None:
        """Renders new keys for all who may ask and some ahead, once few are left."""
        ahead = self._ahead()
        if self.exhausted or len(self.ready) > self._free() + ahead // 2:
            return
        since = time.monotonic()
        while len(self.ready) < self._free() + ahead and not self._is_over():
            while (self.arrived or self.landed) and self._is_near():
                self._finish_some()
            if (job := await anext(jobs, None)) is None:
                return
            self.ready.append(job)
            if time.monotonic() - since > TURN:
                self._employ()
                await asyncio.sleep(0)
                since = time.monotonic()

    def _employ(self) -> None:
        """As many workers as may ask and have something to."""
        while self._free() > 0 and (job := self._take()):
            self._begin(self.in_flight, self._work(job))

    def _free(self) -> int:
        """How many more workers there may be; negative if there are too many. A turn on its way to be asked has its place."""
        return self.show.progress.allowance - len(self.in_flight) - len(self.following)

    async def _work(self, job: _Job | AuditPrompt | None) -> None:
        while job is not None:
            if isinstance(job, _Job):
                await self._answer(job)
            else:
                await self._ask_audit(job)
            job = self._take() if self._free() >= 0 else None
            if len(self.ready) <= self._ahead() // 2 and not self.exhausted:
                self.stirred.set()

    def _take(self) -> _Job | AuditPrompt | None:
        """What is to be asked next; None if nothing is ready, or nothing is to be asked any more."""
        if self._is_over():
            return None
        if self.audit and (asked := self.audit.next(begin=not self.exhausted)):
            return asked
        if self.later:
            return self.later.popleft()
        return self.ready.popleft() if self.ready else None

    def _raise_failures(self) -> None:
        """Raises what has ended the run: in a request, in the ticker, in a look at a server."""
        if self.failure is not None:
            raise self.failure
        self.fleet.raise_failures()

    async def _jobs(self) -> AsyncIterator[_Job | None]:
        """Requests in the fixed order; None when the budget wants to see answers before it asks for more."""
        for found in self.plan.units(self.journal):
            while not self.budget.wants_more():
                if self.budget.reached:
                    return
                yield None
            opening = found if found.known else await self._rendered(found)
            samples = self.plan.settings.samples
            if self.audit:
                self.audit.offer(opening.prompt.key, opening.ids)
            pending = _Pending(opening.index, left=samples)
            self.budget.submit(opening.index, self.plan.answers(opening.prompt))
            if opening.index % 100 == 99:
                await asyncio.sleep(0)  # a long journalled prefix must not block the requests in flight
            for sample in range(samples):
                steps = self.plan.walk(opening, sample, self.journal)
                if job := await self._next(pending, sample, steps, journalled=found.known):
                    yield job
        self.exhausted = True

    async def _next(
        self, pending: _Pending, sample: int, steps: Iterator[Step], *, journalled: bool
    ) -> _Job | None:
        """The next request of a conversation, all steps before it counted; None if it ends without one.

        journalled: whether steps that are done were so at the start.
        """
        while True:
            step = next(steps, None)
            if step is None:
                self._over(pending)
                return None
            if step.status == "open" and step.request is None:
                unit = await self._rendered(step.unit)
                steps, journalled = self.plan.walk(unit, sample, self.journal), False
            elif step.request is not None and step.status == "open":
                return _Job(pending, step.unit, sample, step.request)
            else:
                tokens = journalled_tokens(step, sample, self.journal, self.accepts, self.budget)
                self._count(pending, step, tokens, journalled=journalled)

    async def _rendered(self, unit: Unit) -> Unit:
        """The unit with its rendering, for which the server may be needed; settled as failed if it cannot have one."""
        prompt = unit.prompt
        url = self.lease.urls[0]  # the tokenizer's
        for attempt in range(1, self.server.retries + 2):
            try:
                if self.tokenizer.asks_server or _size(prompt) > LONG_PROMPT:
                    await self.fleet.certain(url)
                    rendered = await self._in_time(in_own_thread(lambda: self._render(prompt)))
                else:
                    rendered = self._render(prompt)
            except Retry as failure:
                cause = f"the server cannot encode the prompt: {failure}"
                log.warning("%s, attempt %d: %s", unit.prompt.key, attempt, cause)
                self.fleet.doubt(url)
                await asyncio.sleep(backoff(attempt))
            else:
                # What is refused gets no answer that it could be written with.
                self.writer.append(rendered, soon=self.tokenizer.asks_server or rendered.refusal is not None)
                return self.plan.unit(unit.index, prompt, unit.turn, rendered)
        failed = Unanswered(request=render_hash(prompt, self.plan.identity), status="failed", reason=cause)
        # A later turn is that of one sample.
        samples = 1 if unit.turn else self.plan.settings.samples
        self.failures.append(_Failure(unit.index, failed, samples))
        return self.plan.unit(unit.index, prompt, unit.turn, failed)

    async def _in_time(self, rendering: Coroutine[Any, Any, Rendered]) -> Rendered:
        """The rendering, unless something else ends the run before. Raises Retry for one that takes too long."""
        task = asyncio.create_task(rendering)
        deadline = time.monotonic() + PROBE_MOST
        while not (await asyncio.wait({task}, timeout=TICK))[0]:
            self._raise_failures()
            if time.monotonic() > deadline:
                task.cancel()
                raise Retry(f"no reply within {PROBE_MOST:.0f} s")
        return task.result()

    def _render(self, prompt: Prompt) -> Rendered:
        ids: list[int] | None = None
        refusal: str | None = None
        try:
            ids = self.renderer.render(prompt)
        except (Refused, Reject) as error:
            refusal = str(error)
        if ids is not None and not (ids and max(ids) < self.tokenizer.vocabulary_size):
            ids, refusal = None, "rendered to nothing or outside the vocabulary"
        if self.tokenizer.asks_server:
            self.lease.recognise(self.lease.urls[0])  # that was not the tokenizer of another model
        return Rendered(render=render_hash(prompt, self.plan.identity), ids=ids, refusal=refusal)

    async def _answer(self, job: _Job) -> None:
        """Asks until the request is answered, refused or given up, and journals what came of it."""
        unit, sampling = job.unit, self.plan.settings.sampling
        assert unit.ids is not None
        ask = GenerateRequest(prompt_ids=unit.ids, sampling=sampling, seed=seed_of(job.request))
        cause, began, pushed_back = "", time.monotonic(), 0
        attempt = 1
        while attempt <= self.server.retries + 1:
            url = await self.fleet.free()
            started = time.time()
            try:
                self.asked[job.request] = Asked(unit, job.sample, started)
                try:
                    with self.fleet.asking(url, len(unit.ids) + self._mean_output()):
                        server, completion = await self._generate(url, ask)
                finally:
                    del self.asked[job.request]
            except Reject as refused:
                self.writer.append(Unanswered(request=job.request, status="refused", reason=str(refused)))
                self._end(job, "refused")
                return
            except Busy as failure:
                # No fault of the request, as long as the server answers others.
                cause = str(failure)
                await self.fleet.push_back(url)
                pushed_back += 1
                attempt += self.fleet.silent_since(began)
                await asyncio.sleep(backoff(pushed_back))
            except (Retry, TimeoutError) as failure:
                cause = str(failure) or f"no answer within the deadline of {self._deadline(sampling):.0f} s"
                log.warning("%s sample %d, attempt %d: %s", unit.prompt.key, job.sample, attempt, cause)
                self.fleet.doubt(url)
                await asyncio.sleep(backoff(attempt))
                attempt += 1
            else:
                self.fleet.came(url, len(completion.output_ids))
                delivery = Delivery(
                    attempt=attempt + pushed_back,
                    server=server.id,
                    started=started,
                    finished=time.time(),
                    usage=completion.usage,
                )
                self._arrive(_Arrival(job, ask, completion, server, delivery))
                return
        failed = Unanswered(request=job.request, status="failed", reason=cause)
        self.failures.append(_Failure(unit.index, failed, samples=1))
        self._end(job, "failed")

    def _deadline(self, sampling: SamplingConfig) -> float:
        """Seconds that one request may take."""
        return sampling.max_new_tokens / self.server.slowest_rate + self.server.queue_wait

    async def _generate(self, url: str, ask: GenerateRequest) -> tuple[Server, Completion]:
        """One attempt at `url`, and who answered. Raises as Engine.generate does, and TimeoutError."""
        with self.deadlines.within(self._deadline(ask.sampling)):
            await self.fleet.same_model(url)
            server = self.lease.server(url)  # one that is replaced breaks the request off
            return server, await self.engine.generate(self.session, url, ask)

    def _reply(self, request: str, ask: GenerateRequest, completion: Completion) -> Reply:
        output = places(completion.output_ids)
        text, lengths = self.tokenizer.decode(output)
        added = self._added_in(ask.prompt_ids, output)
        reply = Reply(
            request=request,
            prompt_ids=[*ask.prompt_ids],
            output_ids=completion.output_ids,
            finish=completion.finish,
            text=text,
            text_lengths=lengths,
            stop_ids=self.tokenizer.stop_ids,
            added_tokens=added,
            control_ids=[token for token in added.values() if token in self.control],
            effective_max_new=completion.effective_max_new,
            constrained=ask.sampling.constrained,
        )
        reply.__dict__["output"] = output  # which it would only make once more
        return reply

    async def _ask_audit(self, asked: AuditPrompt) -> None:
        """Asks a prompt of the drift audit. What comes is judged and dropped; if nothing does, its round is left out."""
        audit = self.audit
        assert audit is not None
        ask = GenerateRequest(prompt_ids=asked.ids, sampling=audit.sampling, seed=seed_of(asked.request))
        answer = None
        for attempt in range(1, self.server.retries + 2):
            url = await self.fleet.free()
            try:
                with self.fleet.asking(url, len(asked.ids) + audit.sampling.max_new_tokens / 2):
                    _, completion = await self._generate(url, ask)
            except Reject as refused:
                log.warning("audit: %s is refused: %s", asked.key, refused)
                break
            except Busy:
                await self.fleet.push_back(url)
            except (Retry, TimeoutError) as failure:
                log.warning("audit: %s, attempt %d: %s", asked.key, attempt, failure or "no answer in time")
                self.fleet.doubt(url)
            else:
                self.fleet.came(url, len(completion.output_ids))
                reply = self._reply(asked.request, ask, completion)
                answer = AuditAnswer.of(asked.key, reply, self.plan.reasoning.split(reply))
                break
            await asyncio.sleep(backoff(attempt))
        servers = [self.lease.server(url).id for url in self.lease.manifests]
        for alarm in audit.came(asked.key, answer, servers, self.lease.events):
            log.warning("%s", alarm)

    def _end(self, job: _Job, status: Literal["refused", "failed"]) -> None:
        """Counts a turn that gets no answer, and with it the end of its conversation."""
        self._count(job.pending, Step(job.unit, job.unit.turn, status, job.request), 0)
        for step in self.plan.unreached(job.unit, f"an earlier turn was {status}"):
            self._count(job.pending, step, 0)
        self._over(job.pending)

    def _see(self, server: Server) -> None:
        """Journals the manifest of a server that has answered."""
        if server.id not in self.seen and self.journal.server(server.id) is None:
            self.writer.append(ServerSeen(id=server.id, manifest=server.manifest))
        self.seen.add(server.id)

    def _mean_output(self) -> float:
        """Tokens that an answer is expected to have."""
        if not self.completions:
            return self.plan.settings.sampling.max_new_tokens / 2
        return self.show.progress.tokens / self.completions

    # --- what has come -----------------------------------------------------------------------------------------------

    def _arrive(self, arrival: _Arrival) -> None:
        self.arrived.append(arrival)
        while len(self.arrived) >= WAITING:  # before more is asked, since what waits is held in memory
            self._finish_some()
        self._finish_soon()

    def _finish_soon(self) -> None:
        if self.step is None and (self.arrived or self.landed) and not self.closing:
            self.step = asyncio.get_running_loop().call_soon(self._finish)

    def _finish(self) -> None:
        """A step for what came before this turn of the event loop; the next one in the next turn, since others wait."""
        self.step = None
        try:
            self._finish_some()
        except Exception as failure:  # noqa: BLE001 (it ends the run)
            self.failure = self.failure or failure
            self.stirred.set()
        self._finish_soon()

    def _finish_some(self) -> None:
        """Judges and counts what was journalled last, or journals what has come."""
        if not self.landed:
            self._journal_some()
            return
        while self.landed:
            self._keep(*self.landed.popleft())
        self.stirred.set()

    def _journal_some(self) -> None:
        """Journals those that came first, with one write, although one of them may fail; that is raised then."""
        replies: list[tuple[_Arrival, Reply]] = []
        tokens = 0
        failure: Exception | None = None
        while self.arrived and len(replies) < BATCH and tokens < BATCH_TOKENS:
            arrival = self.arrived.popleft()
            tokens += len(arrival.completion.output_ids)
            try:
                replies.append((arrival, self._reply(arrival.job.request, arrival.ask, arrival.completion)))
            except Exception as error:  # noqa: BLE001 (raised below)
                failure = failure or error
        for server in {arrival.server.id: arrival.server for arrival, _ in replies}.values():
            try:
                self._see(server)
            except Exception as error:  # noqa: BLE001 (raised below)
                failure = failure or error
        for arrival, reply in replies:
            try:
                self.writer.append(Answered(reply=reply, delivery=arrival.delivery), soon=False)
            except Exception as error:  # noqa: BLE001 (raised below)
                failure = failure or error
        self.writer.flush()
        if failure is not None:
            raise failure
        self.landed.extend((arrival.job, reply) for arrival, reply in replies)

    def _journal_all(self) -> Exception | None:
        """At the end, whatever has come. The first failure, for one who is not ending by another."""
        failure = None
        while self.arrived:
            try:
                self._journal_some()
            except Exception as error:  # noqa: BLE001 (given back)
                failure = failure or error
        return failure

    def _keep(self, job: _Job, reply: Reply) -> None:
        """Counts an answer that is in the journal, and goes on with its conversation."""
        progress = self.show.progress
        progress.tokens += len(reply.output_ids)
        self.recent.append((self.fleet.last_sign, len(reply.output_ids)))
        self.recent_tokens += len(reply.output_ids)
        response = place(reply, job.unit.prompt.key, job.unit.turn, job.sample)
        self.lookout.came(response, len(self.in_flight))
        step = Step(job.unit, job.unit.turn, "answered", job.request)
        self._count(job.pending, step, self.accepts.tokens(response))
        if self.completions < SILENT_LIMIT:
            split = self.plan.reasoning.split(reply)
            self.silent += split.asked and split.state in NO_REASONING
        self.completions += 1
        self.lengths.add(len(reply.prompt_ids), len(reply.output_ids))
        if self.completions == KNOWN_LENGTHS:
            self._tell_capacity()
        if self.plan.settings.reasoning_required and self.silent == self.completions == SILENT_LIMIT:
            raise EyasError(
                f"datasets.{self.plan.settings.dataset}: none of the first {SILENT_LIMIT} answers has any reasoning; "
                f"check model.reasoning and model.template_options, or set reasoning_required: false"
            )
        if job.unit.turn == len(job.unit.prompt.turns):
            self._over(job.pending)
        else:
            self._begin(self.following, self._follow(job, reply))

    async def _follow(self, job: _Job, reply: Reply) -> None:
        steps = self.plan.after(job.unit, job.sample, reply, self.journal)
        if following := await self._next(job.pending, job.sample, steps, journalled=False):
            self.later.append(following)

    def _tell_capacity(self) -> None:
        """Says in the log how many requests really run, now that lengths are known."""
        if pool := self.lease.capacity():
            lengths = self.lengths.lengths(self.plan.settings.sampling.max_new_tokens)
            log.info("%s", sentence(pool, lengths, running(pool, lengths, self.ceiling)))

    def _count(self, pending: _Pending, step: Step, tokens: int, *, journalled: bool = False) -> None:
        """One planned answer is done. tokens: accepted ones that it has brought."""
        pending.tokens += tokens
        self.show.progress.count(step.status)
        self.show.progress.journalled += journalled

    def _over(self, pending: _Pending) -> None:
        """One conversation of a key has ended."""
        pending.left -= 1
        if pending.left == 0:
            self.budget.finish(pending.index, pending.tokens)
            if self.budget.limit is not None:
                self.show.progress.accepted = self.budget.prefix_tokens

    async def _tick(self) -> None:
        progress = self.show.progress
        while True:
            # Who wants no more lends the rest of the ceiling to others.
            more = self.budget.wants_more() and not self.exhausted
            queues = (self.in_flight, self.arrived, self.landed, self.following, self.later, self.ready)
            waiting = sum(map(len, queues))
            demand = progress.planned - progress.done if more else waiting
            progress.in_flight = len(self.in_flight)
            await self.fleet.share(demand)
            self._rate(progress)
            await asyncio.to_thread(
                self.lookout.look,
                self.show.path.parent,
                busy=more,
                at_ceiling=len(self.in_flight) >= self.ceiling,
            )
            progress.alarms = self.lookout.alarms
            progress.gpus = [(gpu.busy, gpu.memory) for gpu in self.lease.shares.gpus]
            self.stirred.set()
            await asyncio.sleep(TICK)

    def _rate(self, progress: Progress) -> None:
        now = time.monotonic()
        # The last two stay, so that the rate of a server from which nothing comes any more falls.
        while len(self.recent) > 2 and now - self.recent[0][0] > 60:
            self.recent_tokens -= self.recent.popleft()[1]
        if len(self.recent) < 2:
            return
        span = max(now - self.recent[0][0], 1.0)
        progress.rate = self.recent_tokens / span
        per_unit = span / len(self.recent)
        left: float = progress.planned - progress.done
        if (needed := self.budget.answers_left()) is not None:
            left = min(left, needed)
        expected = max(left, 0) * per_unit
        # Poisson error of the recent count; lengths and drift are the plan's business.
        slack = 1.645 / len(self.recent) ** 0.5
        progress.eta = (expected * max(1 - slack, 0.0), expected, expected * (1 + slack))

    def _settle(self) -> None:
        """Counts failures against the accepted share; settles them only if the job may succeed with them."""
        # What failed beyond the budget is not needed, and stays to be asked.
        failures = [failure for failure in self.failures if failure.index < self.budget.prefix]
        count = sum(failure.samples for failure in failures)
        if count > self.server.failure_share * self.plan.planned:
            raise EyasError(
                f"datasets.{self.plan.settings.dataset}: {count} of {self.plan.planned} requests failed for good (first cause: {failures[0].entry.reason}); "
                f"more than server.failure_share allows. Mend the server and run again: only these are asked"
            )
        for failure in failures:
            self.writer.append(failure.entry)
