"""The fake server answers as a real llama.cpp server did: same status, same keys, same types, same errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from fake_llamacpp import CONTROL, encode
from pipeline import Run, fake_server
from test_llamacpp import capture

from eyas.config import SamplingConfig
from eyas.engines.llamacpp import REPLY_FIELDS, read_completion, request_fields

pytestmark = pytest.mark.service

KEPT = Path(__file__).parent / "data" / "llamacpp" / "exchanges"
SHARED = Path(__file__).parents[2] / "shared" / "captures" / "llamacpp"
VOCABULARY = 259
POSTED = sorted(path.name.removesuffix(".request.json") for path in KEPT.glob("*.request.json"))
ANSWERED = [name for name in POSTED if name in ("completion_eos", "completion_limit")]
REFUSED = [name for name in POSTED if name.startswith("completion") and name not in ANSWERED]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = Run(tmp_path_factory.mktemp("fake"), {})
    with fake_server(run, "--context", "2048") as url:
        yield url


def real(name: str) -> tuple[int, Any]:
    """Status and body that the real server sent."""
    response = KEPT / f"{name}.response.txt"
    status, body = capture(response if response.exists() else KEPT / f"{name}.txt")
    return status, json.loads(body)


def asked(name: str) -> dict[str, Any]:
    return json.loads((KEPT / f"{name}.request.json").read_text())


def fake(url: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    reply = (
        requests.get(url + path, timeout=10)
        if body is None
        else requests.post(url + path, json=body, timeout=10)
    )
    assert reply.headers["Content-Type"] == "application/json; charset=utf-8"
    return reply.status_code, reply.json()


def misfits(fake: Any, real: Any, where: str = "$") -> list[str]:
    """Where `fake` has a key that `real` lacks, or another type. Any item of a list stands for all of them."""
    if isinstance(fake, dict) and isinstance(real, dict):
        found = [f"{where}.{key}: not in the real reply" for key in fake.keys() - real.keys()]
        shared = fake.keys() & real.keys()
        return found + [line for key in shared for line in misfits(fake[key], real[key], f"{where}.{key}")]
    if isinstance(fake, list) and isinstance(real, list):
        return [
            line for item in fake[:1] for other in real[:1] for line in misfits(item, other, f"{where}[]")
        ]
    numbers = (int, float)
    same = type(fake) is type(real) or (type(fake) in numbers and type(real) in numbers)
    return [] if same else [f"{where}: {type(fake).__name__}, really {type(real).__name__}"]


@pytest.mark.parametrize("name", ANSWERED)
def test_an_answer_has_the_real_shape_and_meaning(url: str, name: str) -> None:
    body = asked(name)
    body["prompt"] = [token % VOCABULARY for token in body["prompt"]]
    if name == "completion_eos":
        body["n_predict"] = 400
    (status, reply), (real_status, real_reply) = fake(url, "/completion", body), real(name)
    assert status == real_status == 200
    assert not misfits(reply, real_reply)
    assert set(REPLY_FIELDS) <= reply.keys()
    for key in ("stop_type", "stop", "truncated", "stopping_word", "index"):
        assert reply[key] == real_reply[key]
    assert len(reply["tokens"]) == reply["tokens_predicted"] and reply["tokens_evaluated"] == len(
        body["prompt"]
    )
    limit = body["n_predict"]
    kinds = {
        read_completion(200, json.dumps(text).encode(), limit).finish.type for text in (reply, real_reply)
    }
    assert len(kinds) == 1


def test_settings_are_given_back_under_the_names_of_the_real_server(url: str) -> None:
    fields = request_fields([5, 6], SamplingConfig(), 3, 1, 2048)
    _, reply = fake(url, "/completion", fields)
    _, real_reply = real("completion_eos")
    assert not misfits(reply["generation_settings"], real_reply["generation_settings"])
    _, chosen = fake(url, "/completion", fields | {"response_fields": REPLY_FIELDS})
    assert list(chosen) == REPLY_FIELDS


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_the_real_one_word_for_word(url: str, name: str) -> None:
    body = asked(name)
    if name == "completion_too_long":
        body["prompt"] = [token % VOCABULARY for token in body["prompt"]]
    assert fake(url, "/completion", body) == real(name)


@pytest.mark.parametrize("name", ["tokenize", "tokenize_think"])
def test_tokenize_has_the_real_shape_and_loses_no_character(url: str, name: str) -> None:
    (status, reply), (real_status, real_reply) = fake(url, "/tokenize", asked(name)), real(name)
    assert status == real_status == 200
    assert not misfits(reply, real_reply)
    texts = ["".join(token["piece"] for token in tokens["tokens"]) for tokens in (reply, real_reply)]
    assert texts[0] == texts[1] == asked(name)["content"]
    spelt = [
        [token["piece"] for token in tokens["tokens"] if token["piece"] in CONTROL]
        for tokens in (reply, real_reply)
    ]
    assert spelt[0] == spelt[1]


def test_tokenize_reads_control_tokens_unless_told_not_to(url: str) -> None:
    content = asked("tokenize")["content"]
    for special in (True, False):
        _, reply = fake(url, "/tokenize", {"content": content, "parse_special": special})
        assert reply == {"tokens": encode(content, special)}
        assert any(token < len(CONTROL) for token in reply["tokens"]) == special
    assert fake(url, "/tokenize", {"content": content}) == (200, {"tokens": encode(content)})


@pytest.mark.parametrize(
    ("name", "path"), [("props", "/props"), ("models", "/v1/models"), ("health", "/health")]
)
def test_what_the_server_says_of_itself_has_the_real_shape(url: str, name: str, path: str) -> None:
    (status, reply), (real_status, real_reply) = fake(url, path), real(name)
    assert status == real_status == 200
    assert reply and not misfits(reply, real_reply)


def test_the_kept_exchanges_are_those_captured() -> None:
    if not SHARED.is_dir():
        pytest.skip(f"the full set of captures is not at {SHARED}")
    for path in KEPT.iterdir():
        assert path.read_bytes() == (SHARED / path.name).read_bytes(), path.name
