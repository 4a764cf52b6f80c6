"""A proxy that treats requests as bad networks and gateways do: one in ten goes wrong, in seven ways that take turns.

Only generations are its prey; what Eyas asks to learn whether a server is well goes through.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

ONE_IN = 10
STATUSES = ("500", "503", "429")
FAULTS = (*STATUSES, "reset", "stall", "cut short", "slow")
SLOW = 1.0  # s


class FaultyProxy:
    """asked: generations that Eyas sent. shown: faults by kind; all but `slow` are failures."""

    def __init__(self, target: str, seed: int) -> None:
        self.target, self.url = target, ""
        self.asked, self.shown = 0, Counter[str]()
        self._random, self._place = random.Random(seed), 0

    def _draw(self) -> str | None:
        """The fault of this generation: one at a random place of each ten."""
        place = self.asked % ONE_IN
        self._place = self._place if place else self._random.randrange(ONE_IN)
        self.asked += 1
        if place != self._place:
            return None
        fault = FAULTS[self.shown.total() % len(FAULTS)]
        self.shown[fault] += 1
        return fault

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        generation = request.path == "/generate" and json.loads(body)["input_ids"] != [0]
        fault = self._draw() if generation else None
        if fault in STATUSES:
            return web.Response(status=int(fault), text="the gateway says so")
        assert request.transport is not None
        if fault == "reset":
            request.transport.abort()
            return web.Response()
        url, headers = self.target + request.path_qs, {"Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(request.method, url, data=body) as reply,
        ):
            status, content = reply.status, await reply.read()
        if fault == "stall":
            await asyncio.sleep(3600)  # or until the other side gives up
        if fault == "slow":
            await asyncio.sleep(SLOW)
        whole = web.Response(status=status, body=content, content_type="application/json")
        if fault != "cut short":
            return whole
        part = web.StreamResponse(status=status, headers={"Content-Length": str(len(content))})
        await part.prepare(request)
        await part.write(content[: len(content) // 2])
        request.transport.close()
        return part


@contextmanager
def faulty(target: str, seed: int) -> Iterator[FaultyProxy]:
    """A faulty proxy in front of a server without a key, in a thread of its own."""
    proxy, loop = FaultyProxy(target, seed), asyncio.new_event_loop()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
