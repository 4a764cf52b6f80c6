"""The servers that a job asks: which gets the next request, and what ends the run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage import Stage, fake_server

from eyas.config import ServerConfig
from eyas.fleet import Fleet
from eyas.plugins import Engine
from eyas.progress import Progress

SLOW, FAST = "http://slow", "http://fast"


class SilentEngine:
    """One that tells no load."""

    load = Engine.load


def fleet(shares: Any = None) -> Fleet:
    lease: Any = SimpleNamespace(urls=[SLOW, FAST], shares=shares)
    engine: Any = SilentEngine()
    server = ServerConfig(engine={"name": "x"}, start_timeout=0.01)
    return Fleet(lease, engine, server, Progress(dataset="a", state="generating", planned=1))


def test_each_server_gets_what_its_gate_lets_through() -> None:
    found = fleet()
    found._limits = {SLOW: 4, FAST: 96}

    async def fill() -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(found.asking(await found.free(), 1000))
            assert found.outstanding == {SLOW: 4, FAST: 96}

    asyncio.run(fill())
    assert found.outstanding == {SLOW: 0, FAST: 0}


def test_a_share_that_cannot_be_written_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def share(self, *_: object) -> int:
            raise OSError(28, "No space left on device")

    found = fleet(Full())
    found.progress.allowance = 7

    async def ask() -> None:
        await found.share(10)
        await found.share(10)

    asyncio.run(ask())
    assert found.progress.allowance == 7
    assert caplog.text.count("cannot be written") == 1


@pytest.mark.fault
def test_an_error_beside_the_requests_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def share(self: Fleet, demand: int) -> None:
        raise RuntimeError("the lease folder is gone")

    monkeypatch.setattr(Fleet, "share", share)
    with fake_server(tmp_path) as server, pytest.raises(RuntimeError, match="the lease folder is gone"):
        Stage(tmp_path, ["Why?"]).run(server.url)


def test_long_answers_at_one_server_do_not_make_another_s_absence_the_end() -> None:
    found = fleet()

    async def away() -> str:
        async def never(_url: str) -> bool:
            return False

        found._generates = never  # type: ignore[method-assign]
        found.last_sign = time.monotonic() - 100
        with found.asking(FAST, 1000):
            found.doubt(SLOW)
            await asyncio.sleep(0.05)
            busy = found._doubts[SLOW].done()
            found._doubts[SLOW].cancel()
        return "ended" if busy else "waits"

    assert asyncio.run(away()) == "waits"
