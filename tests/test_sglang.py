"""The SGLang engine against the fake server in each of its dialects; test_sglang_real.py has the real one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from fake_sglang import DIALECTS, END, VOCABULARY, answer, decode, encode, make_model

from eyas.capacity import Pool
from eyas.config import ModelConfig, SamplingConfig, fingerprint
from eyas.engines.sglang import Sglang
from eyas.engines.sglang_options import SglangOptions
from eyas.errors import EyasError
from eyas.plugins import Busy, Completion, GenerateRequest, Load, Reject, Retry
from eyas.wire import Session

pytestmark = pytest.mark.service

FAKE = Path(__file__).with_name("fake_sglang.py")
KEY = "sk-of-the-tests"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("hub") / "byte-reasoner")


@contextlib.contextmanager
def serving(folder: Path, *arguments: str, key: str | None = None) -> Iterator[str]:
    """A fake server that runs; yields its address."""
    environment = {name: value for name, value in os.environ.items() if name != "EYAS_API_KEY"}
    process = subprocess.Popen(
        [sys.executable, str(FAKE), "--model", str(folder), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment | ({"EYAS_API_KEY": key} if key else {}),
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def engine(folder: Path, **model: Any) -> Sglang:
    fields = {"id": "org/byte-reasoner", "tokenizer": str(folder), "kv_dtype": "bf16", "context": 4096}
    return Sglang(SglangOptions(), ModelConfig(**{**fields, **model}))


def ask(
    made: Sglang, url: str, prompt: list[int], key: str | None = None, seed: int = 7, **sampling: Any
) -> Completion:
    async def once() -> Completion:
        async with Session(key) as session:
            return await made.generate(
                session, url, GenerateRequest(prompt, SamplingConfig(**sampling), seed)
            )

    return asyncio.run(once())


def load(made: Sglang, url: str) -> Load | None:
    async def once() -> Load | None:
        async with Session() as session:
            return await made.load(session, url)

    return asyncio.run(once())


def recorded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- every dialect -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", DIALECTS)
def test_each_version_is_asked_in_its_own_way(folder: Path, tmp_path: Path, version: str) -> None:
    record = tmp_path / "requests"
    prompt = encode("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n")
    with serving(folder, "--version", version, "--record", str(record), "--metrics") as url:
        made = engine(folder)
        manifest = made.inspect(url, None)
        tokenizer = made.tokenizer(url, None)
        completion = ask(made, url, prompt, max_new_tokens=600)
        told = load(made, url)
    assert manifest["engine_version"].startswith(f"sglang {version}")
    assert completion.output_ids == answer(prompt, 600)
    assert tokenizer.decode(completion.output_ids)[0] == decode(completion.output_ids)
    assert (completion.finish.type, completion.finish.matched) == ("stop", END)
    assert completion.effective_max_new == 600
    assert completion.usage["prompt_tokens"] == len(prompt)
    assert told is not None and (told.running, told.waiting) == (0, 0)
    (sent,) = recorded(record)
    assert sent["prompt"] == prompt and sent["seed"] == (None if version == "0.4.10" else 7)


@pytest.mark.parametrize("version", DIALECTS)
def test_every_sampling_field_is_sent_with_every_request(folder: Path, tmp_path: Path, version: str) -> None:
    """Else a default of the server's would decide, and the request hash would not tell."""
    asked: dict[str, Any] = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "max_new_tokens": 60,
    }
    record = tmp_path / "requests"
    with serving(folder, "--version", version, "--record", str(record)) as url:
        made = engine(folder)
        made.inspect(url, None)
        ask(made, url, [5], **asked)
        ask(made, url, [5])
        ask(made, url, [5], regex="x+")
        ask(made, url, [5], grammar='root ::= "x"')
    set_, unset, regex, grammar = (sent["sampling"] for sent in recorded(record))
    names = set(SamplingConfig.__struct_fields__) - {"regex", "grammar"}
    assert names <= set(unset) and {name: set_[name] for name in asked} == asked
    assert unset["top_k"] == -1, "0 is off for us, -1 for SGLang"
    assert unset["stop_token_ids"] == [END] and unset["skip_special_tokens"] is False
    assert regex["regex"] == "x+" and "ebnf" not in regex
    assert grammar["ebnf"] == 'root ::= "x"' and "regex" not in grammar


@pytest.mark.parametrize("version", DIALECTS)
@pytest.mark.parametrize("prompt", [[], [-1], [5, VOCABULARY], [2**31]])
def test_a_prompt_that_kills_a_server_never_reaches_it(folder: Path, version: str, prompt: list[int]) -> None:
    with serving(folder, "--version", version) as url:
        made = engine(folder)
        made.inspect(url, None)
        with pytest.raises(Reject):
            ask(made, url, prompt)
        made.inspect(url, None)  # it lives


def test_the_smaller_vocabulary_counts(folder: Path, tmp_path: Path) -> None:
    """A tokenizer may know more ids than the model has rows for."""
    small = make_model(tmp_path / "byte-reasoner")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    with serving(small) as url:
        made = engine(folder)
        made.inspect(url, None)
        with pytest.raises(Reject, match="outside the vocabulary"):
            ask(made, url, [100])


@pytest.mark.parametrize("version", DIALECTS)
@pytest.mark.parametrize(
    ("prompt", "limit", "effective"), [(3000, 1000, 1000), (3000, 1096, 1094), (4088, 8, 6), (4089, 8, 5)]
)
def test_what_the_server_would_cut_silently_is_asked_for_and_recorded(
    folder: Path, version: str, prompt: int, limit: int, effective: int
) -> None:
    """Old versions refuse what new ones cut; no version is asked for more than it gives."""
    with serving(folder, "--version", version, "--tokens", "2000") as url:
        made = engine(folder)
        made.inspect(url, None)
        completion = ask(made, url, [9] * prompt, max_new_tokens=limit)
    assert completion.effective_max_new == len(completion.output_ids) == effective
    assert completion.finish.type == "length"


@pytest.mark.parametrize("version", DIALECTS)
def test_an_answer_that_just_fits_is_whole_and_one_token_less_is_cut(folder: Path, version: str) -> None:
    whole = answer([7, 8], 10**6)
    with serving(folder, "--version", version) as url:
        made = engine(folder)
        made.inspect(url, None)
        fits = ask(made, url, [7, 8], max_new_tokens=len(whole))
        cut = ask(made, url, [7, 8], max_new_tokens=len(whole) - 1)
    assert (fits.output_ids, fits.effective_max_new) == (whole, len(whole))
    assert (fits.finish.type, fits.finish.matched) == ("stop", END)
    assert (cut.output_ids, cut.finish.type) == (whole[:-1], "length")


@pytest.mark.parametrize("version", DIALECTS)
def test_a_prompt_that_does_not_fit_is_rejected_unsent(folder: Path, tmp_path: Path, version: str) -> None:
    record = tmp_path / "requests"
    with serving(folder, "--version", version, "--record", str(record)) as url:
        made = engine(folder)
        made.inspect(url, None)
        for length in (4090, 4095, 4096, 9000):
            with pytest.raises(Reject, match="prompt too long for the server"):
                ask(made, url, [9] * length, max_new_tokens=1)
    assert not record.exists()


def test_each_attempt_has_a_rid_of_its_own_and_none_begins_like_another(folder: Path, tmp_path: Path) -> None:
    record = tmp_path / "requests"
    with serving(folder, "--record", str(record)) as url:
        made = engine(folder)
        made.inspect(url, None)
        for _ in range(5):
            ask(made, url, [5])
    rids = {sent["rid"] for sent in recorded(record)}
    assert len(rids) == 5 and all(re.fullmatch("[0-9a-f]{32}", rid) for rid in rids)


ERROR_500 = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def test_a_server_that_takes_no_seed_just_now_is_not_thought_to_take_none(folder: Path) -> None:
    """Without a seed, servers that are deterministic answer every sample alike."""
    made = engine(folder)
    with serving(folder, "--version", "0.5.5") as url, Relay(url) as relay:
        relay.fault_once("/generate", ERROR_500)
        made.inspect(relay.url, None)
        assert relay.faults_shown == 1
        assert made._dialects[relay.url].seeded


# --- what a server is --------------------------------------------------------------------------------------------


def test_two_equal_launches_have_one_manifest_without_secrets(folder: Path) -> None:
    manifests = []
    for _ in range(2):
        with serving(folder, key=KEY) as url:
            assert (
                requests.get(f"{url}/server_info", headers={"Authorization": f"Bearer {KEY}"}).json()[
                    "api_key"
                ]
                == KEY
            )
            manifests.append(engine(folder).inspect(url, KEY))
    assert fingerprint(manifests[0]) == fingerprint(manifests[1])
    assert KEY not in json.dumps(manifests)
    assert str(folder.parent) not in json.dumps(manifests)


CONTRADICTIONS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    # what: (the server's arguments, fields of the config's model, the error)
    "another model": (
        [],
        {"id": "org/other"},
        "model.id: the server serves {folder}, not org/other; correct",
    ),
    "another revision": (
        ["--revision", "abc"],
        {"revision": "def"},
        "model.revision: the server serves abc, not def; correct",
    ),
    "another quantisation": (
        ["--quantisation", "fp8"],
        {"quantisation": "awq"},
        "model.quantisation: the server holds fp8 weights, not awq; correct",
    ),
    "a quantisation that the config does not know of": (
        ["--quantisation", "fp8"],
        {},
        "model.quantisation: the server holds fp8 weights, not those of the checkpoint; correct",
    ),
    "another weight format": (
        ["--dtype", "float16"],
        {"weight_dtype": "bf16"},
        "model.weight_dtype: the server holds float16, not bfloat16; correct",
    ),
    "another weight format by the checkpoint": (
        [],
        {"weight_dtype": "f16"},
        "model.weight_dtype: the server holds bfloat16, not float16; correct",
    ),
    "another cache format": (
        ["--kv-dtype", "fp8_e4m3"],
        {},
        "model.kv_dtype: the server keeps its KV cache in fp8_e4m3, not bfloat16; correct",
    ),
    "another cache format by the checkpoint": (
        [],
        {"kv_dtype": "fp8_e5m2"},
        "model.kv_dtype: the server keeps its KV cache in bfloat16, not fp8_e5m2; correct",
    ),
    "a context that is too small": (
        ["--context", "4095"],
        {},
        "model.context: the server holds 4,095 tokens of one request (context length 4095, KV cache 1,048,576), fewer than 4,096; lower",
    ),
    "a cache that is too small": (
        ["--pool", "600"],
        {},
        "model.context: the server holds 600 tokens of one request (context length 4096, KV cache 600), fewer than 4,096; lower",
    ),
    "sampling settings of its own": (
        ["--preferred", '{"min_p": 0.1}'],
        {},
        "server.url: the server merges sampling settings of its own into every request (--preferred-sampling-params {{'min_p': 0.1}}); start",
    ),
}


@pytest.mark.parametrize(
    ("version", "what"),
    [
        *(("0.5.23", what) for what in CONTRADICTIONS),
        *(("0.4.10", what) for what in CONTRADICTIONS if what != "another revision"),  # it tells none
    ],
)
def test_a_server_that_contradicts_the_config_is_refused(folder: Path, what: str, version: str) -> None:
    arguments, model, message = CONTRADICTIONS[what]
    with serving(folder, "--version", version, *arguments) as url, pytest.raises(EyasError) as caught:
        engine(folder, **model).inspect(url, None)
    assert str(caught.value).startswith(message.format(folder=folder))
    assert ";" in str(caught.value), "there is a remedy"


AGREEMENTS: list[tuple[list[str], dict[str, Any]]] = [
    (["--served-name", "org/other"], {"id": "org/other"}),
    (["--served-name", "org/byte-reasoner"], {}),
    (["--revision", "abc"], {"revision": "abc"}),
    (["--revision", "abc"], {}),
    (["--quantisation", "compressed-tensors"], {"quantisation": "compressed_tensors"}),
    (["--dtype", "bfloat16"], {"weight_dtype": "bf16"}),
    (["--dtype", "half"], {"weight_dtype": "f16", "kv_dtype": "f16"}),
    (["--kv-dtype", "fp8_e4m3"], {"kv_dtype": "fp8_e4m3"}),
    (["--kv-dtype", "bf16"], {}),
    (["--kv-dtype", "fp8_e4m3"], {"kv_dtype": "auto"}),
    (["--context", "9000"], {}),
]


@pytest.mark.parametrize(("arguments", "model"), AGREEMENTS)
def test_a_server_that_agrees_with_the_config_is_accepted(
    folder: Path, arguments: list[str], model: dict[str, Any]
) -> None:
    with serving(folder, *arguments) as url:
        assert engine(folder, **model).inspect(url, None)["engine"] == "sglang"


def test_a_snapshot_in_the_hub_cache_tells_name_and_revision(folder: Path) -> None:
    commit = "0123456789" * 4
    path = Path("/cache/models--org--byte-reasoner/snapshots") / commit
    with serving(path) as url:
        manifest = engine(folder, revision=commit).inspect(url, None)
        assert (manifest["model"], manifest["revision"]) == ("byte-reasoner", commit)
        with pytest.raises(EyasError, match=r"^model\.revision: "):
            engine(folder, revision="main").inspect(url, None)


def test_weights_that_were_changed_in_place_are_another_model(folder: Path) -> None:
    found = []
    for version in ("default", "step-100"):
        with serving(folder, "--weight-version", version) as url:
            manifest = engine(folder).inspect(url, None)
            told = engine(folder).identify(url, None)
            assert told == {name: value for name, value in manifest.items() if name != "accelerator"}
            found.append({name: told[name] for name in Sglang.model_fields})
    assert found[0] != found[1]


def test_a_look_at_the_model_generates_nothing_and_checks_the_config(folder: Path) -> None:
    with serving(folder, "--quantisation", "fp8") as url, Relay(url) as relay:
        relay.fault_once("/generate", b"")
        with pytest.raises(EyasError, match=r"^model\.quantisation: "):
            engine(folder).identify(relay.url, None)
        assert engine(folder, quantisation="fp8").identify(relay.url, None)["quantisation"] == "fp8"
        assert relay.faults_shown == 0


def test_what_a_server_can_hold_is_in_its_manifest(folder: Path) -> None:
    with serving(folder, "--pool", "200000", "--max-running", "48") as url:
        made = engine(folder)
        manifest = made.inspect(url, None)
    assert made.capacity(manifest) == Pool(tokens=200_000, max_running=48, conservativeness=1.0)
    assert made.capacity({**manifest, "dp_size": 4}).tokens == 800_000


def test_the_tokenizer_must_be_the_servers(folder: Path, tmp_path: Path) -> None:
    """By its text → ids where the server tokenizes, by ids → text of an answer where it does not."""
    other = make_model(tmp_path / "byte-reasoner")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["e"], vocabulary["x"] = vocabulary["x"], vocabulary["e"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for version, read in (("0.5.23", "the server as ["), ("0.5.5", "the server as '")):
        with serving(folder, "--version", version) as url:
            made = engine(other)
            made.inspect(url, None)
            with pytest.raises(EyasError, match=r"^model\.tokenizer: it reads ") as caught:
                made.tokenizer(url, None)
            assert read in str(caught.value)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_wrong_key_stops_the_run(folder: Path, key: str | None) -> None:
    with serving(folder, key=KEY) as url:
        made = engine(folder)
        with pytest.raises(EyasError, match=r"server\.api_key_env"):
            made.inspect(url, key)
        made.inspect(url, KEY)
        with pytest.raises(EyasError, match=r"server\.api_key_env"):
            ask(made, url, [5], key)
        assert ask(made, url, [5], KEY).output_ids


def test_what_is_no_sglang_is_told(folder: Path) -> None:
    with Relay("") as other:
        other.reply = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"
        with pytest.raises(EyasError, match="there is no SGLang server"):
            engine(folder).inspect(other.url, None)
        other.reply = b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"workers":4}'
        with pytest.raises(EyasError, match="not at a router"):
            engine(folder).inspect(other.url, None)
        other.reply = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"
        with pytest.raises(EyasError, match="is not SGLang's"):
            engine(folder).inspect(other.url, None)
    with pytest.raises(EyasError, match=r"^server\.url: .* is no address"):
        engine(folder).inspect("nonsense", None)


@pytest.mark.parametrize("status", [301, 308])
def test_an_address_that_leads_elsewhere_is_told_before_anything_is_asked(folder: Path, status: int) -> None:
    with Relay("") as other:
        there = b"https://there:1/server_info"
        other.reply = b"HTTP/1.1 %d Moved\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % (status, there)
        with pytest.raises(
            EyasError, match=rf"^server\.url: {other.url} leads on to {there.decode()} \(HTTP {status}\)"
        ):
            engine(folder).inspect(other.url, None)


# --- what goes wrong ---------------------------------------------------------------------------------------------


class Relay:
    """A server of one reply, or a way to another server that shows one fault."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.reply = b""
        self.keeps = False
        self.faults_shown = 0
        self._fault: tuple[str, bytes] | None = None
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def fault_once(self, path: str, reply: bytes) -> None:
        self._fault = (path, reply)

    def __enter__(self) -> Relay:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(ConnectionError, ValueError):  # the client is gone
                    self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        """One request a connection; a second one, where there may be one, gets no reply."""
        method, path, body = self._read(connection)
        if self._fault and self._fault[0] == path:
            reply, self._fault = self._fault[1], None
            self.faults_shown += 1
        elif self.target:
            got = requests.request(
                method, self.target + path, data=body, headers={"Content-Type": "application/json"}
            )
            start = f"HTTP/1.1 {got.status_code} x\r\nContent-Length: {len(got.content)}\r\n"
            kept = "" if self.keeps else "Connection: close\r\n"
            reply = f"{start}{kept}\r\n".encode() + got.content
        else:
            reply = self.reply.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
        connection.sendall(reply)
        if self.keeps:
            self._read(connection)

    def _read(self, connection: socket.socket) -> tuple[str, str, bytes]:
        with connection.makefile("rb") as stream:
            method, path, _ = stream.readline().decode().split(" ")
            length = 0
            while line := stream.readline().strip().lower():
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            return method, path, stream.read(length)


FAULTS = {
    "no reply": b"",
    "a reply cut short": b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"text":"',
    "no JSON": b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
    "a failure": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
    "a server that drains": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reply_that_does_not_come_whole_is_asked_for_again(folder: Path, fault: str) -> None:
    made = engine(folder)
    with serving(folder) as url, Relay(url) as relay:
        made.inspect(relay.url, None)
        relay.fault_once("/generate", FAULTS[fault])
        with pytest.raises(Retry) as caught:
            ask(made, relay.url, [5])
        assert type(caught.value) is Retry and relay.faults_shown == 1
        assert ask(made, relay.url, [5]).output_ids == answer([5], 4096)


def test_only_the_first_look_at_a_server_waits_long_for_its_reply(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ones are given up by who asks, and would pile up at a server that hangs."""
    made = engine(folder)
    with serving(folder) as url, socket.create_server(("127.0.0.1", 0)) as hanging:
        made.inspect(url, None)
        waits: list[float] = []
        call = requests.Session.request

        def noted(self: requests.Session, *arguments: Any, **fields: Any) -> requests.Response:
            waits.append(fields["timeout"][1])
            return call(self, *arguments, **fields)

        monkeypatch.setattr(requests.Session, "request", noted)
        made.inspect(url, None)
        made.identify(url, None)
        assert set(waits) == {60.0}
        waits.clear()
        engine(folder).inspect(url, None)
        assert set(waits) == {600.0}
        monkeypatch.setattr("eyas.engines.sglang.LOOK_TIMEOUT", 0.2)
        silent = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        made._dialects[silent] = made._dialects[url]
        for look in (made.inspect, made.identify):
            with pytest.raises(Retry, match=r"^connection: "):
                look(silent, None)


def test_a_server_that_is_gone_is_a_retry_for_every_call(folder: Path) -> None:
    made = engine(folder)
    with serving(folder) as url:
        made.inspect(url, None)
    with pytest.raises(Retry, match="connection: "):
        made.inspect(url, None)
    with pytest.raises(Retry, match="connection: "):
        ask(made, url, [5])
    assert load(made, url) is None


def test_a_server_that_closed_a_kept_connection_is_a_retry(folder: Path) -> None:
    """SGLang closes idle connections after 5 s; whoever reuses one just then finds it reset."""
    made = engine(folder)

    async def twice(url: str) -> None:
        request = GenerateRequest([5], SamplingConfig(), 7)
        async with Session() as session:
            assert (await made.generate(session, url, request)).output_ids
            with pytest.raises(Retry, match="connection: closed before the reply was whole"):
                await made.generate(session, url, request)

    with serving(folder) as target, Relay(target) as relay:
        made.inspect(relay.url, None)
        relay.keeps = True
        asyncio.run(twice(relay.url))


def test_a_server_that_was_never_looked_at_is_looked_at_first(folder: Path) -> None:
    with serving(folder) as url:
        with pytest.raises(Retry, match="not been looked at"):
            ask(engine(folder), url, [5])
        assert load(engine(folder), url) is None


def test_a_full_queue_asks_for_fewer_requests(folder: Path) -> None:
    made = engine(folder)

    async def many(url: str) -> list[Completion | BaseException]:
        async with Session() as session:
            asked = [
                made.generate(session, url, GenerateRequest([5, n + 5], SamplingConfig(), 7))
                for n in range(8)
            ]
            return await asyncio.gather(*asked, return_exceptions=True)

    with serving(folder, "--max-running", "2", "--max-queued", "2", "--delay", "1") as url:
        made.inspect(url, None)
        found = asyncio.run(many(url))
    assert sum(type(one) is Busy for one in found) == 4
    assert sum(isinstance(one, Completion) for one in found) == 4


@pytest.mark.parametrize("version", DIALECTS)
def test_what_was_aborted_is_no_answer(folder: Path, version: str) -> None:
    made = engine(folder)

    async def aborted(url: str) -> list[Completion | BaseException]:
        async with Session() as session:
            asked = [
                asyncio.create_task(
                    made.generate(session, url, GenerateRequest([5, n + 5], SamplingConfig(), 7))
                )
                for n in range(3)
            ]
            told = await made.load(session, url)
            while told is None or (told.running, told.waiting) != (2, 1):
                told = await made.load(session, url)
            await session.post(f"{url}/abort_request", b'{"abort_all": true}')
            return await asyncio.gather(*asked, return_exceptions=True)

    with serving(folder, "--version", version, "--max-running", "2", "--delay", "1000", "--metrics") as url:
        made.inspect(url, None)
        found = asyncio.run(aborted(url))
    causes = sorted(str(cause) for cause in found)
    assert all(type(cause) is Retry for cause in found)
    assert causes == ["aborted: " + DIALECTS[version].aborted_waiting, *["aborted: Aborted"] * 2]


def test_a_server_that_came_back_smaller_is_looked_at_again(folder: Path) -> None:
    """It refuses what fitted before; as a rejected prompt that would be lost for good."""
    made = engine(folder)
    with serving(folder) as large, Relay(large) as relay:
        made.inspect(relay.url, None)
        with serving(folder, "--context", "600") as small:
            relay.target = small
            with pytest.raises(Retry, match="prompt too long for the server, which has changed"):
                ask(made, relay.url, [9] * 1000, max_new_tokens=50)
            with pytest.raises(EyasError, match=r"^model\.context: "):
                made.inspect(relay.url, None)


def test_a_load_comes_from_wherever_a_version_tells_it(folder: Path) -> None:
    for version, arguments, expected in (
        ("0.5.23", [], Load(0, 0, 0.0, 0)),
        ("0.5.5", [], Load(0, 0)),
        ("0.4.10", [], None),
        ("0.4.10", ["--metrics"], Load(0, 0, 0.0, 0)),
    ):
        with serving(folder, "--version", version, *arguments) as url:
            made = engine(folder)
            made.inspect(url, None)
            assert load(made, url) == expected, version


def test_a_load_that_fails_is_none(folder: Path) -> None:
    made = engine(folder)
    with serving(folder) as url, Relay(url) as relay:
        made.inspect(relay.url, None)
        for fault in FAULTS.values():
            relay.fault_once("/v1/loads?include=core,queues", fault)
            assert load(made, relay.url) is None
        assert relay.faults_shown == len(FAULTS)
        assert load(made, relay.url) is not None
