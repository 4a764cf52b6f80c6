"""What-if: levers against the lengths that were seen, in the order of what they save."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_projection import LIMIT, STEADY, STORE, answers, observed, shared_pilot, windows

from eyas.plugins import Pool
from eyas.projection import Machine, Observed
from eyas.whatif import Lever, Now, binding, lengths_of, levers, step_of


def now(parts: list[Observed] | None = None, rate: float = 995, **changed: Any) -> Now:
    """The origin behind SGLang: 200,000 tokens of KV cache in BF16, 150 in flight, eight GPUs."""
    fields: dict[str, Any] = {
        "observed": shared_pilot() if parts is None else parts,
        "windows": windows(rate),
        "machine": Machine(gpus=8),
        "store": STORE,
        "drift": STEADY,
        "pool": Pool(tokens=200_000),
        "in_flight": 150,
        "halves": True,
        "tokens_per_percent": 14_600.0,
    }
    return Now(**(fields | changed))


@pytest.fixture(scope="module")
def table() -> list[Lever]:
    return levers(now())


def of(table: list[Lever], setting: str, value: str | None = None) -> Lever:
    return next(one for one in table if one.setting == setting and value in (None, one.value))


def test_the_lever_that_saves_most_comes_first(table: list[Lever]) -> None:
    saved = [one.saved_hours for one in table]
    assert saved == sorted(saved, reverse=True)
    assert {one.setting for one in table} == {
        "max_new_tokens",
        "budget_tokens",
        "concurrency",
        "kv_dtype",
        "mem_fraction_static",
        "schedule_conservativeness",
        "servers",
        "order",
    }


def test_a_lower_limit_costs_what_the_lengths_say(table: list[Lever]) -> None:
    """Cut answers and lost tokens are those of the pilot's own answers, each dataset by its prompts."""
    found = of(table, "max_new_tokens", "5,120")
    parts = shared_pilot()
    rows = np.array([len(one.sizes) for one in parts])
    seen = [one.answers.output_tokens for one in parts]
    cut = np.average([(one > 5_120).mean() for one in seen], weights=rows)
    left = sum(row * np.minimum(one, 5_120).mean() for row, one in zip(rows, seen, strict=True))
    whole = sum(row * one.mean() for row, one in zip(rows, seen, strict=True))
    assert found.answers_cut == pytest.approx(cut, abs=0.005)
    assert found.tokens_lost == pytest.approx(1 - left / whole, abs=0.01)
    assert (
        found.cost
        == f"{found.answers_cut:.0%} of answers cut, {found.tokens_lost:.0%} of tokens lost".replace(
            "%", " %"
        )
    )
    assert found.sentence == f"max_new_tokens 5,120: {found.cost}, {found.saved_hours:,.1f} h saved"
    # Shorter answers hold less of the cache too, so more of them run.
    assert found.saved_hours > found.tokens_lost * (found.hours.mean + found.saved_hours)


def test_an_answer_that_still_ran_past_a_lower_limit_is_not_taken_for_rejected() -> None:
    running = np.arange(100) >= 60
    pilot = answers(
        np.where(running, 6_000, 500),
        ended=~running,
        accepted=~running,
        reasoning_tokens=np.where(running, 0, 250),
    )
    found = of(levers(now([observed("a", 1_000, pilot)])), "max_new_tokens", "5,120")
    # 60 answers of 500 tokens, and 40 of 5,120 instead of 6,000 to 10,240.
    left = (60 * 500 + 40 * 5_120) / (60 * 500 + 40 * np.array([10_240, 6_000]))
    assert 1 - left[1] < found.tokens_lost < 1 - left[0]


def test_what_the_cache_bounds_no_ceiling_lifts(table: list[Lever]) -> None:
    assert of(table, "concurrency").saved_hours == pytest.approx(0, abs=1e-9)
    assert "KV cache holds 200,000 tokens" in str(binding(now()))
    ceiling = levers(now(in_flight=20, windows=windows(500, running=np.full(20, 20.0))))
    assert of(ceiling, "concurrency").saved_hours > 5
    assert "in flight binds" in str(binding(now(in_flight=20)))


def test_a_larger_cache_and_a_smaller_reserve_run_more(table: list[Lever]) -> None:
    plain = of(table, "concurrency").running
    for setting in ("kv_dtype", "mem_fraction_static", "schedule_conservativeness"):
        lever = of(table, setting)
        assert lever.running is not None and plain is not None and lever.running > plain
        assert lever.saved_hours > 0
    # Twice the cache is worth 60 % more tokens/s by the published curve, if admission lets twice as many run.
    fp8 = of(table, "kv_dtype")
    assert fp8.tokens_per_second / of(table, "concurrency").tokens_per_second == pytest.approx(1.65, abs=0.15)
    assert "asked again" in fp8.cost


def test_twice_the_servers_take_half_the_time_and_as_many_gpu_hours(table: list[Lever]) -> None:
    two, plain = of(table, "servers"), of(table, "concurrency")
    assert two.hours.mean == pytest.approx(plain.hours.mean / 2, rel=0.02)
    assert two.gpu_hours is not None and plain.gpu_hours is not None
    assert two.gpu_hours.mean == pytest.approx(plain.gpu_hours.mean, rel=0.02)
    assert two.tokens_lost == 0


def laned(**ceilings: int) -> list[Lever]:
    """The levers of a run whose long answers, six times the tokens, may have a lane of their own; 66 of 150 requests run."""
    parts = [
        observed("short", 20_000, answers(np.full(64, 500.0))),
        observed("long", 20_000, answers(np.full(64, 3_000.0)), lane="long" if ceilings else ""),
    ]
    return levers(now(parts, machine=Machine(gpus=8, ceilings=ceilings or {"": 150})))


def test_a_server_that_could_run_more_gains_nothing_by_a_narrow_lane_that_is_left_alone() -> None:
    """32 of 132 are no faster than 32 of 66, save where numbers are half as wide."""
    one, narrow = (of(table, "kv_dtype") for table in (laned(), laned(**{"": 118, "long": 32})))
    assert one.saved_hours > 0.5 * one.hours.mean
    assert narrow.saved_hours < 0.1 * narrow.hours.mean


def test_a_lane_with_a_higher_ceiling_is_not_left_alone_for_so_long() -> None:
    plain, lanes = (of(table, "concurrency") for table in (laned(), laned(**{"": 118, "long": 32})))
    assert plain.saved_hours == pytest.approx(0, abs=1e-9) and plain.cost == "no data lost"
    assert lanes.saved_hours > 0.2 * lanes.hours.mean
    # 64 of 66 that the cache holds are nearly as fast as all of them.
    assert lanes.hours.mean == pytest.approx(plain.hours.mean, rel=0.02)
    assert lanes.cost == "no data lost, with 300 in flight (server.concurrency, server.lanes.long)"


def test_twice_the_servers_need_twice_the_requests_in_every_lane() -> None:
    table = laned(**{"": 118, "long": 32})
    two, base = of(table, "servers"), of(table, "order", "short answers last")
    assert two.hours.mean == pytest.approx(base.hours.mean / 2, rel=0.02)
    assert two.cost.endswith(", twice the GPUs, with 300 in flight (server.concurrency, server.lanes.long)")


def test_half_a_budget_is_half_the_data_and_half_the_time() -> None:
    found = levers(now(shared_pilot(10_000_000, [20_000] * 8)))
    half = of(found, "budget_tokens")
    assert half.value == "5,000,000"
    assert half.tokens_lost == pytest.approx(0.5, abs=0.01)
    assert half.saved_hours == pytest.approx(half.hours.mean, rel=0.03)
    # Under a budget a lower limit loses no tokens: more prompts are asked instead.
    assert of(found, "max_new_tokens", "5,120").tokens_lost == pytest.approx(0, abs=0.005)


def test_a_budget_below_what_is_answered_loses_tokens_and_saves_nothing() -> None:
    """Eight small datasets whose pilots have every answer: 6 of 193 tokens each, of which 600 take three and a half."""
    pilot = answers(np.array([100.0, 140.0, 180.0, 200.0, 240.0, 298.0]))
    parts = [observed(f"d{at}", 6, pilot, done=6) for at in range(8)]
    budget = of(levers(now(parts, windows=windows(30, running=np.full(20, 6.0)))), "budget_tokens")
    assert budget.value == "600"
    assert budget.tokens_lost == pytest.approx(1 - (600 + 193 / 2) / 1_158, abs=0.005)
    assert budget.cost == "40 % of tokens lost" and budget.saved_hours == 0.0
    assert budget.sentence == "budget_tokens 600: 40 % of tokens lost, nothing saved"


def test_long_answers_last_drain_longest(table: list[Lever]) -> None:
    short, long = (np.full(64, tokens) for tokens in (300.0, 8_000.0))
    found = levers(now([observed("short", 5_000, answers(short)), observed("long", 500, answers(long))]))
    assert (
        of(found, "order", "short answers last").saved_hours
        > of(found, "order", "long answers last").saved_hours
    )


def test_llama_cpp_has_slots_and_no_reserve() -> None:
    """Two slots with a cache each: no lever of a shared cache; twice the slots are one."""
    slots = now(
        windows=windows(30, running=np.full(20, 2.0)),
        pool=Pool(tokens=2 * 8_192, max_running=2, conservativeness=0.0),
        in_flight=8,
        machine=Machine(),
    )
    table = levers(slots)
    settings = {one.setting for one in table}
    assert not settings & {"kv_dtype", "mem_fraction_static", "schedule_conservativeness"}
    assert of(table, "slots").running == 4 and of(table, "slots").value == "4"
    assert of(table, "slots").cost == "no data lost, twice the KV cache's memory"
    assert "at most 2 at once (slots)" in str(binding(slots))


def test_sglang_s_most_requests_have_its_own_key_and_need_the_ceiling_with_them() -> None:
    few = now(
        pool=Pool(tokens=200_000, max_running=8), in_flight=8, windows=windows(300, running=np.full(20, 8.0))
    )
    lever = of(levers(few), "max_running_requests")
    assert (lever.value, lever.running) == ("16", 16)
    assert lever.cost == "no data lost, with 16 in flight (server.concurrency)"


def test_when_prompts_run_out_no_ceiling_binds() -> None:
    """Six prompts, of eight that may be in flight."""
    parts = [observed("a", 6, answers(np.full(6, 400.0)))]
    few = now(parts, in_flight=8, windows=windows(200, running=np.full(20, 6.0)))
    assert binding(few) == (
        "6 answers are planned in all, fewer than the 8 that may be in flight: prompts run out, and no setting binds"
    )
    assert of(levers(few), "concurrency").saved_hours == 0.0
    slots = Pool(tokens=2 * 8_192, max_running=2, conservativeness=0.0)
    assert "at most 2 at once" in str(binding(now(parts, in_flight=8, pool=slots)))
    roomy = Pool(tokens=16 * 8_192, max_running=16, conservativeness=0.0)
    for spare in (now(parts, in_flight=32, pool=roomy), now(parts, in_flight=8, servers=2)):
        assert str(binding(spare)).startswith("6 answers are planned in all")
    assert "in flight binds" in str(binding(now(parts, in_flight=6)))


def test_a_server_that_tells_nothing_has_levers_of_data_and_servers() -> None:
    table = levers(now(pool=None))
    assert {one.setting for one in table} == {"max_new_tokens", "budget_tokens", "servers", "order"}
    assert binding(now(pool=None)) is None
    assert all(one.running is None for one in table)


def test_the_step_is_fitted_to_the_windows() -> None:
    at = now(windows=windows(700))
    step, lengths = step_of(at), lengths_of(at.observed)
    assert lengths.max_new_tokens == LIMIT
    requests = 50.0
    decode = step.milliseconds(requests, requests * (lengths.prompt + lengths.resident)) / requests
    reading = 1000 * lengths.prompt / lengths.output / 7_000
    assert 1000 / (decode + reading) == pytest.approx(700, rel=0.02)
