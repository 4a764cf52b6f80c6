"""The plan stage: from what pilots saw to hours that a person can trust."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from markupsafe import escape

from eyas.config import PlanConfig, PlannedDataset, PlanSettings, ServerConfig
from eyas.errors import EyasError
from eyas.pilot_report import Journalled, Observation, PilotReport
from eyas.plan import make, plan
from eyas.projection import Interval
from eyas.report.plan import Done, Plan, lead, markdown, tables

RATE, AT_ONCE = 20.0, 10  # tokens/s of one request; requests at a time
SERVER = {"engine": {"name": "llamacpp"}, "concurrency": AT_ONCE}


def observations(
    lengths: list[int], *, kind: str = "answer", timed: bool = True, **fields: Any
) -> list[Observation]:
    """Answers of these lengths through AT_ONCE slots, each of RATE tokens/s."""
    free = [1_700_000_000.0] * AT_ONCE
    made = []
    for at, length in enumerate(lengths):
        slot = free.index(min(free))
        started, free[slot] = free[slot], free[slot] + length / RATE
        made.append(
            Observation(
                kind=kind,  # type: ignore[arg-type]
                key=f"k{at}",
                turn=0,
                sample=0,
                timed=timed,
                started=started,
                finished=free[slot],
                prompt_bytes=400,
                prompt_tokens=100,
                output_tokens=length,
                reasoning_tokens=length // 2,
                accepted=True,
                truncated=False,
                **fields,
            )
        )
    return made


def journalled(answers: int, *busy: tuple[float, float], at: float = 10_000.0) -> Journalled:
    """So many answers of 600 tokens."""
    return Journalled(at=at, answers=answers, output_tokens=600 * answers, busy=[[*span] for span in busy])


def report(lengths: list[int], planned: int, dataset: str = "a", **fields: Any) -> PilotReport:
    values: dict[str, Any] = {
        "dataset": dataset,
        "prompt_bytes": [400] * planned,
        "without_answer": 0,
        "journalled": journalled(0),
        "servers": {"s1": {"processes": 1}},
        "observations": observations(lengths),
    }
    return PilotReport(**values | fields)


def settings(budget: int | None = None, *names: str, **changes: Any) -> PlanSettings:
    server = msgspec.convert(SERVER, ServerConfig)
    one = PlannedDataset(budget_tokens=budget, max_new_tokens=4096, lane=None)
    return PlanSettings(
        model="org/<model>",
        plan=PlanConfig(**changes),
        server=server,
        datasets=dict.fromkeys(names or ("a",), one),
    )


def lengths(count: int = 64, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(200, 1000, count).tolist()


def test_hours_are_generated_tokens_over_the_measured_rate() -> None:
    drawn = lengths()
    made = make(settings(drift_sd=0.0), [report(drawn, 10_000)])
    truth = 10_000 * np.mean(drawn) / (RATE * AT_ONCE) / 3600
    total = made.projection.full.total.hours
    assert total.low < truth < total.high and total.mean == pytest.approx(truth, rel=0.1)
    assert made.projection.tokens_per_second.mean == pytest.approx(RATE * AT_ONCE, rel=0.03)
    assert made.projection.budgeted is None


def test_a_pilot_that_has_every_answer_tells_their_sum() -> None:
    seen = [
        msgspec.structs.replace(one, prompt_bytes=100 * at, truncated=at % 3 == 0, accepted=at % 2 == 0)
        for at, one in enumerate(observations([15, 147, 200, 200] * 20))
    ]
    made = make(settings(), [report([], 80, observations=seen, prompt_bytes=[100 * at for at in range(80)])])
    total = made.projection.full.total
    assert total.output_tokens.low == total.output_tokens.high == pytest.approx(20 * 562)
    assert total.acceptance.mean == pytest.approx(0.5) and total.at_limit.mean == pytest.approx(27 / 80)


def test_a_budget_ends_the_run_earlier() -> None:
    made = make(settings(500_000), [report(lengths(), 10_000)])
    assert made.projection.budgeted is not None
    hours = made.projection.budgeted.total.hours
    assert hours.low < 500_000 / (RATE * AT_ONCE) / 3600 < 1.05 * hours.high
    assert "until the budgets are reached" in lead(made)


def test_what_is_done_and_what_remains_are_told() -> None:
    there = {"a": journalled(7_500, (0.0, 3_600.0), (9_000.0, 9_900.0)), "b": journalled(0, at=10_900.0)}
    pilots = [report(lengths(), 10_000, name, journalled=one) for name, one in there.items()]
    made = make(settings(None, "a", "b", drift_sd=0.0), pilots)
    run = made.projection.full
    assert run.remaining_hours.mean == pytest.approx(1.25 / 2 * run.total.hours.mean, rel=0.03)
    assert made.done == Done(at=10_000.0, answers=7_500, output_tokens=4_500_000, hours=1.25)
    text = markdown(made)
    assert (
        "Done when the pilot counted, 1 January 1970, 02:46 UTC: 7,500 answers of 20,000, 4,500,000 output tokens in 75 min"
        in text
    ), "the run goes on and the plan stays"
    assert "time that remains" in text and "the full run takes" in text


def test_what_several_datasets_were_asked_at_a_time_counts_once() -> None:
    spans = [[(0.0, 3_600.0)], [(1_800.0, 5_400.0)]]
    pilots = [
        report(lengths(), 100, name, journalled=journalled(64, *busy))
        for name, busy in zip("ab", spans, strict=True)
    ]
    assert make(settings(None, "a", "b"), pilots).done.hours == 1.5


def test_when_all_is_done_nothing_remains() -> None:
    made = make(settings(100_000), [report(lengths(), 1_000, journalled=journalled(1_000))])
    assert made.projection.full.remaining_hours.high == 0.0
    assert made.projection.budgeted is not None and made.projection.budgeted.remaining_hours.high == 0.0
    assert lead(made).startswith(
        "Nothing is left to ask: all 1,000 answers are in the journal. The full run takes "
    )
    text = markdown(made)
    assert "Remaining then: the full run takes nothing more, the run with budgets takes nothing more." in text
    assert re.search(r"time that remains *\| *nothing *\| *nothing *\|", text)
    assert "only another run would gain by these" in text


def test_when_the_budgets_are_reached_nothing_remains_though_prompts_are_left() -> None:
    made = make(settings(100_000), [report(lengths(), 10_000, journalled=journalled(1_000))])
    assert lead(made).startswith("Nothing is left to ask: the budgets are reached. The full run takes ")
    assert "Remaining then: the full run takes " in markdown(made)
    assert "the run with budgets takes nothing more" in markdown(made)
    begun = make(settings(), [report(lengths(), 10_000, journalled=journalled(1_000))])
    assert lead(begun).startswith("The full run takes ") and "another run would" not in markdown(begun)


@pytest.mark.parametrize(
    ("saved", "takes", "told"),
    [
        (-1e-9, 0.07, "nothing"),
        (1e-9, 0.07, "nothing"),
        (0.04 / 60, 0.07, "nothing"),
        (0.4 / 60, 0.07, "+0.4 min"),
        (-0.4 / 60, 5.0, "nothing"),
        (-0.4, 5.0, "-24 min"),
        (1.5, 5.0, "+1.5 h"),
    ],
)
def test_a_lever_that_saves_nothing_says_so(saved: float, takes: float, told: str) -> None:
    made = make(settings(), [report(lengths(), 100)])
    hours = Interval(low=takes, mean=takes, high=takes)
    lever = msgspec.structs.replace(made.levers[0], saved_hours=saved, hours=hours)
    table = tables(msgspec.structs.replace(made, levers=[lever]))[-1]
    assert table.rows[0][2] == told


def test_hours_know_the_lanes() -> None:
    """The dataset in the narrow lane is left alone in the end."""
    wide = settings(None, "a", "b", drift_sd=0.0)
    lanes = {"long": {"concurrency": 2}}
    narrow = msgspec.structs.replace(
        wide,
        server=msgspec.convert(SERVER | {"concurrency": AT_ONCE - 2, "lanes": lanes}, ServerConfig),
        datasets=wide.datasets | {"b": msgspec.structs.replace(wide.datasets["b"], lane="long")},
    )
    pilots = [report(lengths(), 5_000, name) for name in "ab"]
    hours = [make(one, pilots).projection.full.total.hours.mean for one in (wide, narrow)]
    assert hours[1] > 1.1 * hours[0]


def test_what_will_not_be_had_is_not_planned() -> None:
    """Of 64 and 16, 16 had no answer: a fifth of the run's prompts will have none either."""
    made = make(settings(), [report(lengths(), 10_000, without_answer=16)])
    assert made.projection.full.total.responses.mean == pytest.approx(8_000)


def test_a_probe_tells_the_speed_and_the_run_s_own_answers_the_lengths() -> None:
    own = observations([300] * 64, timed=False)
    probe = observations([900] * 64, kind="probe")
    made = make(settings(), [report([], 1_000, observations=[*own, *probe])])
    assert made.projection.full.total.output_tokens.mean == pytest.approx(300_000, rel=0.05)
    assert made.projection.tokens_per_second.mean == pytest.approx(RATE * AT_ONCE, rel=0.05)


def test_answers_that_still_ran_are_long_ones() -> None:
    drawn = lengths(40)
    cut = [
        msgspec.structs.replace(
            one, kind="running", output_tokens=900, accepted=None, truncated=None, reasoning_tokens=None
        )
        for one in observations([900] * AT_ONCE)
    ]
    seen = [*observations(drawn), *cut]
    ignoring = make(settings(), [report(drawn, 1_000)]).projection
    made = make(settings(), [report([], 1_000, observations=seen)]).projection
    assert made.still_running == AT_ONCE
    assert made.full.total.output_tokens.mean > 1.1 * ignoring.full.total.output_tokens.mean


def test_pilots_of_two_servers_are_not_thrown_together() -> None:
    other = report(lengths(), 100, "b", servers={"s2": {"processes": 1}})
    with pytest.raises(
        EyasError, match=r"the pilots of a were made on another server than that of b; run .*--forcerun"
    ):
        make(settings(None, "a", "b"), [report(lengths(), 100), other])


def test_the_drain_of_the_pilot_is_not_its_speed() -> None:
    made = make(settings(), [report([1000] * 60 + [4000], 10_000)])
    assert made.projection.tokens_per_second.mean == pytest.approx(RATE * AT_ONCE, rel=0.05)


def test_a_pilot_too_small_to_fill_the_server_says_so() -> None:
    one_by_one = [
        msgspec.structs.replace(one, started=1e9 + 50 * at, finished=1e9 + 50 * at + (49 if at else 99))
        for at, one in enumerate(observations([1000] * 8))
    ]
    made = make(settings(), [report([], 100, observations=one_by_one)])
    assert not made.queue_full and "ask more prompts (plan.prompts)" in markdown(made)
    assert make(settings(), [report(lengths(), 10_000)]).queue_full


def test_a_pilot_of_fewer_requests_than_the_run_has_in_flight_says_so() -> None:
    """However steady it was, ten at a time do not tell the speed of 150."""
    wide = msgspec.structs.replace(
        settings(), server=msgspec.convert(SERVER | {"concurrency": 150}, ServerConfig)
    )
    assert not make(wide, [report(lengths(), 10_000)]).queue_full
    roomy = {"s1": {"processes": 1, "capacity": {"tokens": 900_000}}}
    assert not make(wide, [report(lengths(200), 10_000, servers=roomy)]).queue_full
    tight = {"s1": {"processes": 1, "capacity": {"tokens": 20_000}}}
    assert make(wide, [report(lengths(200), 10_000, servers=tight)]).queue_full, "the cache holds no more"


@pytest.mark.parametrize(
    ("seen", "without", "said"),
    [
        ([], 0, "b: the pilot has no finished answer; raise plan.minutes and run .* --forcerun pilot"),
        ([], 64, "b: the pilot has no answer: all 64 that it planned are refused or not reached"),
        (
            [
                msgspec.structs.replace(one, kind="running", accepted=None, truncated=None)
                for one in observations([900] * 4)
            ],
            0,
            "b: the pilot has no finished answer; raise plan.minutes and run .* --forcerun pilot",
        ),
    ],
)
def test_a_dataset_of_which_nothing_can_be_told_is_named(
    seen: list[Observation], without: int, said: str
) -> None:
    told = report([], 1_000, "b", observations=seen, without_answer=without)
    with pytest.raises(EyasError, match=said):
        make(settings(None, "a", "b"), [report(lengths(), 1_000), told])


def test_levers_are_held_against_the_plan_s_own_hours() -> None:
    capacity = {"tokens": 6_000, "max_running": None, "conservativeness": 1.0}
    made = make(
        settings(drift_sd=0.0),
        [report(lengths(), 1_000, servers={"s1": {"processes": 1, "capacity": capacity}})],
    )
    planned = made.projection.full.total.hours.mean
    for one in made.levers:
        assert one.hours.mean + one.saved_hours == pytest.approx(planned, rel=0.01)


def test_what_the_server_runs_is_not_more_than_it_can_hold() -> None:
    capacity = {"tokens": 3_000, "max_running": None, "conservativeness": 1.0}
    made = make(
        settings(), [report(lengths(), 10_000, servers={"s1": {"processes": 1, "capacity": capacity}})]
    )
    assert made.binding is not None and made.binding.startswith("10 in flight, about ")
    assert made.projection.running < AT_ONCE


def test_of_several_processes_each_has_its_part() -> None:
    capacity = {"tokens": 6_000, "max_running": None, "conservativeness": 1.0}
    made = make(
        settings(), [report(lengths(), 10_000, servers={"s1": {"processes": 2, "capacity": capacity}})]
    )
    assert made.binding is not None and made.binding.startswith("at each of 2 server processes: 5 in flight")


@pytest.mark.parametrize(
    ("manifest", "gpus"),
    [
        ({"processes": 2, "tp_size": 4, "dp_size": 2, "pp_size": 3, "device": "cuda"}, 48),
        ({"processes": 1, "tp_size": 8, "dp_size": None, "pp_size": None}, 8),
        ({"processes": 1, "tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 8),
        ({"processes": 1, "tp_size": 1, "dp_size": 1, "device": "cpu"}, 0),
        ({"processes": 3, "engine": "llamacpp"}, 0),
    ],
)
def test_gpus_are_spoken_of_only_where_there_are_some(manifest: dict[str, Any], gpus: int) -> None:
    made = make(settings(), [report(lengths(), 10_000, servers={"s1": manifest})])
    total, text = made.projection.full.total, markdown(made)
    if gpus:
        assert total.gpu_hours is not None
        assert total.gpu_hours.mean == pytest.approx(gpus * total.hours.mean)
        assert "GPU-hours" in text and "twice the GPUs" in text
    else:
        assert total.gpu_hours is None
        assert "GPU" not in text and "twice the hardware" in text


def test_files_are_written_and_say_the_same(tmp_path: Path) -> None:
    pilot = tmp_path / "a.pilot.json"
    pilot.write_bytes(msgspec.json.encode(report(lengths(), 10_000)))
    made = plan(settings(1_000_000, hidden_size=4096, gpus=8), [pilot], tmp_path)
    assert msgspec.json.decode((tmp_path / "plan.json").read_bytes(), type=Plan) == made
    text = (tmp_path / "plan.md").read_text()
    assert text == markdown(made) and lead(made) in text
    total = made.projection.full.total
    assert total.gpu_hours is not None and total.gpu_hours.mean == pytest.approx(8 * total.hours.mean)
    for what in (
        "hidden states",
        "GPU-hours",
        "by count ÷ rate",
        "drift_sd",
        "accepted tokens",
        "max_new_tokens 2,048",
    ):
        assert what in text
    page = (tmp_path / "plan.html").read_text().replace("<span>", "").replace("</span>", "")
    assert "org/&lt;model&gt;" in page and "<script" not in page and lead(made) in page
    for one in tables(made):
        for cell in (one.title, *one.heads, *(cell for row in one.rows for cell in row)):
            assert str(escape(cell)) in page and cell in text
    again = make(settings(1_000_000, hidden_size=4096, gpus=8), [report(lengths(), 10_000)])
    assert again == made, "the same pilots give the same plan"


def test_a_damaged_pilot_names_file_and_remedy(tmp_path: Path) -> None:
    pilot = tmp_path / "a.pilot.json"
    pilot.write_text('{"dataset": "a"}')
    with pytest.raises(
        EyasError, match=r"a\.pilot\.json: .*; delete it and run `snakemake plan --cores 1` again"
    ):
        plan(settings(), [pilot], tmp_path)
