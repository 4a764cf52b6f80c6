"""The capacity model against published measurements."""

from __future__ import annotations

import numpy as np
import pytest

from eyas.capacity import Lengths, admitted
from eyas.plugins import Pool
from eyas.speed import Point, Server, Step, fit, served

# Kimi-K2.6 on 8 x RTX PRO 6000, vLLM, FP8 KV cache, no drafter: requests, context of each in tokens, output tokens/s (two runs
# where there are two). Source: the community wiki rtx6kpro.
PUBLISHED = [
    (1, 0, (91.5, 92)),
    (2, 0, (151,)),
    (4, 0, (243,)),
    (8, 0, (350,)),
    (16, 0, (493, 636)),
    (32, 0, (859, 958)),
    (64, 0, (1398, 1497)),
    (128, 0, (2165, 2223)),
    (32, 16_384, (700,)),
    (64, 16_384, (1018,)),
    (128, 16_384, (1398,)),
    (64, 32_768, (764,)),
    (128, 32_768, (1016,)),
]


@pytest.mark.parametrize(("requests", "context", "measured"), PUBLISHED)
def test_published_rates_within_an_eighth(requests: int, context: int, measured: tuple[float, ...]) -> None:
    rate = Step().tokens_per_second(requests, requests * context)
    assert rate == pytest.approx(np.mean(measured), rel=0.12)


# Requests that run with 200,000 tokens of KV cache and prompts of 300 to 600 tokens, by the reserve's ratio (SGLang's admission
# rule, schedule_policy.py, at the origin's lengths).
@pytest.mark.parametrize(("ratio", "most", "least"), [(0.7, 41, 39), (0.35, 59, 54), (0.098, 85, 75)])
def test_admission_within_an_eighth(ratio: float, most: int, least: int) -> None:
    pool = Pool(tokens=200_000)
    for prompt, expected in ((300, most), (600, least)):
        assert admitted(pool, origin(prompt), ratio) == pytest.approx(expected, rel=0.12)


def origin(prompt: float, max_new_tokens: int = 10_240) -> Lengths:
    """n = 488, mean 1,416, sd 1,640."""
    return Lengths(prompt=prompt, output=1416, output_sd=1640, max_new_tokens=max_new_tokens)


# BF16 reads twice the bytes of FP8. Rates of a full cache of 200,000 tokens, as the published fit predicts them.
@pytest.mark.parametrize(("requests", "rate"), [(32, 724), (50, 995), (64, 1185), (80, 1386), (97, 1586)])
def test_a_full_cache_in_bf16(requests: int, rate: float) -> None:
    assert Step(per_token=3.92e-5).tokens_per_second(requests, 200_000) == pytest.approx(rate, rel=0.01)


def points(step: Step, running: list[float], noise: float = 0.0) -> list[Point]:
    spread = np.random.default_rng(3).standard_normal(len(running)) * noise
    return [
        Point(
            running=one,
            resident=one * 2_000,
            tokens_per_second=step.tokens_per_second(one, one * 2_000) * np.exp(off),
        )
        for one, off in zip(running, spread, strict=True)
    ]


def test_the_published_points_alone_give_the_published_curve() -> None:
    found = fit(
        [
            Point(running=at, resident=at * context, tokens_per_second=float(np.mean(rates)))
            for at, context, rates in PUBLISHED
        ],
        Step(base=40.0, exponent=0.6, per_token=5e-5),
    )
    assert found.base == pytest.approx(11.0, rel=0.15)
    assert found.exponent == pytest.approx(0.345, abs=0.06)
    for at, context, rates in PUBLISHED:
        assert found.tokens_per_second(at, at * context) == pytest.approx(np.mean(rates), rel=0.12)


def test_many_points_outvote_the_prior() -> None:
    """A processor on which each request costs nearly as much as the one before."""
    slow = Step(base=60.0, exponent=0.8, per_token=4e-5)
    found = fit(points(slow, [1, 2, 3, 4, 6, 8] * 10, noise=0.05))
    assert found.exponent == pytest.approx(0.8, abs=0.05)
    assert found.tokens_per_second(5, 10_000) == pytest.approx(slow.tokens_per_second(5, 10_000), rel=0.05)


def test_one_point_moves_the_level_and_keeps_the_shape() -> None:
    half = Step(base=22.0, per_token=3.92e-5)
    found = fit(points(half, [50]))
    assert found.exponent == pytest.approx(0.345, abs=0.08)
    assert found.tokens_per_second(50, 100_000) == pytest.approx(
        half.tokens_per_second(50, 100_000), rel=0.02
    )
    assert fit([]) == fit([], Step())
    assert fit([]).base == pytest.approx(11.0)


def test_reading_prompts_takes_its_time() -> None:
    server = Server(pool=Pool(tokens=200_000), step=Step(per_token=3.92e-5))
    short, long = (served(server, origin(prompt), 32) for prompt in (1, 1_416))
    assert short.running == long.running == 32
    longer = 1 / long.tokens_per_second - 1 / short.tokens_per_second
    # 1,415 prompt tokens more for 1,416 output tokens, at 7,000 a second; and each step reads as many more for each request.
    assert longer == pytest.approx(1_415 / 1_416 / 7_000 + 1_415 * 3.92e-8, rel=1e-6)


def test_more_in_flight_than_the_cache_holds_gives_nothing() -> None:
    server = Server(pool=Pool(tokens=200_000), step=Step(per_token=3.92e-5))
    at = [served(server, origin(450), count).tokens_per_second for count in (16, 32, 150, 300)]
    assert at[0] < at[1] < at[2] == at[3]
    assert 930 <= at[2] <= 1_350  # as the origin saw after it was tuned


def test_a_smaller_reserve_is_told_to_overflow() -> None:
    careful, bold = (
        served(Server(pool=Pool(tokens=200_000, conservativeness=factor)), origin(450), 300)
        for factor in (1.0, 0.05)
    )
    assert bold.running > 1.5 * careful.running
    assert (careful.pushed_out, bold.pushed_out) == (False, True)
