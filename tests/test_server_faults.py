"""What a server does wrong costs a retry, never an answer; what it does for good stops the run with a reason."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fake_llamacpp import FAULTS, make_model
from processes import command_lines_with, files_with
from stage import Served, Stage, fake_server

import eyas.fleet
import eyas.server.lease
from eyas.engines.llamacpp import LlamaCpp
from eyas.errors import EyasError
from eyas.journal import Journal
from eyas.plugins import Completion
from eyas.progress import read_progress
from eyas.units import Plan

pytestmark = pytest.mark.fault
CLOSED = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eyas.fleet, "BACKOFF_FIRST", 0.02)
    monkeypatch.setattr(eyas.fleet, "BACKOFF_MOST", 0.1)
    monkeypatch.setattr(eyas.fleet, "PROBE_PAUSE", 0.3)


def texts(count: int) -> list[str]:
    return [f"Question {n}: why?" for n in range(count)]


def test_one_fault_in_ten_of_every_kind_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path,
        texts(600),
        # A deadline of 2 s: stalls end there.
        server={"concurrency": 32, "slowest_rate": 400.0, "queue_wait": 1.0},
    )
    log = tmp_path / "faults.log"
    with fake_server(tmp_path, "--faults", "0.1", "--fault-log", str(log), "--seed", "7") as server:
        stage.run(server.url)
    faults = Counter(log.read_text().split("\n")[:-1])
    assert set(faults) == set(FAULTS) and min(faults.values()) >= 6
    assert len(stage.responses()) == 600
    answered = Counter(tuple(json.loads(line)["prompt"]) for line in server.lines())
    assert set(answered.values()) == {1}
    with Journal(stage.paths.journal) as journal:
        assert len(journal) == 600


def test_a_server_that_dies_pauses_the_queue_until_it_really_generates(tmp_path: Path) -> None:
    stage = Stage(tmp_path, texts(120), server={"retries": 3})
    with fake_server(tmp_path, "--delay", "0.2") as server:
        port = str(urlsplit(server.url).port)
        thread = threading.Thread(target=stage.run, args=(server.url,))
        thread.start()
        until(server, 30)
        server.process.kill()
        server.process.wait()
        before = len(server.lines())
        time.sleep(3)  # far longer than three retries take
        with fake_server(tmp_path, "--port", port):
            thread.join(timeout=60)
    assert not thread.is_alive() and len(stage.responses()) == 120
    assert before < 120 <= len(server.lines()) <= 120 + 8, "only what was in flight is asked twice"


def until(server: Served, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(server.lines()) < count:
        assert time.monotonic() < deadline, f"{len(server.lines())} of {count} answers"
        time.sleep(0.02)


def killed(server: Served) -> None:
    server.process.kill()
    server.process.wait()


def stopped(server: Served) -> None:
    """It still accepts connections, and never says a word."""
    server.process.send_signal(signal.SIGSTOP)


@pytest.mark.parametrize("end", [killed, stopped])
def test_a_server_that_never_comes_back_ends_the_run_and_keeps_what_is_finished(
    tmp_path: Path, end: Callable[[Served], None]
) -> None:
    stage = Stage(
        tmp_path, texts(60), server={"start_timeout": 3.0, "slowest_rate": 400.0, "queue_wait": 1.0}
    )
    with fake_server(tmp_path, "--delay", "0.2") as server:
        thread, errors = stage.start(server.url)
        until(server, 20)
        end(server)
        start = time.monotonic()
        thread.join(timeout=60)
        # The deadline of a request (2 s), start_timeout, and the last look at the server.
        assert not thread.is_alive() and time.monotonic() - start < 12
    assert "has not generated anything for 3 s" in str(errors[0])
    assert "finished responses are kept" in str(errors[0])
    finished = len(server.lines())
    with Journal(stage.paths.journal) as journal:
        assert finished - 8 <= len(journal) <= finished
        kept = len(journal)
    with fake_server(tmp_path) as server:
        stage.run(server.url)
    assert len(server.lines()) == finished + 60 - kept


def test_a_server_that_stalls_for_a_while_is_waited_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path, texts(60), server={"slowest_rate": 400.0, "queue_wait": 1.0})
    with fake_server(tmp_path, "--delay", "0.2") as server:
        thread, errors = stage.start(server.url)
        until(server, 20)
        stopped(server)
        time.sleep(5)
        server.process.send_signal(signal.SIGCONT)
        thread.join(timeout=60)
    assert not thread.is_alive() and not errors
    assert len(stage.responses()) == 60
    assert len(server.lines()) <= 60 + 8, "only what was in flight is asked twice"


def test_one_dead_server_of_two_swallows_no_request(tmp_path: Path) -> None:
    stage = Stage(tmp_path, texts(200), server={"retries": 1})
    with fake_server(tmp_path, "--delay", "0.1") as first, fake_server(tmp_path, "--delay", "0.1") as second:
        thread, errors = stage.start([first.url, second.url])
        until(first, 40)
        killed(second)
        thread.join(timeout=60)
    assert not thread.is_alive() and not errors
    assert len(stage.responses()) == 200
    assert len(first.lines()) <= 200 + 8


def test_a_prompt_that_the_server_cannot_encode_fails_alone(tmp_path: Path) -> None:
    stage = Stage(tmp_path, texts(20), server={"retries": 1, "failure_share": 0.1}, dataset={"samples": 2})
    with fake_server(tmp_path, "--fail-encoding", "Question 7:") as server:
        stage.run(server.url)
    outcomes = stage.outcomes()
    assert [(o.key, o.sample, o.reason) for o in outcomes if o.status == "failed"] == [
        ("k7", sample, "the server cannot encode the prompt: HTTP 500") for sample in (0, 1)
    ]
    assert [o.status for o in outcomes if o.key != "k7"] == ["answered"] * 38
    assert len(stage.responses()) == len(server.lines()) == 38
    shown = read_progress(stage.paths.progress)
    assert shown is not None and (shown.done, shown.failed) == (40, 2)
    stage.run(CLOSED)
    assert stage.outcomes() == outcomes, "settled: nothing is asked again"
    shown = read_progress(stage.paths.progress)
    assert shown is not None and (shown.done, shown.failed) == (40, 2)


def test_prompts_that_the_server_cannot_encode_fail_the_job_beyond_the_share(tmp_path: Path) -> None:
    stage = Stage(tmp_path, texts(20), server={"retries": 1, "failure_share": 0.05}, dataset={"samples": 2})
    with (
        fake_server(tmp_path, "--fail-encoding", "Question 1") as server,  # and 10 to 19
        pytest.raises(
            EyasError,
            match=r"datasets\.alpha: 22 of 40 requests failed for good "
            r"\(first cause: the server cannot encode the prompt: HTTP 500\); more than server\.failure_share allows",
        ),
    ):
        stage.run(server.url)
    asked = len(server.lines())
    assert asked == 18, "the others are answered"
    with fake_server(tmp_path) as server:
        stage.run(server.url)
    assert len(server.lines()) == 40 and len(stage.responses()) == 40


def test_a_refused_key_stops_the_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_API_KEY", "right")
    monkeypatch.setenv("WRONG_KEY", "wrong")
    stage = Stage(tmp_path, texts(3), server={"api_key_env": "WRONG_KEY"})
    with (
        fake_server(tmp_path) as server,
        pytest.raises(EyasError, match=r"server\.api_key_env: .*refuses the API key"),
    ):
        stage.run(server.url)
    assert not server.lines()


def test_a_key_is_in_no_file_and_on_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = "the-key-of-somebody-elses-server"
    monkeypatch.setenv("EYAS_API_KEY", key)  # which the server asks for
    monkeypatch.setenv("FOREIGN_KEY", key)
    caplog.set_level(logging.DEBUG)
    # A deadline of 2 s: stalls end there.
    server_section = {"api_key_env": "FOREIGN_KEY", "slowest_rate": 400.0, "queue_wait": 1.0}
    stage = Stage(tmp_path, texts(60), server=server_section)
    with fake_server(tmp_path, "--delay", "0.2", "--faults", "0.1", "--seed", "2") as server:
        thread, errors = stage.start(server.url)
        until(server, 20)
        meanwhile = files_with(key.encode(), tmp_path)
        shown = command_lines_with(key.encode())
        thread.join(timeout=90)
    assert not thread.is_alive() and not errors and len(stage.responses()) == 60
    assert meanwhile == files_with(key.encode(), tmp_path) == [] and shown == []
    assert "attempt 1" in caplog.text and key not in caplog.text


# --- another model at the address --------------------------------------------------------------------------------

QUANTISATION = (("--quantisation", "Q8_0"), "model.quantisation: the server holds Q8_0 weights, not Q4_1")
SIZE = (
    ("--parameters", "2"),
    "serves another model than server.engine.model_file (parameters 2, {model} has 1); serve that file",
)
NAME = (("--model", "{other}"), "now answers as {other}, it was {model}; serve the same model again")


@dataclass
class Other:
    """Another model's server: what it is started with, where it records, and the error that it must meet."""

    arguments: list[str]
    record: Path
    line: str


@pytest.fixture
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Other:
    arguments, line = request.param
    # Of the same file name, so that a look tells no difference.
    (tmp_path / "other").mkdir()
    names = {"model": str(tmp_path / "tiny.gguf"), "other": str(make_model(tmp_path / "other" / "tiny.gguf"))}
    record = tmp_path / "other.jsonl"
    told = [argument.format(**names) for argument in arguments]
    return Other([*told, "--record", str(record)], record, line.format(**names))


@pytest.mark.parametrize("other", [QUANTISATION, SIZE], indirect=True)
@pytest.mark.parametrize("mixed", [False, True])
def test_a_server_with_another_model_is_not_asked(tmp_path: Path, other: Other, mixed: bool) -> None:
    stage = Stage(tmp_path, texts(3))
    with fake_server(tmp_path) as right, fake_server(tmp_path, *other.arguments) as wrong:
        with pytest.raises(EyasError, match=r"^(server\.url|model\.quantisation): ") as caught:
            stage.run([right.url, wrong.url] if mixed else wrong.url)
        assert other.line in str(caught.value) and "\n" not in str(caught.value)
        assert SIZE[0] != other.arguments[:2] or wrong.url in str(caught.value)
    assert not right.lines() and not other.record.exists()
    assert not list(stage.paths.journal.glob("*.zst")), "nothing is journalled"


@pytest.mark.parametrize("other", [QUANTISATION, SIZE, NAME], indirect=True)
def test_a_server_that_comes_back_as_another_model_is_not_asked(tmp_path: Path, other: Other) -> None:
    stage = Stage(tmp_path, texts(60))
    with fake_server(tmp_path, "--delay", "0.2") as server:
        thread, errors = stage.start(server.url)
        until(server, 20)
        killed(server)
        port = str(urlsplit(server.url).port)
        with fake_server(tmp_path, "--port", port, *other.arguments):
            thread.join(timeout=60)
    assert other.line in str(errors[0])
    assert not other.record.exists(), "no prompt reached the other model"
    with Journal(stage.paths.journal) as journal:
        assert len(journal) >= 20


@pytest.mark.parametrize("other", [QUANTISATION, SIZE], indirect=True)
def test_a_server_that_is_replaced_between_two_datasets_is_not_asked(tmp_path: Path, other: Other) -> None:
    with fake_server(tmp_path) as server:
        Stage(tmp_path, texts(3), name="alpha").run(server.url)
        killed(server)
        port = str(urlsplit(server.url).port)
        with fake_server(tmp_path, "--port", port, *other.arguments), pytest.raises(EyasError) as caught:
            Stage(tmp_path, texts(3), name="beta").run(server.url)
    assert other.line in str(caught.value)
    assert not other.record.exists()


@pytest.fixture
def replaced(
    other: Other, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Served, int], None]]:
    """Lets another server stand at the address of one once it has answered, while nothing else is in flight."""
    answer = LlamaCpp.generate
    monkeypatch.setattr(eyas.server.lease, "LOOK_INTERVAL", 0.0)
    with contextlib.ExitStack() as servers:

        def after(server: Served, count: int) -> None:
            async def generate(*arguments: Any) -> Completion:
                completion = await answer(*arguments)
                if len(server.lines()) == count and server.process.poll() is None:
                    killed(server)
                    port = str(urlsplit(server.url).port)
                    servers.enter_context(fake_server(tmp_path, "--port", port, *other.arguments))
                return completion

            monkeypatch.setattr(LlamaCpp, "generate", generate)

        yield after


Replaced = Callable[[Served, int], None]


@pytest.mark.parametrize("other", [QUANTISATION, SIZE], indirect=True)
def test_a_server_that_is_replaced_while_idle_is_not_asked(
    tmp_path: Path, other: Other, replaced: Replaced
) -> None:
    stage = Stage(tmp_path, texts(1), server={"concurrency": 1}, dataset={"samples": 4})
    with fake_server(tmp_path) as server, pytest.raises(EyasError) as caught:
        replaced(server, 2)
        stage.run(server.url)
    assert other.line in str(caught.value)
    assert not other.record.exists()
    with Journal(stage.paths.journal) as journal:
        assert len(journal) == 2


@pytest.mark.parametrize("other", [QUANTISATION, SIZE], indirect=True)
def test_nothing_that_another_tokenizer_made_is_kept(
    tmp_path: Path, other: Other, replaced: Replaced
) -> None:
    stage = Stage(tmp_path, texts(3), server={"concurrency": 1})
    with fake_server(tmp_path) as server, pytest.raises(EyasError) as caught:
        replaced(server, 2)
        stage.run(server.url)
    assert other.line in str(caught.value)
    settings, _, stages = stage.settings(server.url)
    plan = Plan(settings, stage.paths.prompts, stages.registry)
    with Journal(stage.paths.journal) as journal:
        assert [unit.known for unit in plan.units(journal)] == [True, True, False]


@pytest.mark.parametrize("other", [NAME], indirect=True)
def test_an_answer_under_another_name_is_not_kept(tmp_path: Path, other: Other, replaced: Replaced) -> None:
    stage = Stage(tmp_path, texts(1), server={"concurrency": 1}, dataset={"samples": 4})
    with fake_server(tmp_path) as server, pytest.raises(EyasError) as caught:
        replaced(server, 2)
        stage.run(server.url)
    assert other.line in str(caught.value)
    assert len(other.record.read_text().splitlines()) == 1, "its size is right, so one request told"
    with Journal(stage.paths.journal) as journal:
        assert len(journal) == 2
