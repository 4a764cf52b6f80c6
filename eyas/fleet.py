"""The servers that a job asks: which of them answer, how busy each is, and how much may be in flight."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from eyas.admission import FIRST, Gate, follow, pushed_back, replied
from eyas.config import ServerConfig
from eyas.errors import EyasError
from eyas.plugins import Engine
from eyas.progress import Progress

if TYPE_CHECKING:
    from eyas.server.lease import Lease
    from eyas.server.shares import Move
    from eyas.wire import Session

BACKOFF_FIRST, BACKOFF_MOST = 0.5, 60.0  # seconds between attempts
TICK = 0.5  # seconds between looks at this job's share of what may be in flight
LOOK, LOOK_MOST = 1.0, 10.0  # seconds between looks at a server's load, and for one such look
PROBE_PAUSE, PROBE_MOST = 2.0, 60.0  # seconds between looks at a server that is away, and for one such look

log = logging.getLogger(__name__)
T = TypeVar("T")


class InFlight:
    """A request at a server; a class, since a generator would take three times as long."""

    __slots__ = ("_fleet", "_tokens", "_url")

    def __init__(self, fleet: Fleet, url: str, tokens: float) -> None:
        self._fleet, self._url, self._tokens = fleet, url, tokens

    def __enter__(self) -> None:
        self._fleet.enter(self._url, self._tokens)

    def __exit__(self, *_exception: object) -> None:
        self._fleet.leave(self._url, self._tokens)


class Fleet:
    """The servers of a lease, while requests are in flight.

    outstanding: requests in flight at each. last_sign: when any of them last replied, monotonic time in s.
    """

    def __init__(self, lease: Lease, engine: Engine, server: ServerConfig, progress: Progress) -> None:
        self.lease, self.engine, self.server, self.progress = lease, engine, server, progress
        self.outstanding: dict[str, int] = dict.fromkeys(lease.urls, 0)
        self._tokens: dict[str, float] = dict.fromkeys(
            lease.urls, 0.0
        )  # as outstanding, but of tokens to come
        self._limits: dict[str, int] = dict.fromkeys(lease.urls, FIRST)  # of their gates, as last seen
        self._brought: dict[str, list[int]] = {
            url: [] for url in lease.urls
        }  # output tokens of each new reply
        # Servers that were away at the start or failed a request, and have not generated since.
        self._doubts: dict[str, asyncio.Task[None]] = {}
        # The look at each server with which its requests in flight began.
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._tells_load = type(engine).load is not Engine.load
        self._away: set[str] = set()  # of these, the ones that did not generate when they were looked at
        self.last_sign = self._last_doubt = time.monotonic()
        self._told = False

    def start(self, session: Session) -> None:
        """Begins to watch the servers, and to wait for those that have not generated yet."""
        for url in self.lease.urls:
            if url not in self.lease.manifests:
                self.doubt(url)
        self._watch = asyncio.create_task(self._watch_loads(session))

    def tasks(self) -> list[asyncio.Task[None]]:
        """What runs beside the requests; an error in one of them ends the run."""
        return [*self._doubts.values(), *([self._watch] if self._watch else [])]

    def raise_failures(self) -> None:
        for task in self.tasks():
            if task.done():
                task.result()

    # --- one request -------------------------------------------------------------------------------------------------

    async def free(self) -> str:
        """The server with the fewest tokens to come for what its gate lets through; waits while all are in doubt."""
        while not (urls := self._in_use()):
            await self._wait_for(*self._doubts.values())
        if len(urls) == 1:
            return urls[0]
        return min(urls, key=lambda url: self._tokens[url] / self._limits[url])

    def asking(self, url: str, tokens: float) -> InFlight:
        """For the block in which a request is in flight at `url`, with about `tokens` of prompt and answer."""
        return InFlight(self, url, tokens)

    def enter(self, url: str, tokens: float) -> None:
        self.outstanding[url] += 1
        self._tokens[url] += tokens

    def leave(self, url: str, tokens: float) -> None:
        self.outstanding[url] -= 1
        self._tokens[url] -= tokens
        if not self.outstanding[url]:
            self._looks.pop(url, None)

    async def same_model(self, url: str) -> None:
        """Waits for a look at the model of `url`, taken when no other request of this job is in flight there.

        A server that is replaced while some are breaks them off, and is then in doubt. Raises Retry if it is away.
        """
        if url not in self._looks:
            self._looks[url] = asyncio.create_task(in_own_thread(lambda: self.lease.recognise(url)))
        look = self._looks[url]
        if not look.done():
            await asyncio.shield(look)
        look.result()

    def came(self, url: str, output_tokens: int) -> None:
        """A reply came from `url`."""
        self.last_sign = time.monotonic()
        self._brought[url].append(output_tokens)

    async def push_back(self, url: str) -> None:
        """`url` asks for fewer requests at a time."""
        await self._move(url, lambda gate, outstanding, _, now: pushed_back(gate, outstanding, now))

    def doubt(self, url: str) -> None:
        """Sends nothing to `url` until it really generates again, still the same model."""
        if url not in self._doubts:
            self._last_doubt = time.monotonic()
            self._doubts[url] = asyncio.create_task(self._wait_until_back(url))

    async def certain(self, url: str) -> None:
        """Waits while `url` is in doubt. Raises EyasError after `server.start_timeout`, though others may answer."""
        began = time.monotonic()
        while url in self._doubts:
            await self._wait_for(self._doubts[url])
            if self._in_use() and time.monotonic() > began + self.server.start_timeout:
                raise self._gone(f"{url}, which encodes the prompts,", [url])

    # --- how much ----------------------------------------------------------------------------------------------------

    async def share(self, demand: int) -> None:
        """Asks for this job's part of what may be in flight; told in `progress.allowance`."""
        outstanding = {url: self.outstanding[url] for url in self._in_use()}
        try:
            self.progress.allowance = await asyncio.to_thread(self.lease.shares.share, outstanding, demand)
        except OSError as error:  # a full disk: the last share stays good
            if not self._told:
                log.warning("server.state: cannot be written (%s); this job keeps its share", error)
            self._told = True

    def _in_use(self) -> list[str]:
        if not self._doubts:
            return self.lease.urls
        return [url for url in self.lease.urls if url not in self._doubts]

    async def _watch_loads(self, session: Session) -> None:
        """Moves the gates by what the servers say of their load or, where they say nothing, by what they brought."""
        while True:
            loads = []
            for url in self._in_use():
                if gate := await self._look(session, url):
                    self._limits[url] = gate.limit
                    loads += [gate.load] if gate.load else []
            if loads:
                self.progress.queued = sum(load.waiting for load in loads)
                used = [load.kv_use for load in loads if load.kv_use is not None]
                self.progress.kv_use = max(used, default=None)
            await asyncio.sleep(TICK)

    async def _look(self, session: Session, url: str) -> Gate | None:
        load = None
        if self._tells_load:
            due = True
            with contextlib.suppress(OSError):  # a full disk must not end the run
                due = await asyncio.to_thread(self.lease.shares.due, url, LOOK)
            if not due:
                return self.lease.shares.gate(url)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_MOST):
                    load = await self.engine.load(session, url)
        brought, self._brought[url] = self._brought[url], []
        if load is None:
            replies, tokens = len(brought), sum(brought)
            return await self._move(
                url,
                lambda gate, outstanding, ceiling, now: replied(
                    gate, replies, tokens, outstanding, ceiling, now
                ),
            )
        return await self._move(
            url, lambda gate, outstanding, ceiling, now: follow(gate, load, outstanding, ceiling, now)
        )

    async def _move(self, url: str, how: Move) -> Gate | None:
        with contextlib.suppress(OSError):  # a full disk must not end the run
            return await asyncio.to_thread(self.lease.shares.move, url, how)
        return None

    # --- servers that are away -----------------------------------------------------------------------------------

    async def _wait_for(self, *doubts: asyncio.Task[None]) -> None:
        await asyncio.wait(doubts, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
        self.raise_failures()

    async def _wait_until_back(self, url: str) -> None:
        began, known = time.time(), url in self.lease.manifests
        while not await self._generates(url):
            self._away.add(url)
            self._tell_away()
            # One that is not in doubt may be busy with long answers, each of which has a deadline, or have nothing to do.
            if not self._in_use() and self.silent_since(self._last_doubt):
                raise self._gone("the server", self.lease.urls)
            await asyncio.sleep(PROBE_PAUSE)
        if known:
            lasted = time.time() - began
            came = f"{url} failed a request, and generated again {lasted:.0f} s later"
            self.lease.events.append((time.time(), came))
        del self._doubts[url]
        self._away.discard(url)
        self._tell_away()

    def _tell_away(self) -> None:
        away = ", ".join(sorted(self._away))
        self.progress.message = f"no answer from {away}; asked again when it generates" if away else ""

    def _gone(self, what: str, urls: list[str]) -> EyasError:
        return EyasError(
            f"{what} has not generated anything for {self.server.start_timeout:.0f} s ({', '.join(urls)}); "
            f"start it again and run the same command: finished responses are kept"
        )

    def silent_since(self, moment: float) -> bool:
        """Whether no server has replied for `server.start_timeout` since `moment`, monotonic time in s."""
        return time.monotonic() > max(moment, self.last_sign) + self.server.start_timeout

    async def _generates(self, url: str) -> bool:
        try:
            async with asyncio.timeout(min(PROBE_MOST, self.server.start_timeout)):
                return await in_own_thread(lambda: self.lease.healthy(url))
        except TimeoutError:
            return False


def backoff(attempt: int) -> float:
    """Seconds to wait after attempt 1, 2, …, with jitter."""
    return min(BACKOFF_MOST, math.ldexp(BACKOFF_FIRST, attempt - 1)) * random.uniform(0.5, 1.5)


async def in_own_thread(call: Callable[[], T]) -> T:
    """Awaits a blocking call in a daemon thread; one that hangs holds up nobody, unlike a pool's at the end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_(value)

    def work() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = future.set_result, call()
        except Exception as error:  # noqa: BLE001 (it is raised where the call is awaited)
            outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, daemon=True).start()
    return await future
