"""Which answers a token budget takes, against a plain loop over what the fake server is known to say."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_llamacpp import answer, encode
from stage import Served, Stage, fake_server

pytestmark = pytest.mark.fault
CLOSED = "http://127.0.0.1:9"
MOST_NEW, CONTEXT = 400, 2048  # as in stage.py


def expected_answer(text: str) -> list[int]:
    """What the fake server says to `text`, rendered by hand; nothing if there is no room for an answer."""
    opened = [*encode("<|im_start|>user\n"), *encode(text, special=False), *encode("<|im_end|>\n")]
    ids = [*opened, *encode("<|im_start|>assistant\n"), *encode("<think>\n", special=False)]
    return answer(ids, MOST_NEW) if len(ids) + MOST_NEW <= CONTEXT else []


def is_good(ids: list[int]) -> bool:
    return b"</think>" in bytes(token - 3 for token in ids if token > 2)


def taken(answers: list[list[int]], samples: int, limit: int) -> int:
    """The definition: how many keys from the start it takes until their good answers reach the limit."""
    tokens = 0
    for count, ids in enumerate(answers, start=1):
        tokens += samples * len(ids) if is_good(ids) else 0
        if tokens >= limit:
            return count
    return len(answers)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with fake_server(tmp_path_factory.mktemp("server"), "--delay", "0.06") as server:
        yield server


@pytest.mark.parametrize("seed", range(8))
def test_membership_follows_from_order_and_answers_alone(tmp_path: Path, server: Served, seed: int) -> None:
    draw = random.Random(seed)
    asked = [
        f"{seed}.{n}? " + ("why " * 500 if draw.random() < 0.1 else "") for n in range(draw.randint(20, 60))
    ]
    samples = draw.choice([1, 1, 2, 3])
    answers = [expected_answer(text) for text in asked]
    total = samples * sum(len(ids) for ids in answers if is_good(ids))
    concurrency = {"concurrency": draw.choice([1, 3, 8, 32])}
    # The first budget is asked for, a larger one goes on from there, a smaller one finds all in the journal.
    for limit, url in (
        (int(total * draw.uniform(0.1, 0.6)), server.url),
        (int(total * draw.uniform(0.6, 0.95)), server.url),
        (int(total * draw.uniform(0.01, 0.1)) + 1, CLOSED),
    ):
        stage = Stage(
            tmp_path, asked, server=concurrency, dataset={"budget_tokens": limit, "samples": samples}
        )
        stage.run(url)
        count = taken(answers, samples, limit)
        assert [(r.key, r.sample, r.output_ids) for r in stage.responses()] == [
            (f"k{n}", sample, ids)
            for n, ids in enumerate(answers[:count])
            if ids
            for sample in range(samples)
        ]
        assert [o.status for o in stage.outcomes()] == [
            ("answered" if ids else "refused") if n < count else "not_needed"
            for n, ids in enumerate(answers)
            for _ in range(samples)
        ]


def test_what_fails_beyond_the_budget_fails_nothing(tmp_path: Path) -> None:
    by_length = sorted((f"Question {n}: why?" for n in range(300)), key=lambda q: len(expected_answer(q)))
    good = [text for text in by_length if is_good(expected_answer(text))]
    # The first is the longest and the slowest. While it counts at the mean, more is asked for than is needed.
    asked = [good[-1], *good[:40]]
    lengths = [len(expected_answer(text)) for text in asked]
    budget = {"budget_tokens": sum(lengths[:6])}
    stage = Stage(tmp_path, asked, server={"retries": 0, "concurrency": 16}, dataset=budget)
    with fake_server(tmp_path, "--slow", asked[0], "--fail-always", asked[7]) as server:
        stage.run(server.url)
        assert len(server.lines()) > 7
    assert [o.status for o in stage.outcomes()] == ["answered"] * 6 + ["not_needed"] * 35
    more = Stage(tmp_path, asked, dataset={"budget_tokens": 10**9})
    with fake_server(tmp_path) as server:
        more.run(server.url)
    assert {o.status for o in more.outcomes()} == {"answered"}, "once it is needed, it is asked for again"
