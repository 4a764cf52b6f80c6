"""The gate against simulated servers: what it settles at, and how it behaves when the server changes."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest

from eyas.admission import COOL_DOWN, SETTLE, Gate, follow, new_gate, pushed_back, replied
from eyas.plugins import Load


class Server:
    """Decodes at most `room` requests at a time, the rest wait; answers take `seconds` on average, exponentially.

    Reports are `age` seconds old, as those of SGLang are.
    """

    def __init__(self, room: int, seconds: float, age: float, seed: int) -> None:
        self.room, self.seconds, self.age = room, seconds, age
        self.random = random.Random(seed)
        self.running: list[float] = []
        self.waiting = 0
        self.now = 0.0
        self.reports: deque[tuple[float, Load]] = deque()
        self.retractions = 0
        self.done = 0

    @property
    def outstanding(self) -> int:
        return len(self.running) + self.waiting

    def advance(self, step: float) -> None:
        self.now += step
        ended = [end for end in self.running if end <= self.now]
        self.done += len(ended)
        self.running = [end for end in self.running if end > self.now]
        while self.waiting and len(self.running) < self.room:
            self.waiting -= 1
            self.running.append(self.now + self.random.expovariate(1 / self.seconds))
        self.reports.append((self.now, Load(len(self.running), self.waiting, None, self.retractions)))

    def report(self) -> Load:
        while len(self.reports) > 1 and self.reports[1][0] <= self.now - self.age:
            self.reports.popleft()
        return self.reports[0][1]


def drive(server: Server, gate: Gate, ceiling: int, seconds: float) -> tuple[Gate, list[tuple[int, int]]]:
    """The gate after `seconds`, and (running, waiting) at each half second."""
    seen = []
    for _ in range(int(seconds / 0.5)):
        server.waiting += max(0, gate.limit - server.outstanding)
        server.advance(0.5)
        gate = follow(gate, server.report(), server.outstanding, ceiling, server.now)
        seen.append((len(server.running), server.waiting))
    return gate, seen


@pytest.mark.parametrize("age", [0.0, 3.0])
@pytest.mark.parametrize("room", [4, 50, 400])
@pytest.mark.parametrize("seconds", [5.0, 60.0])
def test_the_queue_is_short_and_the_server_is_full(room: int, seconds: float, age: float) -> None:
    server = Server(room, seconds, age, seed=room)
    gate, _ = drive(server, new_gate(1000, 0.0), 1000, 240)
    gate, seen = drive(server, gate, 1000, 600)
    full = sum(running for running, _ in seen) / len(seen) / room
    queue = sum(waiting for _, waiting in seen) / len(seen)
    assert full > 0.95
    assert queue <= 3 * max(2, 0.1 * room) + 1


def test_a_server_that_holds_everything_is_given_everything_within_a_minute() -> None:
    server = Server(10_000, 60.0, 2.0, seed=1)
    gate, _ = drive(server, new_gate(1024, 0.0), 1024, 60)
    assert gate.limit == 1024


def test_the_ceiling_is_never_passed() -> None:
    server = Server(10_000, 5.0, 0.0, seed=1)
    gate = new_gate(7, 0.0)
    for _ in range(20):
        gate, _ = drive(server, gate, 7, 10)
        assert 1 <= gate.limit <= 7


def test_a_smaller_server_shortens_the_queue_and_a_larger_one_is_filled_again() -> None:
    server = Server(100, 10.0, 2.0, seed=3)
    gate, _ = drive(server, new_gate(500, 0.0), 500, 200)
    server.room = 50
    gate, seen = drive(server, gate, 500, 200)
    assert gate.limit < 75
    assert sum(running for running, _ in seen[-100:]) / 100 > 47
    server.room = 100
    gate, seen = drive(server, gate, 500, 400)
    assert sum(running for running, _ in seen[-100:]) / 100 > 90


def test_an_old_report_does_not_open_the_gate() -> None:
    gate = new_gate(500, 0.0)
    empty = Load(0, 0)
    assert follow(gate, empty, outstanding=16, ceiling=500, now=3.0).limit == 16
    assert follow(gate, Load(16, 0), outstanding=16, ceiling=500, now=3.0).limit == 32


def test_a_retraction_is_a_small_step_back_and_then_a_rest() -> None:
    gate = Gate(limit=100, eager=False, retractions=4)
    after = follow(gate, Load(80, 20, 0.97, 5), 100, 500, now=20.0)
    assert after.limit == 95
    # As long as it rests, neither more retractions nor an empty queue move it.
    assert follow(after, Load(95, 0, 0.9, 6), 95, 500, now=20.0 + COOL_DOWN / 2).limit == 95
    assert follow(after, Load(95, 0, 0.9, 5), 95, 500, now=20.0 + COOL_DOWN + SETTLE).limit > 95


def test_a_slow_first_prefill_does_not_close_the_gate() -> None:
    gate = new_gate(500, 0.0)
    for second in range(1, 14):
        gate = follow(gate, Load(0, 16), 16, 500, now=float(second))
    assert (gate.limit, gate.eager) == (16, True)


def test_a_retraction_of_others_alone_closes_nothing() -> None:
    gate = Gate(limit=100, eager=False, retractions=4)
    assert follow(gate, Load(80, 20, 0.97, 5), 0, 500, now=20.0).limit >= 88


def test_retractions_from_before_our_time_count_for_nothing() -> None:
    assert follow(new_gate(500, 0.0), Load(16, 0, 0.5, 900), 16, 500, now=3.0).limit == 32


def test_a_burst_of_429_is_one_step_back() -> None:
    gate = Gate(limit=100, changed=0.0)
    after = pushed_back(gate, 100, now=50.0)
    assert after.limit == 80
    for moment in (50.1, 50.2, 51.0):
        after = pushed_back(after, 100, now=moment)
    assert after.limit == 80
    assert pushed_back(after, 60, now=53.0).limit == 48


def test_a_stray_429_of_a_server_with_an_empty_queue_closes_nothing() -> None:
    """Seen with a proxy that refused one reply in seventy: the gate fell to 1 and stayed there."""
    gate = Gate(limit=64, changed=0.0, looked=50.0, load=Load(60, 0))
    for moment in range(50, 60):
        gate = pushed_back(gate, 60, now=float(moment))
    assert gate.limit == 64
    assert follow(gate, Load(60, 0), 64, 500, now=60.0).limit == 64, "it opens no further at once"
    assert follow(gate, Load(60, 0), 64, 500, now=62.0).limit > 64
    # No word of the queue for long is another matter.
    assert pushed_back(Gate(limit=64, looked=50.0, load=Load(60, 0)), 60, now=90.0).limit == 48


def test_a_stray_429_does_not_end_the_doubling() -> None:
    gate = pushed_back(follow(new_gate(500, 0.0), Load(12, 0), 12, 500, now=1.0), 16, now=1.5)
    assert follow(gate, Load(16, 0), 16, 500, now=5.0).limit == 32


def test_no_429_closes_the_gate_below_what_the_server_runs() -> None:
    """The queue that is aimed at is seldom empty, so strays meet one; and what is in flight here may pause elsewhere."""
    gate = Gate(limit=64, load=Load(60, 4))
    for moment in range(50, 150, 5):
        gate = msgspec.structs.replace(gate, looked=float(moment))
        gate = pushed_back(gate, 7, now=float(moment))
    assert gate.limit == 60


def test_a_queue_of_a_moment_closes_nothing() -> None:
    """Answers of hundredths of a second: most looks show an empty server, some what has just come in."""
    gate = Gate(limit=64, eager=False)
    for second in range(50, 80):
        gate = follow(gate, Load(1, 9) if second % 3 == 0 else Load(0, 0), 40, 64, now=float(second))
    assert gate.limit == 64
    for second in range(80, 84):
        gate = follow(gate, Load(20, 44), 64, 64, now=float(second))
    assert gate.limit == 22, "one that stays does"


def test_a_gate_never_closes_wholly() -> None:
    gate = Gate(limit=1)
    for moment in range(0, 100, 5):
        gate = pushed_back(gate, 1, now=float(moment))
    assert gate.limit == 1


def climb(rate: dict[str, float], ceiling: int, minutes: int, gate: Gate | None = None) -> Gate:
    """A server that tells nothing: throughput grows with the requests in flight up to `room`, then no more."""
    gate = gate or new_gate(ceiling, 0.0)
    now = gate.changed
    for _ in range(minutes * 600):
        now += 0.1
        in_flight = min(gate.limit, rate["room"])
        tokens = rate["tok/s"] * in_flight**0.65 * 0.1
        gate = replied(gate, max(1, round(tokens / 100)), round(tokens), gate.limit, ceiling, now)
    return gate


def test_without_load_reports_the_gate_opens_while_throughput_grows() -> None:
    gate = climb({"room": 64, "tok/s": 1000}, ceiling=1000, minutes=9)
    assert 64 <= gate.limit <= 160


def test_without_load_reports_a_roomy_server_gets_the_ceiling() -> None:
    assert climb({"room": 10_000, "tok/s": 1000}, ceiling=256, minutes=9).limit == 256


def test_a_client_that_asks_for_less_than_the_gate_learns_nothing_from_it() -> None:
    gate = Gate(limit=100, window_since=0.0)
    after = replied(gate, 500, 50_000, outstanding=30, ceiling=1000, now=60.0)
    assert (after.limit, after.window_replies, after.rate_limit) == (100, 0, 0)
