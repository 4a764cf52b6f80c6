"""Parts of asking that a whole run would show only by its results."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import eyas.asking
from eyas.asking import AHEAD_SHARE, BATCH, BATCH_TOKENS, WAITING, Asked, Asking, prepare
from eyas.budget import Budget
from eyas.config import ModelConfig
from eyas.deadlines import Deadlines
from eyas.errors import EyasError
from eyas.lengths import places


def test_added_tokens_are_found_in_prompt_and_answer_and_nothing_else_is() -> None:
    asking: Any = object.__new__(Asking)
    asking.added = {3: "<a>", 7: "<b>", 9: "<c>"}
    asking.own = frozenset(asking.added)
    asking.is_own = np.zeros(11, bool)
    asking.is_own[[3, 7, 9]] = True
    assert asking._added_in([3, 4], places([5, 9, 9, 200_000])) == {"<a>": 3, "<c>": 9}
    assert asking._added_in([4], places([10, 11, 200_000])) == {}
    assert asking._added_in([4], places([7])) == {"<b>": 7}


@pytest.mark.parametrize("lengths", [[1, 2], "1", None])
def test_a_tokenizer_whose_lengths_no_journal_could_hold_is_refused_before_anything_is_asked(
    lengths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = SimpleNamespace(decode=lambda ids: ("ab", lengths))
    engine: Any = SimpleNamespace(name="theirs", tokenizer=lambda url, key: tokenizer)
    monkeypatch.setattr(eyas.asking, "Renderer", lambda *_: SimpleNamespace(render=lambda _: [1, 2]))
    lease: Any = SimpleNamespace(urls=["http://x"], key=None)
    reasoning: Any = SimpleNamespace(prefill="", self_test=lambda *_: pytest.fail("went on"))
    with pytest.raises(
        EyasError, match=r"^engine 'theirs': its tokenizer's decode must give .* correct the plugin$"
    ):
        prepare(engine, lease, ModelConfig(id="m"), reasoning)


def test_all_who_may_ask_have_something_to_however_long_rendering_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wider gate must not wait for the next tick, though rendering stands back for others now and then."""

    async def jobs() -> AsyncIterator[Any]:
        for number in range(500):
            yield number + 1

    async def fill() -> None:
        await asking._fill(jobs())
        asking._employ()

    clock = itertools.chain([0.0] * 5, itertools.repeat(1.0))  # it stands back once, early on
    monkeypatch.setattr(eyas.asking, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    asking = Asking.__new__(Asking)
    asking.ready, asking.in_flight, asking.exhausted = deque(), set(), False
    asking.arrived, asking.landed, asking.closing = deque(), deque(), False
    asking.following, asking.failure, asking.end = set(), None, math.inf
    asking.budget = Budget(None, 1)
    asking.show = SimpleNamespace(progress=SimpleNamespace(allowance=160))  # type: ignore[assignment]
    asking._take = lambda: asking.ready.popleft() if asking.ready else None  # type: ignore[method-assign]
    asking._begin = lambda tasks, work: tasks.add(work)  # type: ignore[method-assign]
    asking._work = lambda job: job  # type: ignore[method-assign,assignment,return-value]
    asyncio.run(fill())
    assert sorted(asking.in_flight) == list(range(1, 161))  # type: ignore[type-var]
    assert list(asking.ready) == list(range(161, 161 + min(2 * BATCH, 160 // AHEAD_SHARE)))


def arrival(number: int, tokens: int = 1) -> Any:
    """An answer that repeats the token `number`."""
    job = SimpleNamespace(request=f"{number:032x}")
    completion = SimpleNamespace(output_ids=[number] * tokens)
    return SimpleNamespace(
        job=job, ask=None, completion=completion, server=SimpleNamespace(id="s"), delivery=None
    )


def finishing(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[list[int]], list[int]]:
    """Asking whose answers are their first token; what it journals, by write, and what it counts."""
    asking: Any = Asking.__new__(Asking)
    writes: list[list[int]] = []
    waiting: list[int] = []
    counted: list[int] = []

    def flush() -> None:
        writes.append(waiting[:])
        waiting.clear()

    def reply(_request: str, _ask: Any, completion: Any) -> Any:
        if completion.output_ids[0] == 13:
            raise EyasError("no id of this model")
        return completion.output_ids[0]

    def append(entry: Any, *, soon: bool) -> None:
        if entry.reply == 17:
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no character")
        waiting.append(entry.reply)

    monkeypatch.setattr(eyas.asking, "Answered", lambda **fields: SimpleNamespace(**fields))
    asking._reply, asking._see = reply, lambda _: None
    asking._keep = lambda _, answer: counted.append(answer)
    asking.writer = SimpleNamespace(append=append, flush=flush)
    asking.arrived, asking.landed, asking.failure = deque(), deque(), None
    asking.step, asking.closing = None, False
    asking.stirred = asyncio.Event()
    return asking, writes, counted


def test_what_comes_together_is_journalled_with_one_write_and_then_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking, writes, counted = finishing(monkeypatch)

    async def come() -> None:
        for number in range(5):
            asking._arrive(arrival(number))
        assert (writes, counted) == ([], [])
        await asyncio.sleep(0)
        assert (writes, counted) == ([[*range(5)]], [])
        asking._arrive(arrival(5))
        await asyncio.sleep(0)
        assert counted == [*range(5)] and asking.stirred.is_set()
        for _ in range(2):
            await asyncio.sleep(0)
        assert (writes, counted) == ([[*range(5)], [5]], [*range(6)])

    asyncio.run(come())


@pytest.mark.parametrize(
    ("tokens", "first"), [([10] * 100, BATCH), ([BATCH_TOKENS - 1] * 9, 2), ([10 * BATCH_TOKENS] * 3, 1)]
)
def test_many_or_long_answers_are_not_finished_in_one_go(
    tokens: list[int], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies of other requests would wait for all of them."""
    asking, writes, counted = finishing(monkeypatch)
    asking.arrived.extend(arrival(100 + number, count) for number, count in enumerate(tokens))
    asking._finish_some()
    asking._finish_some()
    assert writes == [[*range(100, 100 + first)]] and counted == writes[0]
    assert len(asking.arrived) == len(tokens) - first


@pytest.mark.parametrize("closing", [False, True], ids=["while asking", "at the end"])
def test_answers_that_cannot_be_journalled_end_the_run_and_the_others_are(
    closing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cannot be decoded, one cannot be written."""
    asking, writes, counted = finishing(monkeypatch)
    numbers = [*range(11, 11 + 3 * BATCH + 2)]
    asking.closing = closing

    async def come() -> None:
        for number in numbers:
            asking._arrive(arrival(number))
        if closing:
            asking.failure = asking._journal_all()
        for _ in range(20):
            await asyncio.sleep(0)

    asyncio.run(come())
    journalled = [one for write in writes for one in write]
    assert journalled == [number for number in numbers if number not in (13, 17)]
    assert str(asking.failure) == "no id of this model", "the first that failed"
    assert set(counted) <= set(journalled) and not (closing and counted)


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_has_come_is_journalled_and_what_has_not_is_unfinished_when_a_run_ends(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, writes, _ = finishing(monkeypatch)

    async def come() -> None:
        loop = asyncio.get_running_loop()
        replies = {21: loop.create_future(), 22: loop.create_future()}

        async def work(number: int) -> None:
            asking.asked[number] = Asked(None, number, 0.0)  # type: ignore[arg-type]
            try:
                await replies[number]
            finally:
                del asking.asked[number]
            asking._arrive(arrival(number))

        asking.asked, asking.stopped, asking.following, asking.beside = {}, 5.0, set(), set()
        asking.in_flight = {asyncio.create_task(work(number)) for number in replies}
        asking.fleet = SimpleNamespace(tasks=list)
        asking.session = SimpleNamespace(hand_out=lambda: replies[21].set_result(None))
        await asyncio.sleep(0)
        closing = asyncio.create_task(asking._close())
        await asyncio.sleep(0)
        if interrupted:
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
        else:
            assert await closing is None
            assert [(one.sample, one.ended) for one in asking.unfinished] == [(22, 5.0)]

    asyncio.run(come())
    assert [one for write in writes for one in write] == [21]


def test_a_run_ends_requests_that_are_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    async def same_model(_: str) -> None:
        await asyncio.sleep(60)

    async def idle() -> None:
        await asyncio.sleep(60)

    async def loop() -> None:
        with pytest.raises(TimeoutError):
            await asking._generate("http://x", SimpleNamespace(sampling=None))

    monkeypatch.setattr(eyas.asking, "TICK", 0.01)
    asking, _, _ = finishing(monkeypatch)
    asking.show = SimpleNamespace(progress=SimpleNamespace())
    asking.lease = SimpleNamespace(key=None)
    asking.fleet = SimpleNamespace(start=lambda _: None, tasks=list, same_model=same_model)
    asking.deadlines, asking.stopped = Deadlines(), None
    asking.in_flight, asking.following, asking.beside = set(), set(), set()
    asking._tick, asking._loop, asking._settle = idle, loop, lambda: None
    asking._deadline = lambda _: 0.02
    asyncio.run(asyncio.wait_for(asking.run(), 10))


def test_one_step_at_a_time_however_much_is_finished_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asking, _, _ = finishing(monkeypatch)
    steps: list[None] = []
    finish = asking._finish_some

    def finish_some() -> None:
        steps.append(None)
        finish()

    async def come() -> None:
        for number in range(100, 105):
            asking._arrive(arrival(number))
            asking._finish_some()  # as near a budget
            asking._finish_some()
        asking._arrive(arrival(105))
        asking._finish_some = finish_some
        await asyncio.sleep(0)
        assert len(steps) == 1

    asyncio.run(come())


def test_a_server_faster_than_the_client_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody has had the time to finish is, before the next request."""
    asking, writes, counted = finishing(monkeypatch)

    async def come() -> None:
        for number in range(100, 100 + 10 * WAITING):
            asking._arrive(arrival(number))
            assert len(asking.arrived) < WAITING and len(asking.landed) <= BATCH
        assert len(writes) > 8 * WAITING / BATCH and len(counted) > 8 * WAITING

    asyncio.run(come())


def test_conversations_whose_next_turn_is_rendered_keep_their_place() -> None:
    asking = Asking.__new__(Asking)
    asking.show = SimpleNamespace(progress=SimpleNamespace(allowance=8))  # type: ignore[assignment]
    asking.in_flight, asking.following = {1, 2, 3}, {4, 5}  # type: ignore[arg-type]
    assert asking._free() == 3


def test_requests_are_no_longer_rendered_once_something_has_failed() -> None:
    async def jobs() -> AsyncIterator[Any]:
        for number in range(500):
            if number == 2:
                asking.failure = EyasError("over")
            yield number

    asking = Asking.__new__(Asking)
    asking.ready, asking.exhausted = deque(), False
    asking.arrived, asking.landed, asking.closing = deque(), deque(), False
    asking.in_flight, asking.following = set(), set()
    asking.failure, asking.end, asking.budget = None, math.inf, Budget(None, 1)
    asking.show = SimpleNamespace(progress=SimpleNamespace(allowance=160))  # type: ignore[assignment]
    asyncio.run(asking._fill(jobs()))
    assert list(asking.ready) == [0, 1, 2]


@pytest.mark.parametrize(
    ("asks_server", "refusal", "soon"),
    [(False, None, False), (False, "no such role", True), (True, None, True)],
)
def test_a_rendering_waits_for_the_next_answer_unless_it_is_dear_or_there_will_be_none(
    asks_server: bool, refusal: str | None, soon: bool
) -> None:
    async def certain(_: str) -> None:
        pass

    asking: Any = Asking.__new__(Asking)
    written: list[bool] = []
    prompt = SimpleNamespace(messages=[], tools=[])
    asking.lease = SimpleNamespace(urls=["http://x"])
    asking.server, asking.failure = SimpleNamespace(retries=0), None
    asking.fleet = SimpleNamespace(certain=certain, raise_failures=lambda: None)
    asking.tokenizer = SimpleNamespace(asks_server=asks_server)
    asking.plan = SimpleNamespace(unit=lambda *_: "unit")
    asking.writer = SimpleNamespace(append=lambda _, *, soon: written.append(soon))
    asking._render = lambda _: SimpleNamespace(refusal=refusal)
    assert asyncio.run(asking._rendered(SimpleNamespace(prompt=prompt, index=0, turn=0))) == "unit"
    assert written == [soon]
