"""Parts of asking that a whole run would show only by its results."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import eyas.asking
from eyas.asking import AHEAD_SHARE, BATCH, BATCH_TOKENS, WAITING, Asking, prepare
from eyas.budget import Budget
from eyas.config import ModelConfig
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


@pytest.mark.parametrize(
    ("tokens", "first"), [([10] * 100, BATCH), ([BATCH_TOKENS - 1] * 9, 2), ([10 * BATCH_TOKENS] * 3, 1)]
)
def test_many_or_long_answers_are_not_judged_in_one_go(tokens: list[int], first: int) -> None:
    """Replies of other requests would wait for all of them."""
    asking = Asking.__new__(Asking)
    kept: list[Any] = []
    asking.landed = deque((at, SimpleNamespace(output_ids=[1] * count)) for at, count in enumerate(tokens))  # type: ignore[misc]
    asking._keep = lambda job, _: kept.append(job)  # type: ignore[method-assign]
    asking.stirred = asyncio.Event()
    asking._finish_some()
    assert kept == list(range(first))
    assert len(asking.landed) == len(tokens) - first
    assert asking.stirred.is_set()


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
    asking.ready, asking.landed, asking.in_flight, asking.exhausted = deque(), deque(), set(), False
    asking.following, asking.failure, asking.end = set(), None, math.inf
    asking.budget = Budget(None, 1)
    asking.show = SimpleNamespace(progress=SimpleNamespace(allowance=160))  # type: ignore[assignment]
    asking._take = lambda: asking.ready.popleft() if asking.ready else None  # type: ignore[method-assign]
    asking._begin = lambda tasks, work: tasks.add(work)  # type: ignore[method-assign]
    asking._work = lambda job: job  # type: ignore[method-assign,assignment,return-value]
    asyncio.run(fill())
    assert sorted(asking.in_flight) == list(range(1, 161))  # type: ignore[type-var]
    assert list(asking.ready) == list(range(161, 161 + 160 // AHEAD_SHARE))


def test_a_server_faster_than_the_client_does_not_fill_the_memory() -> None:
    """Answers are journalled as they come; those that nobody has had the time to judge are judged before the next request."""

    async def free() -> str:
        return "http://x"

    async def generate(*_: Any) -> tuple[Any, Any]:
        return SimpleNamespace(id="s"), SimpleNamespace(output_ids=[1], usage={})

    async def answer() -> None:
        asking.arrived = asyncio.Event()
        await asking._answer(job)

    asking = Asking.__new__(Asking)
    journalled: list[Any] = []
    job: Any = SimpleNamespace(request="0" * 32, sample=0, unit=SimpleNamespace(ids=[1]))
    nothing: Any = SimpleNamespace(
        free=free, asking=lambda *_: contextlib.nullcontext(), came=lambda *_: None, retries=0, sampling=None
    )
    asking.fleet = asking.server = nothing
    asking.plan = SimpleNamespace(settings=nothing)  # type: ignore[assignment]
    asking._generate, asking._mean_output = generate, lambda: 1.0  # type: ignore[method-assign,assignment]
    asking._see = lambda _: None  # type: ignore[method-assign]
    asking._reply = lambda *_: "reply"  # type: ignore[method-assign,assignment,return-value]
    asking.writer = SimpleNamespace(append=journalled.append)  # type: ignore[assignment]
    asking._finish_some = lambda: most.append(len(asking.landed))  # type: ignore[method-assign]
    asking.asked, asking.landed = {}, deque()
    most: list[int] = []
    for asked in range(1, WAITING + 1):
        assert not most
        asyncio.run(answer())
        assert len(journalled) == asked
    assert most == [WAITING]


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
    asking.ready, asking.landed, asking.exhausted = deque(), deque(), False
    asking.in_flight, asking.following = set(), set()
    asking.failure, asking.end, asking.budget = None, math.inf, Budget(None, 1)
    asking.show = SimpleNamespace(progress=SimpleNamespace(allowance=160))  # type: ignore[assignment]
    asyncio.run(asking._fill(jobs()))
    assert list(asking.ready) == [0, 1, 2]
