"""The hours that a run takes: the numbers of the job that Eyas replaces, and rates on known timings."""

import pytest

from eyas import hours
from eyas.hours import Pace

ROWS = [10_000, 14_714, 10_000, 10_002, 10_000, 15_000, 10_000, 3_572]
RATES = [26.0] * 7 + [10.0]


def test_naive_minutes_are_those_of_the_original_plan():
    each = [hours.minutes(rows, rate) for rows, rate in zip(ROWS, RATES, strict=True)]
    assert [round(minutes) for minutes in each] == [385, 566, 385, 385, 385, 577, 385, 357]
    assert round(sum(each)) == 3_423
    assert round(sum(each) / 60, 2) == 57.05


def test_completions_a_minute_become_tokens_a_second():
    assert round(hours.token_rate(26, 1_402), 1) == 607.5


@pytest.mark.parametrize(("rate", "expected"), [(860, 25.8), (930, 23.9), (1_350, 16.5)])
def test_eight_full_budgets(rate, expected):
    assert round(hours.hours(8 * 10_000_000, rate), 1) == expected


@pytest.mark.parametrize(("rate", "expected"), [(930, 22.4), (1_350, 15.4)])
def test_a_dataset_too_small_for_its_budget_shortens_the_run(rate, expected):
    tokens = [hours.planned_tokens(rows, 1_416, 10_000_000) for rows in ROWS]
    assert tokens[:7] == [10_000_000] * 7
    assert tokens[7] == 3_572 * 1_416
    assert round(sum(tokens) / 1e6, 2) == 75.06
    assert round(hours.hours(sum(tokens), rate), 1) == expected


def test_without_a_budget_every_row_counts():
    assert hours.planned_tokens(3_572, 1_416) == 3_572 * 1_416


def test_side_by_side_is_busy_once():
    """Two replies of 10 s at the same time took 10 s, not 20."""
    run = hours.throughput([1e9, 1e9], [1e9 + 10, 1e9 + 10], [100, 300]).run
    assert run == Pace(
        seconds=10, completions=2, output_tokens=400, tokens_per_second=40, completions_per_minute=12
    )


def test_the_night_between_two_sessions_is_not_busy():
    run = hours.throughput([0, 5, 50_000], [10, 15, 50_005], [100, 100, 100]).run
    assert run.seconds == 20
    assert run.tokens_per_second == 15


def test_full_and_drain_are_told_apart():
    """Two at a time for 20 s, then one alone for 20 s more."""
    measured = hours.throughput([0, 0, 10], [10, 40, 20], [100, 400, 100])
    assert measured.peak_in_flight == 2
    assert measured.full.seconds == 20
    assert measured.full.output_tokens == pytest.approx(400)
    assert measured.full.completions == pytest.approx(2.5)
    assert measured.full.tokens_per_second == pytest.approx(20)
    assert measured.drain.seconds == 30
    assert measured.drain.tokens_per_second == pytest.approx((100 + 300) / 30)
    assert measured.run.seconds == 40
    assert measured.run.tokens_per_second == pytest.approx(15)


def test_nine_tenths_of_the_peak_count_as_full():
    """Ten in flight, then nine, then eight: the last stretch is not full."""
    measured = hours.throughput([0.0] * 10, [10.0, 20.0] + [30.0] * 8, [10] * 10)
    assert measured.peak_in_flight == 10
    assert measured.full.seconds == 20


def test_overlapping_datasets_share_the_clock():
    """Two datasets, each 10 s long and 5 s apart, kept the server busy for 15 s."""
    first, second = ([0.0], [10.0], [100]), ([5.0], [15.0], [200])
    together = hours.throughput(first[0] + second[0], first[1] + second[1], first[2] + second[2])
    assert [hours.throughput(*one).run.seconds for one in (first, second)] == [10, 10]
    assert together.run.seconds == 15
    assert together.run.tokens_per_second == 20


def test_nothing_measured_has_no_rate():
    run = hours.throughput([], [], []).run
    assert (run.seconds, run.tokens_per_second, run.completions_per_minute) == (0, None, None)


def test_a_clock_set_back_does_not_make_time_negative():
    measured = hours.throughput([100.0, 90.0], [95.0, 100.0], [10, 10])
    assert measured.run.seconds == 10
    assert measured.run.completions == 2
