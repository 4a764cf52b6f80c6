"""The pilot of one dataset, against the fake server."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import msgspec
import pytest
from stage import Stage, fake_server

from eyas.pilot import pilot, union
from eyas.pilot_report import PilotReport, read_pilot

pytestmark = pytest.mark.service


def run(stage: Stage, url: str, prompts: int, minutes: float = 5.0) -> PilotReport:
    _, access, stages = stage.settings(url)
    settings = stages.pilot(stage.name)
    return pilot(
        type(settings)(
            generate=settings.generate, checks=settings.checks, prompts=prompts, server=settings.server
        ),
        access,
        minutes,
        stage.paths.prompts,
        stage.paths.journal,
        stage.folder / "pilot.json",
        stage.folder / "pilot" / f"{stage.name}.status.json",
        stage.paths.progress,
        stages.registry,
    )


def test_it_asks_the_first_prompts_and_says_what_came(tmp_path: Path) -> None:
    stage = Stage(tmp_path, [f"Question {n}?" for n in range(30)])
    with fake_server(tmp_path) as server:
        report = run(stage, server.url, 10)
        assert len(server.lines()) == 10
        stage.run(server.url)
        assert len(server.lines()) == 30, "the run asks the others"
    assert report == read_pilot(tmp_path / "pilot.json")
    assert [one.key for one in report.observations] == [f"k{n}" for n in range(10)]
    answers = {response.key: response for response in stage.responses()}
    for one in report.observations:
        answer = answers[one.key]
        assert (one.output_tokens, one.prompt_tokens) == (len(answer.output_ids), len(answer.prompt_ids))
        assert one.timed and one.started <= one.finished and one.accepted is not None
    assert len(report.prompt_bytes) == 30 and report.without_answer == 0
    assert report.journalled.answers == 10
    assert max(one.finished for one in report.observations) <= report.journalled.at <= time.time()
    assert report.journalled.output_tokens == sum(one.output_tokens for one in report.observations)
    assert report.journalled.busy == union([(one.started, one.finished) for one in report.observations])
    assert [manifest["engine"] for manifest in report.servers.values()] == ["fake"]


def test_time_side_by_side_counts_once() -> None:
    assert union([(5.0, 9.0), (0.0, 2.0), (1.0, 3.0), (8.0, 8.5)]) == [[0.0, 3.0], [5.0, 9.0]]


def test_prompts_that_cannot_be_asked_are_counted(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ["x" * 9000, *(f"Question {n}?" for n in range(9))])
    with fake_server(tmp_path) as server:
        report = run(stage, server.url, 10)
    assert report.without_answer == 1 and len(report.observations) == 9


def test_what_is_still_running_at_the_end_is_told_as_such_and_asked_by_the_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path, [*(f"Question {n}?" for n in range(5)), "slow question"])
    with fake_server(tmp_path, "--slow", "slow question", "--slow-for", "6") as server:
        report = run(stage, server.url, 6, minutes=2 / 60)
        kinds = {one.key: one.kind for one in report.observations}
        stage.run(server.url)
    assert kinds["k5"] == "running"
    running = report.observations[-1]
    quick = [one for one in report.observations if one.kind == "answer"]
    speed = sum(one.output_tokens for one in quick) / sum(one.finished - one.started for one in quick)
    assert running.output_tokens == int(speed * (running.finished - running.started)), "neither less nor more"
    assert running.accepted is None and 0 < running.finished - running.started < 6
    assert len(stage.responses()) == 6


def test_answers_of_an_earlier_run_do_not_tell_the_speed_so_a_probe_asks_for_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, [f"Question {n}?" for n in range(8)])
    with fake_server(tmp_path) as server:
        stage.run(server.url)
        before = stage.paths.responses.read_bytes()
        report = run(stage, server.url, 6, minutes=0.5)
        assert len(server.lines()) == 14
        stage.run(server.url)
        assert len(server.lines()) == 14
    kinds = [(one.kind, one.timed) for one in report.observations]
    assert kinds == [("answer", False)] * 6 + [("probe", True)] * 6
    assert report.journalled.answers == 8, "of the whole run, and no probes"
    assert stage.paths.responses.read_bytes() == before


def test_a_run_that_asked_no_more_than_its_pilot_would_tells_its_speed_itself(tmp_path: Path) -> None:
    stage = Stage(tmp_path, [f"Question {n}?" for n in range(8)])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with fake_server(tmp_path, "--port", port) as server:
        stage.run(server.url)
        report = run(stage, server.url, 8)
        assert len(server.lines()) == 8, "nobody is asked"
        assert [(one.kind, one.timed) for one in report.observations] == [("answer", True)] * 8
        status = stage.paths.progress.read_bytes()

        def is_asked() -> bool:
            before = len(server.lines())
            run(stage, server.url, 8)
            return len(server.lines()) == before + 8

        assert not is_asked()
        beside = stage.paths.progress.with_name("beside.status.json")
        for changed in ({"state": "interrupted"}, {"server": "of other settings"}, {"prompts": 9}):
            beside.write_bytes(msgspec.json.encode(msgspec.json.decode(status) | changed))
            assert is_asked(), "what shared the server is not known"
        beside.write_bytes(b"{")
        assert is_asked()
        beside.unlink()
        assert not is_asked()

        stage.server["concurrency"] = 7
        assert is_asked()
        stage.run(server.url)
        assert is_asked(), "a job that asks nothing has no times"
    with fake_server(tmp_path, "--port", port, "--slots", "3") as server:
        stage.paths.progress.write_bytes(msgspec.json.encode(msgspec.json.decode(status)))
        del stage.server["concurrency"]
        assert is_asked(), "another server"


def test_a_probe_that_is_cut_off_kept_the_server_busy_too(tmp_path: Path) -> None:
    stage = Stage(tmp_path, [*(f"Question {n}?" for n in range(5)), "slow question"])
    with fake_server(tmp_path, "--slow", "slow question", "--slow-for", "6") as server:
        run(stage, server.url, 6)
        again = run(stage, server.url, 6, minutes=2 / 60)
    probes = {one.key: one for one in again.observations if one.kind == "probe"}
    assert set(probes) == {f"k{n}" for n in range(6)} and all(one.timed for one in probes.values())
    assert 0 < probes["k5"].finished - probes["k5"].started < 6 and probes["k5"].output_tokens > 0
    assert not any(one.timed or one.kind == "running" for one in again.observations if one.kind != "probe")
