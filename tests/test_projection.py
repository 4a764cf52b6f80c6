"""From a pilot to hours: the origin's numbers, intervals that are as wide as they should be, and nothing short by accident."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from eyas.errors import EyasError
from eyas.projection import (
    Answers,
    Drift,
    Floats,
    Machine,
    Observed,
    Projection,
    Store,
    Windows,
    predict,
    project,
    windows_of,
)

ROWS = [10_000, 14_714, 10_000, 10_002, 10_000, 15_000, 10_000, 3_572]
LIMIT = 10_240
STEADY = Drift(sd=0.0)


def origin() -> Floats:
    """488 lengths with the origin's mean 1,416, median 646, sd 1,640, none above the limit of 10,240 tokens."""
    at = (np.arange(488) + 0.5) / 488
    short = 646 * (0.06 + 0.94 * at / 0.5)
    beyond = np.clip((at - 0.5) / 0.5, 0, 1)
    lengths = np.where(at < 0.5, short, 646 + 2_800 * beyond + 6_794 * beyond**14.5)
    return np.asarray(np.rint(lengths), dtype=np.float64)


def answers(lengths: Any, **changed: Any) -> Answers:
    """Answers of those lengths to prompts of 300 tokens, all accepted, half of each reasoning."""
    output = np.asarray(lengths, dtype=np.float64)
    filled = np.ones(len(output))
    fields = {
        "sizes": 300 * filled,
        "prompt_tokens": 300 * filled,
        "output_tokens": output,
        "reasoning_tokens": output / 2,
        "ended": filled > 0,
        "cut": output >= LIMIT,
        "accepted": filled > 0,
    }
    return Answers(**(fields | changed))


def observed(name: str, rows: int, pilot: Answers, **more: Any) -> Observed:
    return Observed(
        dataset=name, sizes=np.full(rows, 300.0), answers=pilot, **({"max_new_tokens": LIMIT} | more)
    )


def windows(rate: float, count: int = 20, **changed: Any) -> Windows:
    """Minutes at a steady rate in tokens/s, 26 completions a minute, 50 requests running."""
    filled = np.ones(count)
    fields = {
        "hours": (np.arange(count) + 0.5) / 60,
        "tokens_per_second": rate * filled,
        "completions_per_minute": 26 * filled,
        "running": 50 * filled,
        "queued": filled > 0,
    }
    return Windows(**(fields | changed))


STORE = Store(response_bytes=2.0, train_bytes=5.0)


def plan(parts: list[Observed], rate: float = 930, **more: Any) -> Projection:
    return project(
        parts, **({"windows": windows(rate), "machine": Machine(), "store": STORE, "draws": 1_000} | more)
    )


def shared_pilot(budget: int | None = None, rows: list[int] = ROWS) -> list[Observed]:
    """The origin's 488 answers, 61 for each of eight datasets."""
    spread = np.random.default_rng(5).permutation(origin())
    return [
        observed(f"d{at}", count, answers(spread[at::8]), budget_tokens=budget)
        for at, count in enumerate(rows)
    ]


def test_the_origin_has_its_moments() -> None:
    lengths = origin()
    assert (len(lengths), lengths.max() <= LIMIT) == (488, True)
    assert lengths.mean() == pytest.approx(1_416, rel=0.01)
    assert np.median(lengths) == pytest.approx(646, rel=0.01)
    assert lengths.std() == pytest.approx(1_640, rel=0.01)


def known(rate: float) -> Windows:
    """A rate measured over days, so that only the drift of the run itself is left."""
    return windows(rate, 400, hours=np.arange(0.0, 400.0))


def test_the_origin_at_a_known_rate_is_within_an_eighth() -> None:
    """83,288 answers of 1,416 tokens at 860 tokens/s are 38.1 h; 488 answers tell that to 25 %, drift of the run included."""
    hours = plan(shared_pilot(), windows=known(860)).full.total.hours
    assert hours.low < 83_288 * 1_416 / 860 / 3_600 < hours.high
    assert 0.12 < (hours.high - hours.low) / hours.mean <= 0.25


@pytest.mark.parametrize(("rate", "expected"), [(860, 25.8), (930, 23.9), (1_350, 16.5)])
def test_eight_full_budgets_of_the_origin(rate: float, expected: float) -> None:
    told = plan(shared_pilot(10_000_000, [10_000] * 8), windows=known(rate)).budgeted
    assert told is not None
    assert told.total.hours.low < expected < told.total.hours.high
    assert (told.total.hours.high - told.total.hours.low) / told.total.hours.mean <= 0.25
    # What is in flight when a budget is reached is finished, at most 1 % here, and the last answers drain.
    assert expected * 0.997 < told.total.hours.mean < expected * 1.02


@pytest.mark.parametrize(("rate", "expected"), [(930, 22.4), (1_350, 15.4)])
def test_a_dataset_too_small_for_its_budget(rate: float, expected: float) -> None:
    told = plan(shared_pilot(10_000_000), windows=known(rate)).budgeted
    assert told is not None
    assert told.total.hours.low < expected < told.total.hours.high
    small = told.datasets["d7"]
    assert small.responses.low == small.responses.high == 3_572
    assert small.accepted_tokens.high < 10_000_000


def test_the_naive_figure_is_count_by_rate() -> None:
    total = plan(shared_pilot()).full.total
    assert total.naive_hours == pytest.approx(sum(ROWS) / 26 / 60)


def test_no_window_with_a_queue_is_told() -> None:
    with pytest.raises(EyasError, match=r"never kept the server's queue filled.*plan\.prompts"):
        plan(shared_pilot(), windows=windows(930, queued=np.zeros(20, dtype=bool)))


def test_a_dataset_without_an_ended_answer_is_named() -> None:
    running = answers([100.0] * 3, ended=np.zeros(3, dtype=bool))
    with pytest.raises(EyasError, match="glaive: the pilot has no finished answer"):
        plan([observed("glaive", 100, running)])


def test_windows_without_a_queue_do_not_count() -> None:
    queued = np.arange(20) < 10
    rate = np.where(queued, 900.0, 90.0)
    drained = plan(shared_pilot(), windows=windows(900, tokens_per_second=rate, queued=queued), drift=STEADY)
    assert drained.tokens_per_second.mean == pytest.approx(900, rel=0.01)


def test_the_same_pilot_gives_the_same_bytes() -> None:
    first, again = (msgspec.json.encode(plan(shared_pilot())) for _ in range(2))
    assert first == again


def test_parts_add_up_and_hours_follow_from_what_is_generated() -> None:
    told = plan(shared_pilot(), drift=STEADY).full
    parts = told.datasets.values()
    total = told.total
    assert total.output_tokens.mean == pytest.approx(sum(part.output_tokens.mean for part in parts))
    assert total.output_tokens.mean == pytest.approx(total.reasoning_tokens.mean + total.answer_tokens.mean)
    assert total.hours.mean == pytest.approx(
        sum(part.hours.mean for part in parts) + told.drain_hours.mean, rel=1e-3
    )
    assert total.prompt_tokens.mean == 300 * sum(ROWS)
    assert total.responses_disk.mean == pytest.approx(
        2 * (total.prompt_tokens.mean + total.output_tokens.mean)
    )
    assert total.hidden_disk is None


def test_rejected_answers_cost_hours_and_do_not_fill_the_budget() -> None:
    """With every second answer rejected, a budget takes twice the tokens."""
    lengths = np.full(64, 1_000.0)
    half = answers(lengths, accepted=np.arange(64) % 2 == 0)
    whole = plan([observed("d", 100_000, answers(lengths), budget_tokens=10_000_000)], drift=STEADY)
    twice = plan([observed("d", 100_000, half, budget_tokens=10_000_000)], drift=STEADY)
    assert whole.budgeted is not None and twice.budgeted is not None
    assert twice.budgeted.total.acceptance.mean == pytest.approx(0.5, abs=0.02)
    assert twice.budgeted.total.accepted_tokens.mean == pytest.approx(10_000_000, rel=0.01)
    ratio = twice.budgeted.total.hours.mean / whole.budgeted.total.hours.mean
    assert ratio == pytest.approx(2, rel=0.04)


def test_a_budget_takes_no_more_of_what_is_already_answered() -> None:
    """Whatever the pilot asked costs its time, but training gets the budget alone, and nothing more is asked."""
    pilot = answers(np.tile([100.0, 200.0, 300.0], 20), accepted=np.tile([True, True, False], 20))
    for rows in (60, 1_000):
        parts = [observed("d", rows, pilot, budget_tokens=1_050, done=60)]
        told = plan(parts, drift=STEADY).budgeted
        assert told is not None
        total = told.total
        assert total.responses.low == total.responses.high == 60
        assert total.output_tokens.mean == pytest.approx(12_000, rel=0.001 if rows == 60 else 0.1)
        # The unit that crosses the budget is finished: half an answer more, on average.
        assert total.accepted_tokens.mean == pytest.approx(1_100, rel=0.02)
        assert total.acceptance.mean == pytest.approx(2 / 3, abs=0.02)
        assert told.remaining_hours.high == 0


def test_a_steady_rate_is_predicted_as_it_is() -> None:
    hours = (np.arange(20) + 0.5) / 60
    mean, sd = predict(hours, np.full(20, np.log(930.0)), 0.005, STEADY, 30)
    assert np.exp(mean) == pytest.approx(930)
    assert sd == pytest.approx(0.005 / 20**0.5, rel=0.01)


def test_drift_that_the_pilot_cannot_show_is_in_the_interval() -> None:
    """Ten minutes tell one point of a rate that wanders by 8 %; the next minutes are like them, the next days are not."""
    hours = (np.arange(10) + 0.5) / 60
    logs = np.full(10, np.log(930.0))
    sds = [predict(hours, logs, 0.005, Drift(), horizon)[1] for horizon in (0.05, 2, 30, 1_000)]
    assert sds == sorted(sds)
    assert sds[0] < 0.02
    assert sds[2] == pytest.approx(0.08, rel=0.05)


def test_a_pilot_of_days_leaves_only_the_drift_of_the_run() -> None:
    hours = np.arange(0.0, 400.0, 0.5)
    _, sd = predict(hours, np.full(800, 6.8), 0.005, Drift(), 30)
    assert sd < 0.04


def test_windows_of_replies_have_their_rate_and_know_the_drain() -> None:
    """Ten at a time, 100 s and 1,000 tokens each, for 1,000 s; the last of them alone for 500 s more."""
    started = np.repeat(np.arange(10) * 100.0, 10) + 1e9
    finished = started + 100
    finished[-1] += 500
    tokens = np.full(100, 1_000.0)
    tokens[-1] += 5_000
    seen = windows_of(started, finished, tokens, seconds=50)
    assert len(seen.hours) == 30
    assert seen.queued.tolist() == [True] * 20 + [False] * 10
    np.testing.assert_allclose(seen.tokens_per_second[seen.queued], 100)
    np.testing.assert_allclose(seen.tokens_per_second[~seen.queued], 10)
    np.testing.assert_allclose(seen.running[~seen.queued], 1)
    np.testing.assert_allclose(seen.completions_per_minute[:18], 6)
    assert seen.hours[0] == pytest.approx(25 / 3600)


def test_the_night_between_two_sessions_is_in_no_window() -> None:
    """Ten replies of 600 s, two at a time; the second half twelve hours later."""
    started = np.repeat(np.arange(5) * 600.0, 2)
    started[6:] += 43_200
    seen = windows_of(started, started + 600, np.full(10, 6_000.0))
    assert len(seen.hours) == 50
    np.testing.assert_allclose(seen.tokens_per_second, 20)
    assert seen.queued.all()
    assert seen.hours[29] < 0.5 < 12 < seen.hours[30]


def test_no_replies_have_no_windows_and_no_rate() -> None:
    none = windows_of(np.empty(0), np.empty(0), np.empty(0))
    with pytest.raises(EyasError, match="never kept the server's queue filled"):
        plan(shared_pilot(), windows=none)


def test_with_nothing_accepted_a_budget_takes_every_prompt() -> None:
    lost = answers(np.full(64, 1_000.0), accepted=np.zeros(64, dtype=bool))
    told = plan([observed("d", 5_000, lost, budget_tokens=1_000_000)], drift=STEADY).budgeted
    assert told is not None
    assert told.total.responses.low == 5_000
    assert told.total.acceptance.low == told.total.accepted_tokens.low == 0
    assert told.total.acceptance.high < 0.02, "64 answers do not exclude that one in a hundred is accepted"


def test_no_share_is_more_than_all() -> None:
    total = plan([observed("cut", 2_000, answers([LIMIT] * 3))]).full.total
    assert total.acceptance.high <= 1 and total.at_limit.high <= 1


def test_prompt_sizes_are_those_of_all_prompts() -> None:
    """Long prompts have long answers and are rarer in the pilot than in the whole: the mean goes by the whole."""
    sizes = np.tile([100.0, 300.0], 32)
    pilot = answers(np.where(sizes > 200, 3_000.0, 500.0), sizes=sizes, prompt_tokens=sizes / 4)
    whole = np.repeat([100.0, 300.0], [1_000, 9_000])
    one = Observed(dataset="d", sizes=whole, answers=pilot, max_new_tokens=LIMIT)
    told = plan([one], drift=STEADY).full.total
    assert told.output_tokens.mean == pytest.approx(1_000 * 500 + 9_000 * 3_000, rel=0.02)
    # Tokens per character are the same for each prompt, so nothing is uncertain about the prompts.
    assert told.prompt_tokens.low == pytest.approx(whole.sum() / 4)
    assert told.prompt_tokens.high == pytest.approx(whole.sum() / 4)


def test_a_pilot_of_nearly_all_prompts_leaves_little_open() -> None:
    lengths = np.random.default_rng(1).permutation(origin())
    few = plan([observed("d", 100_000, answers(lengths))], drift=STEADY).full.total.output_tokens
    most = plan([observed("d", 500, answers(lengths))], drift=STEADY).full.total.output_tokens
    assert (most.high - most.low) / most.mean < 0.2 * (few.high - few.low) / few.mean
    assert most.low < lengths.mean() * 500 < most.high


def test_the_drain_is_there_and_small() -> None:
    """Fifty requests end one by one: some minutes of a day; with a few hundred prompts it is a good part."""
    lengths = np.random.default_rng(1).permutation(origin())
    long, short = (
        plan([observed("d", rows, answers(lengths[:64]))], drift=STEADY).full for rows in (50_000, 200)
    )
    assert 0 < long.drain_hours.mean < 0.01 * long.total.hours.mean
    assert short.drain_hours.mean > 0.1 * short.total.hours.mean
    # On a processor each request more slows all others as much, so nothing is lost when they get fewer.
    even = plan([observed("d", 200, answers(lengths[:64]))], drift=STEADY, machine=Machine(exponent=1.0)).full
    assert even.drain_hours.mean < 0.05 * short.drain_hours.mean


def test_gpu_hours_and_hidden_states() -> None:
    store = Store(response_bytes=2.0, train_bytes=5.0, hidden_size=7_168)
    told = plan(shared_pilot(), machine=Machine(gpus=8), store=store).full.total
    assert told.gpu_hours is not None and told.gpu_hours.mean == pytest.approx(8 * told.hours.mean)
    assert told.hidden_disk is not None
    tokens = told.accepted_tokens.mean + told.prompt_tokens.mean  # all of the pilot's are accepted
    assert told.hidden_disk.mean == pytest.approx(tokens * 7_168 * 4 * 2, rel=1e-3)
    assert told.train_disk.mean == pytest.approx(tokens * 5, rel=1e-3)


@pytest.mark.parametrize(
    ("running", "ceilings", "hours"),
    [
        # 1,000 tokens/s: the wide lane has 800 of them for 1,250 s, then the narrow one runs at 1,000 * (32 / 160) ** 0.655.
        (160, {"": 128, "long": 32}, (1_250 + 3_750_000 / (1_000 * 0.2**0.655)) / 3_600),
        (32, {"": 128, "long": 32}, 5_000 / 3_600),  # the KV cache holds no more than the narrow lane fills
        (160, {"": 32, "long": 128}, 5_000 / 3_600),  # both end at the same time
    ],
)
def test_a_narrow_lane_that_is_left_alone_takes_longer(
    running: int, ceilings: dict[str, int], hours: float
) -> None:
    alike = answers(np.full(64, 100.0))
    parts = [observed("a", 10_000, alike), observed("b", 40_000, alike, lane="long")]
    told = plan(
        parts,
        rate=1_000,
        windows=windows(1_000, running=running * np.ones(20)),
        machine=Machine(ceilings=ceilings),
        drift=STEADY,
    ).full.total.hours
    assert told.mean == pytest.approx(hours, rel=0.05)


def test_lanes_of_one_dataset_or_none_change_nothing() -> None:
    one, other = plan(shared_pilot()), plan(shared_pilot(), machine=Machine(ceilings={"": 150}))
    assert one == other
