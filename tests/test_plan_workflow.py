"""`snakemake plan`: its answers are the run's own, and it measures again when the server is set otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from pipeline import Run

from eyas.pilot_report import read_pilot
from eyas.report.plan import Plan, lead

pytestmark = pytest.mark.workflow

PILOTS = {"pilot alpha": 1, "pilot beta": 1, "plan": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Two datasets whose pilot has run."""
    made = Run(tmp_path_factory.mktemp("plan"), {"alpha": 24, "beta": 16})
    made.config["plan"] = {"prompts": 8}
    made.save()
    with made.asked() as requests:
        assert made.jobs("plan") == Counter(
            PILOTS | {"prompts_of_dataset alpha": 1, "prompts_of_dataset beta": 1}
        )
    assert len(requests) == 16
    yield made


def test_the_plan_is_written_for_people_and_programs(run: Run) -> None:
    folder = run.folder / "results/plan"
    made = msgspec.json.decode((folder / "plan.json").read_bytes(), type=Plan)
    assert made.projection.pilot == {"alpha": 8, "beta": 8}
    assert lead(made) in (folder / "plan.md").read_text()
    seen = read_pilot(folder / "alpha.pilot.json").observations
    assert {one.kind for one in seen} == {"answer"} and all(one.timed for one in seen)


def test_a_plan_and_the_run_in_one_call_are_refused_before_anything_starts(run: Run) -> None:
    with run.asked() as requests:
        refused = run.snakemake("plan", "all", "--forcerun", "pilot", check=False)
    assert refused.returncode and "run `snakemake plan` first" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert requests == [] and (run.folder / "results/plan/alpha.pilot.json").is_file()


def test_what_the_pilot_asked_is_not_asked_again(run: Run) -> None:
    with run.asked() as requests:
        run.jobs()
    assert len(requests) == 24
    assert run.jobs("plan") == Counter(), "and a plan that is there stays"


def test_a_run_that_asked_no_more_than_the_pilots_do_is_planned_without_asking(run: Run) -> None:
    run.jobs()
    run.config["plan"] = {"prompts": 24}
    run.save()
    with run.asked() as requests:
        assert run.jobs("plan") == Counter(PILOTS)
    assert requests == []
    run.config["plan"] = {"prompts": 8}
    run.save()


def test_another_ceiling_is_measured_again_and_changes_no_result(run: Run) -> None:
    run.jobs()
    journal = {path.name: path.stat().st_size for path in (run.folder / "journal/alpha").iterdir()}
    run.config["server"]["concurrency"] = 6
    run.save()
    with run.asked() as requests:
        assert run.jobs("plan") == Counter(PILOTS)
    assert len(requests) == 16, "a probe of the same prompts"
    seen = read_pilot(run.folder / "results/plan/alpha.pilot.json").observations
    assert Counter((one.kind, one.timed) for one in seen) == {("answer", False): 8, ("probe", True): 8}
    assert journal == {path.name: path.stat().st_size for path in (run.folder / "journal/alpha").iterdir()}
    with run.asked() as requests:
        assert run.jobs() == Counter()
    assert requests == []
