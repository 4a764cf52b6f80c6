"""The fake server answers as the real ones did: same status, same keys, same types, same errors."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from fake_sglang import DIALECTS, END, VOCABULARY, answer, decode, encode, make_model
from test_fake_llamacpp import misfits
from test_sglang import KEY, serving
from test_sglang_captures import KEPT, exchanges

pytestmark = pytest.mark.service


def differences(fake: Any, real: Any) -> list[str]:
    """Where keys or types differ, to either side.

    cached_tokens_details may be null or not in the same version; how an answer ends is another test's.
    """
    either = ("$.meta_info.cached_tokens_details: ", "$.meta_info.finish_reason")
    found = [*misfits(fake, real), *misfits(real, fake)]
    return [line for line in found if not line.startswith(either)]


VERSIONS = {dialect.prefix: version for version, dialect in DIALECTS.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture(scope="module")
def urls(folder: Path) -> Iterator[dict[str, str]]:
    """A fake server for each prefix of captures, with the context of the real ones."""
    arguments = ("--context", "1024", "--pool", "4096", "--metrics")
    with (
        serving(folder, "--version", "0.5.23", *arguments) as new,
        serving(folder, "--version", "0.5.5", *arguments) as middle,
        serving(folder, "--version", "0.4.10", *arguments) as old,
    ):
        yield {"a": new, "mid055": middle, "old0410": old}


def small(value: Any) -> Any:
    """A request with ids of the fake's vocabulary."""
    if isinstance(value, dict) and "input_ids" in value:
        return {**value, "input_ids": [token % VOCABULARY for token in value["input_ids"]]}
    return value


def send(url: str, request: dict[str, Any]) -> requests.Response:
    body = None if request.get("body") is None else json.dumps(small(request["body"]))
    return requests.request(
        request["method"],
        url + request["path"],
        data=request.get("raw_body", body),
        headers={"Content-Type": "application/json"},
        timeout=30,
    )


# name of a capture: whether the fake's whole body is the real one's, letter by letter
REPLAYED = {
    "a_generate_input_ids_length": False,
    "mid055_generate_input_ids_length": False,
    "old0410_generate_input_ids_length": False,
    "a_return_logprob": False,
    "old0410_return_logprob": False,
    "a_err_bad_top_p": True,
    "a_err_empty_input_ids": True,
    "a_err_input_just_below_context": True,
    "a_err_total_over_context": True,
    "mid055_boundary_total_eq_context": True,
    "a_err_unknown_sampling_key": False,
    "mid055_err_unknown_sampling_key": True,
    "old0410_err_unknown_sampling_key": True,
    "a_err_body_array": False,
    "a_err_404": True,
    "a_err_get_generate": True,
    "a_ep_model_info": False,
    "a_ep_v1_loads": False,
    "mid055_ep_get_server_info": False,
    "mid055_ep_get_model_info": False,
    "mid055_ep_get_load": False,
    "old0410_ep_get_server_info": False,
    "old0410_ep_get_model_info": False,
    "old0410_ep_get_load": True,
}


@pytest.mark.parametrize("name", REPLAYED)
def test_a_captured_request_gets_a_reply_of_the_real_shape(urls: dict[str, str], name: str) -> None:
    (request, real), *_ = exchanges(name)
    reply = send(urls[name.partition("_")[0]], request)
    assert reply.status_code == real["status"]
    assert reply.headers["Content-Type"].split(";")[0] == real["headers"]["content-type"].split(";")[0]
    if "json" not in real:
        assert reply.text == real["text"]
    elif REPLAYED[name]:
        assert reply.json() == real["json"]
    else:
        assert differences(reply.json(), real["json"]) == []


def test_every_metric_is_one_of_the_real_servers(urls: dict[str, str]) -> None:
    (_, real), *_ = exchanges("old0410_ep_metrics")
    lines = [line for line in requests.get(urls["old0410"] + "/metrics").text.splitlines() if line[0] != "#"]
    assert lines
    for line in lines:
        assert f"\n{line.partition('{')[0]}{{" in real["text"]


def test_the_whole_server_info_is_told_with_its_keys(folder: Path) -> None:
    """As the real one does; so a test that finds no key in what Eyas writes means something."""
    (_, real), *_ = exchanges("b_server_info_api_key")
    with serving(folder, key=KEY) as url:
        told = requests.get(f"{url}/server_info", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert set(told) == set(real["json"]) and told["api_key"] == KEY and KEY in told["launch_command"]
    assert all(state["api_key"] == KEY for state in told["internal_states"])


def test_without_a_key_nothing_is_told(folder: Path) -> None:
    (request, real), *_ = exchanges("b_auth_none")
    with serving(folder, key=KEY) as url:
        reply = send(url, request)
        assert (reply.status_code, reply.json()) == (real["status"], real["json"])
        assert requests.get(f"{url}/health").status_code == 200


def replies_of(url: str, bodies: list[dict[str, Any]], then: Any = None) -> list[requests.Response]:
    """The replies to requests made at once, `then` called when the server has all."""
    found: list[Any] = [None] * len(bodies)

    def one(n: int) -> None:
        found[n] = requests.post(f"{url}/generate", json=small(bodies[n]), timeout=60)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(bodies))]
    for thread in threads:
        thread.start()
        time.sleep(0.02)  # in this order
    if then:
        wait_for_all(url, len(bodies))
        then()
    for thread in threads:
        thread.join()
    return found


def wait_for_all(url: str, count: int) -> None:
    seen = 0
    while seen < count:
        told = requests.get(f"{url}/metrics").text
        seen = sum(
            int(float(line.split()[-1]))
            for line in told.splitlines()
            if line.startswith(("sglang:num_running_reqs{", "sglang:num_queue_reqs{"))
        )


@pytest.mark.parametrize("name", ["a_abort_all", "old0410_abort_all"])
def test_what_is_aborted_answers_as_the_real_server_does(folder: Path, name: str) -> None:
    pairs = exchanges(name)
    version = VERSIONS[name.partition("_")[0]]
    with serving(folder, "--version", version, "--max-running", "4", "--delay", "1000", "--metrics") as url:

        def abort() -> None:
            assert requests.post(f"{url}/abort_request", json={"abort_all": True}).content == b""

        replies = replies_of(url, [request["body"] for request, _ in pairs], abort)
    fakes = [reply.json() for reply in replies]
    reals = [real["json"] for _, real in pairs]
    assert [reply.status_code for reply in replies] == [200] * 6

    def ends(told: list[Any]) -> list[str]:
        return sorted(json.dumps(one["meta_info"]["finish_reason"]) for one in told)

    assert ends(fakes) == ends(reals)
    for fake in fakes:
        real = next(
            one for one in reals if one["meta_info"]["finish_reason"] == fake["meta_info"]["finish_reason"]
        )
        assert differences(fake, real) == []


def test_a_rid_aborts_all_that_begin_with_it(folder: Path) -> None:
    with serving(folder, "--delay", "1000", "--metrics") as url:
        bodies = [{"rid": rid, "input_ids": [5], "sampling_params": {}} for rid in ("px-1", "px-10", "px-2")]

        def abort() -> None:
            requests.post(f"{url}/abort_request", json={"rid": "px-1"})
            requests.post(f"{url}/abort_request", json={"rid": "px-2"})

        replies = replies_of(url, bodies, abort)
    assert [reply.json()["meta_info"]["finish_reason"]["type"] for reply in replies] == ["abort"] * 3


def test_a_full_queue_and_a_rid_in_use_are_refused_as_really(folder: Path) -> None:
    full = exchanges("b_queue_full_8_on_running2_queued2")
    twice = exchanges("a_duplicate_rid_concurrent")
    with serving(folder, "--max-running", "2", "--max-queued", "2", "--delay", "1000", "--metrics") as url:
        stop = {"json": {"abort_all": True}, "timeout": 30}
        bodies = [{**request["body"], "rid": f"q-{n}"} for n, (request, _) in enumerate(full)]
        threading.Timer(2.0, lambda: requests.post(f"{url}/abort_request", **stop)).start()
        found = replies_of(url, bodies)
        assert sorted(reply.status_code for reply in found) == sorted(real["status"] for _, real in full)
        refused = next(reply for reply in found if reply.status_code == 503)
        assert refused.json() == full[-1][1]["json"]
        threading.Timer(2.0, lambda: requests.post(f"{url}/abort_request", **stop)).start()
        again = replies_of(url, [request["body"] for request, _ in twice])
        assert next(reply for reply in again if reply.status_code == 400).json() == twice[1][1]["json"]


def test_an_id_outside_the_vocabulary_ends_the_server(folder: Path) -> None:
    (_, real), *_ = exchanges("f_crash_oov")
    assert "closed connection" in real["error"]
    for token in (-1, VOCABULARY):
        with serving(folder) as url:
            with pytest.raises(requests.ConnectionError):
                requests.post(f"{url}/generate", json={"input_ids": [token]}, timeout=30)
            with pytest.raises(requests.ConnectionError):
                requests.get(f"{url}/health", timeout=30)


def test_answers_are_a_function_of_the_ids_alone(urls: dict[str, str]) -> None:
    body = {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 500}}
    new, again, middle = (
        requests.post(f"{url}/generate", json=body).json()["output_ids"]
        for url in (urls["a"], urls["a"], urls["mid055"])
    )
    assert new == again == middle == answer([7, 8], 500) and new[-1] == END
    lengths = {len(answer([7, n], 10**6)) for n in range(200)}
    assert max(lengths) > 4 * min(lengths)
    closed = [4 in answer([7, n], 10**6) for n in range(200)]
    assert 0 < closed.count(False) < 40
    assert len(answer([7], 10**6, length=1400)) == 1400


@pytest.mark.parametrize(
    "name", ["a_generate_input_ids_length", "a_eos_at_first_token", "mid055_eos_at_first_token"]
)
def test_an_answer_ends_as_the_real_ones_do(urls: dict[str, str], name: str) -> None:
    (_, real), *_ = exchanges(name)
    reason = real["json"]["meta_info"]["finish_reason"]
    limit = 900 if reason["type"] == "stop" else reason["length"]
    body = {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": limit}}
    told = requests.post(f"{urls[name.partition('_')[0]]}/generate", json=body).json()
    assert told["meta_info"]["finish_reason"] == {
        **reason,
        **({"matched": END} if reason["type"] == "stop" else {}),
    }


def test_the_end_at_the_limit_is_told_as_each_version_does(urls: dict[str, str]) -> None:
    whole = answer([7, 8], 10**6)
    for prefix, kind in (("a", "stop"), ("mid055", "length"), ("old0410", "length")):
        body = {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": len(whole)}}
        reason = requests.post(f"{urls[prefix]}/generate", json=body).json()["meta_info"]["finish_reason"]
        assert reason["type"] == kind


def test_the_folder_is_a_tokenizer_of_the_same_ids(folder: Path) -> None:
    from eyas.config import ModelConfig
    from eyas.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(id="tiny", tokenizer=str(folder)))
    text = "<|im_start|>user\né😀 <think>"
    assert tokenizer.encode(text, control=True) == encode(text)
    assert tokenizer.decode([*encode("é😀 </think>!"), END])[0] == decode(encode("é😀 </think>!"))
    assert (tokenizer.stop_ids, tokenizer.vocabulary_size) == ([END], VOCABULARY)


FAULTS = {"500", "503", "429", "reset", "stall", "cut short", "slow"}


def test_every_fault_is_shown_as_often_as_any_other(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "faults"
    with serving(folder, "--faults", "1", "--fault-log", str(log)) as url:
        seen = []
        for _ in range(14):
            try:
                reply = requests.post(f"{url}/generate", json={"input_ids": [5]}, timeout=2)
                seen.append(str(reply.status_code))
            except requests.ReadTimeout:
                seen.append("stall")
            except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
                seen.append("broken")
    shown = log.read_text().split("\n")[:-1]
    assert sorted(shown) == sorted([*FAULTS, *FAULTS])
    expected = {"reset": "broken", "cut short": "broken", "slow": "200"}
    assert seen == [expected.get(fault, fault) for fault in shown]


def test_captures_are_kept_that_the_fake_is_made_of() -> None:
    assert {f"{name}.json" for name in REPLAYED} <= {path.name for path in KEPT.iterdir()}
