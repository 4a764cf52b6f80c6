"""The servers that a job asks: which gets the next request, and what ends the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import journal_entries
from processes import eventually, steady_port
from stage import Served, Stage, fake_server

import eyas.fleet
from eyas.config import ServerConfig
from eyas.errors import EyasError
from eyas.fleet import Fleet
from eyas.journal import Answered
from eyas.plugins import Engine
from eyas.progress import Progress

SLOW, FAST = "http://slow", "http://fast"


class SilentEngine:
    """One that tells no load."""

    load = Engine.load


def fleet(shares: Any = None) -> Fleet:
    lease: Any = SimpleNamespace(urls=[SLOW, FAST], shares=shares, manifests={}, events=[])
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


def test_where_prompts_are_encoded_is_not_waited_for_for_ever() -> None:
    found = fleet()

    async def away(_url: str) -> bool:
        return False

    async def wait() -> None:
        found._generates = away  # type: ignore[method-assign]
        found.doubt(SLOW)
        try:
            await found.certain(SLOW)
        finally:
            found._doubts[SLOW].cancel()

    with pytest.raises(EyasError, match=r"^http://slow, which encodes the prompts, has not generated"):
        asyncio.run(wait())


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


def test_a_server_without_work_is_no_silent_one() -> None:
    """Other jobs may have all of what is in flight there."""
    found = fleet()

    async def away() -> bool:
        async def never(_url: str) -> bool:
            return False

        found._generates = never  # type: ignore[method-assign]
        found.last_sign = found._last_doubt = time.monotonic() - 100
        found.doubt(SLOW)
        await asyncio.sleep(0.05)
        ended = found._doubts[SLOW].done()
        found._doubts[SLOW].cancel()
        return ended

    assert not asyncio.run(away())


# --- several addresses ---------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eyas.fleet, "BACKOFF_FIRST", 0.02)
    monkeypatch.setattr(eyas.fleet, "BACKOFF_MOST", 0.1)
    monkeypatch.setattr(eyas.fleet, "PROBE_PAUSE", 0.1)


def texts(count: int) -> list[str]:
    return [f"Question {n}: why?" for n in range(count)]


def until(server: Served, count: int) -> None:
    eventually(lambda: len(server.lines()) >= count, f"{count} answers", 60)


def by_slots(stage: Stage) -> Counter[int]:
    """Journalled answers by the slots of the server that the journal says gave them."""
    manifests = json.loads(stage.paths.servers.read_bytes())
    entries = [e for path in stage.paths.journal.glob("*.zst") for e in journal_entries(path.read_bytes())]
    answers = [entry for entry in entries if isinstance(entry, Answered)]
    return Counter(manifests[answer.delivery.server]["slots"] for answer in answers)


@pytest.mark.fault
def test_a_dead_address_and_a_late_one_hold_up_nobody_and_each_answer_names_its_server(
    tmp_path: Path, quick: None
) -> None:
    dead, port = "http://127.0.0.1:9", steady_port()
    late_url = f"http://127.0.0.1:{port}"
    stage = Stage(tmp_path, texts(300), server={"start_timeout": 300})
    with fake_server(tmp_path, "--delay", "0.1") as first:
        thread, errors = stage.start([dead, late_url, first.url])
        until(first, 20)
        (tmp_path / "late").mkdir()
        with fake_server(tmp_path / "late", "--port", str(port), "--slots", "32", "--delay", "0.1") as late:
            thread.join(timeout=60)
            assert not thread.is_alive() and not errors
            assert by_slots(stage) == {64: len(first.lines()), 32: len(late.lines())}
            assert len(late.lines()) > 20
    assert len(stage.responses()) == 300


@pytest.mark.fault
def test_a_wrong_model_at_a_late_address_stops_the_run_and_is_asked_nothing(
    tmp_path: Path, quick: None
) -> None:
    port = steady_port()
    stage = Stage(tmp_path, texts(300), server={"start_timeout": 300})
    with fake_server(tmp_path, "--delay", "0.2") as first:
        thread, errors = stage.start([first.url, f"http://127.0.0.1:{port}"])
        until(first, 20)
        (tmp_path / "late").mkdir()
        wrong = ("--port", str(port), "--quantisation", "Q8_0")
        with fake_server(tmp_path / "late", *wrong) as late:
            thread.join(timeout=60)
            assert not thread.is_alive()
            assert "model.quantisation: the server holds Q8_0 weights, not Q4_1" in str(errors[0])
            assert not late.lines()


@pytest.mark.fault
def test_a_server_that_comes_back_with_other_settings_is_another_server_to_the_journal(
    tmp_path: Path, quick: None
) -> None:
    stage = Stage(tmp_path, texts(120))
    with fake_server(tmp_path, "--delay", "0.2") as before:
        thread, errors = stage.start(before.url)
        until(before, 30)
        before.process.kill()
        before.process.wait()
        port = before.url.rpartition(":")[2]
        (tmp_path / "after").mkdir()
        other = ("--port", port, "--slots", "32", "--model", str(tmp_path / "tiny.gguf"))
        with fake_server(tmp_path / "after", *other) as after:
            thread.join(timeout=60)
            assert not thread.is_alive() and not errors
            found = by_slots(stage)
            assert found[32] == len(after.lines()) and found.total() == 120
            # What the one before answered while it was killed may not have arrived.
            assert len(before.lines()) - 8 <= found[64] <= len(before.lines())
    assert len(json.loads(stage.paths.servers.read_bytes())) == 2
