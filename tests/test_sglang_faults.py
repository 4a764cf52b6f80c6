"""Whatever happens to an SGLang server, every prompt is accounted for, and no answer is lost or doubled.

On a real server with the tiny model: full slots, retractions, aborts, kills, another model in its place. And two thousand
requests to the fake one, through a proxy that treats one in ten badly; the real one would take an hour for these.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_sglang
import pytest
import real_sglang
import requests
from faulty_proxy import FAULTS, faulty
from helpers import journal_entries, prompt
from pipeline import TESTS
from processes import endpoint, eventually, is_free, launcher, processes, steady_port
from recorder import Recorder, Wire, recorded
from stage import Stage

import eyas.admission
import eyas.asking
import eyas.fleet
import eyas.server.shares
from eyas.engines.sglang import Sglang
from eyas.engines.sglang_options import SglangOptions
from eyas.journal import Answered
from eyas.plugins import Retry
from eyas.render import Renderer
from eyas.tokenizer import load_tokenizer

pytestmark = [pytest.mark.sglang, pytest.mark.fault]

KEY = "a-key-of-the-faults"
SLOTS, IN_FLIGHT, POOL, CONTEXT = 4, 12, 1500, 1024
LETTERS = "(a|b|c|d|e){5000}"  # whoever is held to it runs into the limit
MODEL: dict[str, Any] = {
    "id": "tiny-reasoner",
    "quantisation": None,
    "kv_dtype": "bf16",
    "context": CONTEXT,
    "tokenizer": str(real_sglang.TINY),
    "reasoning": {"name": "tags", "opened_by_prompt": True, "single_token": True},
}
SERVER: dict[str, Any] = {
    "engine": {"name": "sglang"},
    "api_key_env": "EYAS_TEST_KEY",
    "concurrency": IN_FLIGHT,
    "start_timeout": 400,
}


class Foreign:
    """A server that is not Eyas' to start: at one address, whatever runs there. `log` is its output."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "server.log"
        self.port = steady_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, folder: Path = real_sglang.TINY) -> None:
        """Returns when it generates."""
        section = real_sglang.engine_section(
            folder,
            max_running_requests=SLOTS,
            max_total_tokens=POOL,
            schedule_conservativeness=0.01,
            port=self.port,
        )
        del section["name"]
        engine = Sglang(SglangOptions(**section), real_sglang.model(folder))
        (launch,) = engine.launch(real_sglang.python())
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                launch.argv,
                stdin=subprocess.PIPE,  # its end ends the server
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **launch.env, "EYAS_API_KEY": KEY},
                process_group=0,
            )

        def generates() -> bool:
            assert self.process is not None and self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                return bool(engine.inspect(self.url, KEY))
            except Retry:
                return False

        eventually(generates, "the server generates", 400)

    def kill(self) -> None:
        """All of it at once, and returns when it has gone."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        eventually(lambda: is_free(self.port), "its port is free")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Foreign]:
    made = Foreign(tmp_path_factory.mktemp("foreign"))
    try:
        made.start()
        yield made
    finally:
        if made.process is not None:  # there is an SGLang to start
            made.kill()


@pytest.fixture
def recorder(foreign: Foreign) -> Iterator[Recorder]:
    with recorded(foreign.url) as made:
        yield made


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_TEST_KEY", KEY)


def stage_of(folder: Path, texts: list[str], server: dict[str, Any] | None = None, **sampling: Any) -> Stage:
    """Questions to the tiny model at an address that the test names."""
    return Stage(
        folder,
        texts,
        server=SERVER | (server or {}),
        dataset={"sampling": {"max_new_tokens": 200, **sampling}, "reasoning_required": False},
        model=MODEL,
    )


def texts(count: int) -> list[str]:
    return [f"Question {n}: why?" for n in range(count)]


def replies(recorder: Recorder) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """(ids sent, reply) of every generation that was answered in some way. The probes' prompt is [0]."""
    for request, reply in recorder.exchanges():
        asked = json.loads(request or b"{}").get("input_ids", [0])
        if asked != [0]:
            yield asked, json.loads(reply)


def finish_of(reply: dict[str, Any]) -> str:
    kind: str = reply["meta_info"]["finish_reason"]["type"]
    return kind


def finished(recorder: Recorder) -> Wire:
    """The answers that came whole, as they crossed the socket."""
    return Wire(
        (tuple(asked), tuple(reply["output_ids"]))
        for asked, reply in replies(recorder)
        if finish_of(reply) in ("stop", "length")
    )


def journalled(stage: Stage) -> list[Answered]:
    """Every answer that the journal holds, doubles too."""
    segments = sorted(stage.paths.journal.glob("*.jsonl.zst"))
    entries = (entry for segment in segments for entry in journal_entries(segment.read_bytes()))
    return [entry for entry in entries if isinstance(entry, Answered)]


def check_accounts(stage: Stage, wire: Wire, refused: dict[str, str] | None = None) -> list[Answered]:
    """One outcome for each prompt, one answer for each outcome, and these are what crossed the socket. Returns them."""
    refused = refused or {}
    keys = [f"k{n}" for n in range(len(stage.texts))]
    outcomes = stage.outcomes()
    assert [outcome.key for outcome in outcomes] == keys
    assert {outcome.key: outcome.reason for outcome in outcomes if outcome.status == "refused"} == refused
    assert {outcome.status for outcome in outcomes} <= {"answered", "refused"}
    responses = stage.responses()
    assert [response.key for response in responses] == [key for key in keys if key not in refused]
    assert Wire((tuple(r.prompt_ids), tuple(r.output_ids)) for r in responses) == wire
    answers = journalled(stage)
    assert Counter(answer.reply.request for answer in answers) == Counter(r.request for r in responses)
    return answers


def wait_for(recorder: Recorder, count: int) -> None:
    eventually(lambda: finished(recorder).total() >= count, f"{count} answers", 240)


def moment(recorder: Recorder, seed: int, most: int) -> None:
    """Waits for some moment after the first and before the last of `most` answers."""
    chance = random.Random(seed)
    wait_for(recorder, chance.randint(1, most))
    time.sleep(chance.uniform(0, 0.5))


# --- a bad network -----------------------------------------------------------------------------------------------

# Answers that take minutes take hundredths of a second here, so the pauses between looks and attempts are shorter too.
FASTER = 50
PAUSES = {
    eyas.fleet: ("BACKOFF_FIRST", "BACKOFF_MOST", "TICK", "LOOK", "PROBE_PAUSE"),
    eyas.asking: ("TICK",),
    eyas.admission: ("COOL_DOWN", "SETTLE", "PATIENCE"),
    eyas.server.shares: ("SHARE_INTERVAL",),
}


@contextmanager
def fake(folder: Path, model: Path) -> Iterator[str]:
    command = [
        sys.executable,
        fake_sglang.__file__,
        "--model",
        str(model),
        "--record",
        str(folder / "record"),
    ]
    with subprocess.Popen(
        [*command, "--delay", "0.02", "--seed", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def test_two_thousand_requests_through_a_proxy_that_spoils_one_in_ten_are_all_answered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, pauses in PAUSES.items():
        for name in pauses:
            monkeypatch.setattr(module, name, getattr(module, name) / FASTER)
    count = 2000
    stage = stage_of(
        tmp_path,
        texts(count),
        # A deadline of 5 s: stalls end there, and nothing else does.
        {"api_key_env": None, "concurrency": 64, "slowest_rate": 100.0, "queue_wait": 1.0},
        max_new_tokens=400,
    )
    model = fake_sglang.make_model(tmp_path / "byte-reasoner")
    stage.model = MODEL | {"id": model.name, "tokenizer": str(model)}
    with fake(tmp_path, model) as url, faulty(url, seed=4) as proxy:
        stage.run(proxy.url)
    assert set(proxy.shown) == set(FAULTS) and min(proxy.shown.values()) >= 20
    assert max(proxy.shown.values()) - min(proxy.shown.values()) <= 1
    assert abs(proxy.shown.total() - proxy.asked / 10) <= 1
    failures = proxy.shown.total() - proxy.shown["slow"]
    assert proxy.asked <= count + failures + count // 100
    answered = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    wire = Wire((tuple(line["prompt"]), tuple(line["tokens"])) for line in answered)
    assert len(answered) == wire.total() <= count + failures + count // 100
    check_accounts(stage, Wire(set(wire)))


# --- a server of our own, while no other runs --------------------------------------------------------------------


@pytest.mark.parametrize("seed", [3])
def test_a_started_server_that_is_killed_is_started_again_and_costs_only_what_it_was_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    port = steady_port()
    section = real_sglang.engine_section(port=port)
    server = {"engine": {**section, "name": "recorded"}, "env": real_sglang.python(), "api_key_env": None}
    stage = stage_of(tmp_path, texts(36), {**server, "idle_timeout": 2})
    stage.plugin = TESTS / "recorded_sglang.py"
    with recorded(f"http://127.0.0.1:{port}") as recorder:
        monkeypatch.setenv("EYAS_TEST_RECORDER", recorder.url)
        thread, errors = stage.start(None)
        moment(recorder, seed, 12)
        supervisor = endpoint(tmp_path / "state")["pid"]
        broken = launcher(supervisor)
        os.killpg(broken, signal.SIGKILL)
        assert finished(recorder).total() < 36
        thread.join(timeout=400)
        assert not thread.is_alive() and not errors
        answers = check_accounts(stage, finished(recorder))
    assert 0 < sum(answer.delivery.attempt > 1 for answer in answers) <= IN_FLIGHT
    log = (tmp_path / "state" / "server.log").read_text()
    assert "ended by signal 9" in log and "restarting it; 1 restarts are left" in log
    eventually(lambda: supervisor not in processes(), "the server stops when it is idle")
    assert not (tmp_path / "state" / "endpoint.json").exists()


# --- a server of somebody else's ---------------------------------------------------------------------------------


def test_twelve_prompts_over_four_slots_are_all_in_flight_and_all_answered(
    tmp_path: Path, recorder: Recorder
) -> None:
    stage = stage_of(tmp_path, texts(12), max_new_tokens=60, regex=LETTERS)
    stage.run(recorder.url)
    answers = check_accounts(stage, finished(recorder))
    assert [len(answer.reply.output_ids) for answer in answers] == [60] * 12
    deliveries = [answer.delivery for answer in answers]
    assert max(d.started for d in deliveries) < min(d.finished for d in deliveries), "all at once"
    (manifest,) = json.loads(stage.paths.servers.read_bytes()).values()
    assert manifest["max_running_requests"] == SLOTS


def test_retracted_answers_are_whole(tmp_path: Path, recorder: Recorder) -> None:
    """Four that need 2,900 tokens of a KV cache of 1,500, which admits them all the same."""
    stage = stage_of(tmp_path, texts(4), max_new_tokens=700, regex=LETTERS)
    stage.run(recorder.url)
    answers = check_accounts(stage, finished(recorder))
    assert sum(answer.delivery.usage["num_retractions"] for answer in answers) >= 1
    for answer in answers:
        assert len(answer.reply.output_ids) == answer.reply.effective_max_new == 700
        assert set(answer.reply.text) == set("abcde"), "nothing is missing where it was taken up again"


def test_an_abort_of_everything_is_asked_again(tmp_path: Path, foreign: Foreign, recorder: Recorder) -> None:
    stage = stage_of(tmp_path, texts(12), max_new_tokens=150, regex=LETTERS)
    thread, errors = stage.start(recorder.url)
    wait_for(recorder, 1)
    headers = {"Authorization": f"Bearer {KEY}"}
    requests.post(f"{foreign.url}/abort_request", json={"abort_all": True}, headers=headers, timeout=60)
    thread.join(timeout=240)
    assert not thread.is_alive() and not errors
    answers = check_accounts(stage, finished(recorder))
    aborted = Counter(tuple(asked) for asked, reply in replies(recorder) if finish_of(reply) == "abort")
    again = Counter(tuple(a.reply.prompt_ids) for a in answers if a.delivery.attempt == 2)
    assert aborted == again and aborted.total() >= SLOTS


def test_an_over_long_prompt_is_refused_and_the_others_go_on(tmp_path: Path, recorder: Recorder) -> None:
    """Refused by the context that the config tells of, or by the six tokens of it that SGLang keeps for itself."""
    model = real_sglang.model()
    frame = len(Renderer(model, load_tokenizer(model), "").render(prompt("k", "")))
    # One token a word. The first of these just fits.
    long = [" if" * (length - frame) for length in (CONTEXT - 7, CONTEXT - 6, CONTEXT - 3)]
    stage = stage_of(tmp_path, [*long, *texts(4)], max_new_tokens=4)
    stage.run(recorder.url)
    refused = {"k1": "prompt too long for the server", "k2": "prompt and max_new_tokens exceed the context"}
    answers = check_accounts(stage, finished(recorder), refused)
    assert max(len(answer.reply.prompt_ids) for answer in answers) == CONTEXT - 7


# --- a server that ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1])
def test_a_server_that_is_killed_and_started_again_costs_only_what_it_was_doing(
    tmp_path: Path, foreign: Foreign, recorder: Recorder, seed: int
) -> None:
    stage = stage_of(tmp_path, texts(36))
    thread, errors = stage.start(recorder.url)
    moment(recorder, seed, 12)
    foreign.kill()
    assert thread.is_alive() and finished(recorder).total() < 36
    foreign.start()
    thread.join(timeout=300)
    assert not thread.is_alive() and not errors
    answers = check_accounts(stage, finished(recorder))
    assert 0 < sum(answer.delivery.attempt > 1 for answer in answers) <= IN_FLIGHT


@pytest.mark.parametrize("seed", [2])
def test_a_server_that_comes_back_with_another_model_stops_the_run_and_is_asked_nothing(
    tmp_path: Path, foreign: Foreign, recorder: Recorder, seed: int
) -> None:
    stage = stage_of(tmp_path, texts(36))
    thread, errors = stage.start(recorder.url)
    moment(recorder, seed, 12)
    foreign.kill()
    before = len(recorder.streams)
    foreign.start(real_sglang.SMOLLM2)
    thread.join(timeout=60)
    assert not thread.is_alive()
    (error,) = errors
    assert re.fullmatch(
        r"model\.id: the server serves \S+SmolLM2-135M-Instruct as SmolLM2-135M-Instruct, not tiny-reasoner; "
        r"correct the config, serve the right model, or name it so \(--served-model-name\)",
        str(error),
    )
    assert not any(b"POST /generate" in sent for sent, _ in recorder.streams[before:])
    kept = len(journalled(stage))
    foreign.kill()
    foreign.start()
    stage.run(recorder.url)
    check_accounts(stage, finished(recorder))
    asked = [asked for asked, _ in replies(recorder)]
    assert 0 < kept < 36 and len(asked) == 36, "what was journalled before is not asked again"
