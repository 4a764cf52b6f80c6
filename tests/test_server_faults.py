"""What a server does wrong costs a retry, never an answer; what it does for good stops the run with a reason."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fake_llamacpp import FAULTS
from stage import Stage, fake_server

import eyas.asking
from eyas.errors import EyasError
from eyas.journal import Journal

pytestmark = pytest.mark.fault


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eyas.asking, "BACKOFF_FIRST", 0.02)
    monkeypatch.setattr(eyas.asking, "BACKOFF_MOST", 0.1)


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
        while len(server.lines()) < 30:
            time.sleep(0.05)
        server.process.kill()
        server.process.wait()
        before = len(server.lines())
        time.sleep(6)
        with fake_server(tmp_path, "--port", port):
            thread.join(timeout=60)
    assert not thread.is_alive() and len(stage.responses()) == 120
    assert before < 120 <= len(server.lines()) <= 120 + 8, "only what was in flight is asked twice"


def test_a_server_that_never_comes_back_ends_the_run_and_keeps_what_is_finished(tmp_path: Path) -> None:
    stage = Stage(tmp_path, texts(60), server={"start_timeout": 3.0})
    error: list[BaseException] = []

    def run(url: str) -> None:
        try:
            stage.run(url)
        except EyasError as caught:
            error.append(caught)

    with fake_server(tmp_path, "--delay", "0.2") as server:
        thread = threading.Thread(target=run, args=(server.url,))
        thread.start()
        while len(server.lines()) < 20:
            time.sleep(0.05)
        server.process.kill()
        thread.join(timeout=60)
    assert "has not generated anything for 3 s" in str(error[0]) and "finished responses are kept" in str(
        error[0]
    )
    finished = len(server.lines())
    with Journal(stage.paths.journal) as journal:
        assert finished - 8 <= len(journal) <= finished
        kept = len(journal)
    with fake_server(tmp_path) as server:
        stage.run(server.url)
    assert len(server.lines()) == finished + 60 - kept


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


def test_a_server_with_another_model_is_not_asked(tmp_path: Path) -> None:
    stage = Stage(tmp_path, texts(3))
    with (
        fake_server(tmp_path, "--quantisation", "Q8_0") as server,
        pytest.raises(EyasError, match=r"model\.quantisation: the server holds Q8_0 weights, not Q4_1"),
    ):
        stage.run(server.url)
    assert not server.lines()


def test_a_server_that_comes_back_as_another_model_stops_the_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path, texts(60))
    error: list[BaseException] = []

    def run(url: str) -> None:
        try:
            stage.run(url)
        except EyasError as caught:
            error.append(caught)

    with fake_server(tmp_path, "--delay", "0.2") as server:
        thread = threading.Thread(target=run, args=(server.url,))
        thread.start()
        while len(server.lines()) < 20:
            time.sleep(0.05)
        server.process.kill()
        server.process.wait()
        with fake_server(tmp_path, "--port", str(urlsplit(server.url).port), "--quantisation", "Q8_0"):
            thread.join(timeout=60)
    assert "model.quantisation" in str(error[0])
