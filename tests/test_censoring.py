"""Answers that still run are not short answers: the mean that is projected does not sink with them."""

from __future__ import annotations

import numpy as np
import pytest
from test_projection import STEADY, answers, observed, origin, plan

from eyas.censoring import reached, survival, tail_exponent

LIMIT = 10_240.0


def stopped(seed: int, count: int = 488) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The origin's answers, each stopped somewhere: whole lengths, tokens when the pilot was stopped, whether ended."""
    random = np.random.default_rng(seed)
    whole = random.permutation(origin())[:count]
    until = random.exponential(4_000, len(whole))
    return whole, np.minimum(whole, np.floor(until)), whole <= np.floor(until)


def test_survival_is_kaplan_and_meier() -> None:
    """By hand: of five, one ends at 1; one is lost at 2; of the three left one ends at 3, one at 4; the last runs at 5."""
    at, longer = survival(np.array([1.0, 2, 3, 4, 5]), np.array([True, False, True, True, False]))
    assert at.tolist() == [1, 3, 4]
    np.testing.assert_allclose(longer, [4 / 5, 4 / 5 * 2 / 3, 4 / 5 * 2 / 3 * 1 / 2])


def test_an_answer_that_runs_gets_longer_and_stays_within_the_limit() -> None:
    _, tokens, ended = stopped(1)
    lengths = reached(tokens, ended, LIMIT, 16)
    assert lengths.shape == (int((~ended).sum()), 16)
    assert (lengths >= tokens[~ended][:, None]).all()
    assert lengths.max() <= LIMIT


def test_the_mean_of_stopped_answers_is_that_of_whole_ones() -> None:
    """A quarter were stopped; over many pilots the mean is right within 3 %, where ended answers alone are a third short."""
    found, ended_alone = [], []
    for seed in range(40):
        whole, tokens, ended = stopped(seed)
        filled = np.concatenate([tokens[ended], reached(tokens, ended, LIMIT, 16).mean(axis=1)])
        found.append(filled.mean() / whole.mean())
        ended_alone.append(tokens[ended].mean() / whole.mean())
    assert 0.15 < np.mean([1 - stopped(seed)[2].mean() for seed in range(5)]) < 0.45
    assert np.mean(ended_alone) < 0.75
    assert np.mean(found) == pytest.approx(1, abs=0.03)


def test_beyond_the_longest_that_ended_there_is_a_tail() -> None:
    tokens = np.array([100.0, 200, 300, 400, 5_000, 6_000])
    ended = np.array([True, True, True, True, False, False])
    lengths = reached(tokens, ended, LIMIT, 8)
    assert (lengths[0] > 5_000).all() and (lengths[1] > 6_000).all()
    assert len(set(lengths[0])) > 1


def test_answers_at_the_limit_make_the_tail_heavier() -> None:
    light = np.geomspace(100, 5_000, 64)
    heavy = np.where(np.arange(64) < 54, light, LIMIT)
    every = np.ones(64, dtype=bool)
    assert tail_exponent(heavy, every, LIMIT) < tail_exponent(light, every, LIMIT)


def test_a_plan_with_running_answers_is_no_shorter() -> None:
    whole, tokens, ended = stopped(7)
    full = plan([observed("d", 100_000, answers(whole))], drift=STEADY)
    early = plan([observed("d", 100_000, answers(tokens, ended=ended))], drift=STEADY)
    assert early.still_running == int((~ended).sum())
    assert early.full.total.hours.mean == pytest.approx(full.full.total.hours.mean, rel=0.08)
    assert early.full.total.hours.high - early.full.total.hours.low > 0


def test_cut_answers_are_as_long_as_they_are() -> None:
    """An answer that ended at the limit took that many tokens and no more."""
    half = np.where(np.arange(64) < 32, LIMIT, 1_000.0)
    told = plan([observed("d", 10_000, answers(half))], drift=STEADY).full.total
    assert told.output_tokens.mean == pytest.approx(10_000 * (LIMIT + 1_000) / 2, rel=0.01)
    # Ten of 74 parts are lengths that the pilot has not met, and fewer of these are at the limit.
    assert told.at_limit.mean == pytest.approx(0.5, abs=0.02)
