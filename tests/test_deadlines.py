"""Deadlines of many waits, beside asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from eyas.deadlines import Deadlines


def run(work: Callable[[Deadlines], Awaitable[None]]) -> None:
    async def beside() -> None:
        deadlines = Deadlines()
        looking = asyncio.create_task(deadlines.look(0.005))
        await work(deadlines)
        assert not deadlines._waits, "nothing is looked at that has ended"
        looking.cancel()

    asyncio.run(asyncio.wait_for(beside(), 10))


def test_what_is_in_time_comes_back_and_what_is_not_is_a_timeout() -> None:
    async def wait(deadlines: Deadlines, seconds: float, number: int) -> int:
        with deadlines.within(seconds):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0)  # a task that timed out elsewhere must not be cancelled here
        return number

    async def work(deadlines: Deadlines) -> None:
        waits = (wait(deadlines, 0.01 if number % 2 else 5.0, number) for number in range(100))
        found = await asyncio.gather(*waits, return_exceptions=True)
        assert found[::2] == [*range(0, 100, 2)]
        assert {type(one) for one in found[1::2]} == {TimeoutError}

    run(work)


def test_an_error_of_the_block_is_its_own_and_a_task_goes_on_after_a_timeout() -> None:
    async def work(deadlines: Deadlines) -> None:
        with pytest.raises(KeyError), deadlines.within(0.01):
            raise KeyError
        for _ in range(2):
            with pytest.raises(TimeoutError), deadlines.within(0.01):
                await asyncio.sleep(5)
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        await asyncio.sleep(0.02)

    run(work)


@pytest.mark.parametrize("late", [False, True])
def test_who_cancels_a_wait_means_it_even_if_it_was_due(late: bool) -> None:
    async def work(deadlines: Deadlines) -> None:
        async def wait() -> None:
            with deadlines.within(0.0 if late else 5.0):
                await asyncio.sleep(5)

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        if late:
            for one in list(deadlines._waits):
                one.expire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work)
