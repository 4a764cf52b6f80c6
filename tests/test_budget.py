"""A budget takes the shortest finished prefix of the fixed order, whatever the order of completion."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from eyas.budget import Budget


def run(tokens: list[int], limit: int, seed: int, concurrency: int) -> tuple[int, int, int]:
    """Simulates completions in random order; returns (prefix, its tokens, units submitted)."""
    order, budget = random.Random(seed), Budget(limit, guess=100)
    submitted, flying = 0, []
    while not budget.reached:
        while submitted < len(tokens) and len(flying) < concurrency and budget.wants_more():
            budget.submit(submitted)
            flying.append(submitted)
            submitted += 1
        if not flying:
            break
        done = flying.pop(order.randrange(len(flying)))
        budget.finish(done, tokens[done])
    return budget.prefix, budget.prefix_tokens, submitted


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=60),
    st.integers(1, 4000),
    st.integers(),
    st.integers(1, 20),
)
def test_membership_depends_on_the_order_alone(
    tokens: list[int], limit: int, seed: int, concurrency: int
) -> None:
    total, expected = 0, len(tokens)
    for n, count in enumerate(tokens):
        total += count
        if total >= limit:
            expected = n + 1
            break
    prefix, prefix_tokens, _ = run(tokens, limit, seed, concurrency)
    assert (prefix, prefix_tokens) == (expected, sum(tokens[:expected]))


def test_what_is_in_flight_counts_so_that_little_is_asked_in_vain() -> None:
    prefix, _, submitted = run([100] * 1000, limit=10_000, seed=1, concurrency=32)
    assert prefix == 100
    assert submitted == 100


def test_short_answers_resume_submission() -> None:
    prefix, tokens, _ = run([100] * 5 + [1] * 5000, limit=600, seed=2, concurrency=8)
    assert (prefix, tokens) == (105, 600)


def test_without_a_budget_everything_is_wanted() -> None:
    budget = Budget(None, guess=1)
    budget.submit(0)
    budget.finish(0, 10**12)
    assert budget.wants_more() and not budget.reached


def test_what_is_left_is_told_in_answers_not_in_keys() -> None:
    budget = Budget(10_000, guess=100)
    assert budget.answers_left() is None
    for index in range(5):
        budget.submit(index, answers=8)
    for index in (0, 1, 3):  # the last one beyond the finished prefix
        budget.finish(index, 800)
    assert budget.answers_left() == 76
    assert Budget(None, guess=1).answers_left() is None
