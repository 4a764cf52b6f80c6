"""The SGLang engine against a real SGLang on CPUs, with a tiny random model that opens its reasoning in the prompt."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import real_sglang

from eyas.config import SamplingConfig, fingerprint
from eyas.engines.sglang import Dialect, Sglang
from eyas.engines.sglang_options import SglangOptions
from eyas.errors import EyasError
from eyas.plugins import Completion, GenerateRequest, Load, Reject, Retry
from eyas.wire import Session

pytestmark = pytest.mark.sglang
KEY = "sk-of-the-real-tests"
CONTEXT, POOL = 1024, 1500
T = TypeVar("T")
LONG: dict[str, Any] = {"max_new_tokens": 900, "regex": "(a|b|c|d|e){5000}"}  # runs into its limit


def engine(**model: Any) -> Sglang:
    section = real_sglang.engine_section(max_total_tokens=POOL, schedule_conservativeness=0.01)
    del section["name"]
    options = msgspec.convert(
        {**section, "extra_args": [*section["extra_args"], "--enable-metrics"]}, SglangOptions
    )
    return Sglang(options, real_sglang.model(context=CONTEXT, **model))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    made = engine()
    (launch,) = made.launch(real_sglang.python())
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch.argv,
            stdin=subprocess.PIPE,  # its end ends the server
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **launch.env, "EYAS_API_KEY": KEY},
        )
        try:
            wait_until_ready(made, launch.url, process, log)
            yield launch.url
        finally:
            process.kill()
            process.communicate()


def wait_until_ready(made: Sglang, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 400
    while True:
        try:
            made.inspect(url, KEY)
            return
        except Retry:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(1)


@pytest.fixture(scope="module")
def ready(url: str) -> Sglang:
    made = engine()
    made.inspect(url, KEY)
    return made


def run(work: Callable[[Session], Awaitable[T]]) -> T:
    async def with_session() -> T:
        async with Session(KEY) as session:
            return await work(session)

    return asyncio.run(with_session())


def ask(ready: Sglang, url: str, *prompts: list[int], **sampling: Any) -> list[Completion]:
    asked = SamplingConfig(**sampling)
    return run(
        lambda session: asyncio.gather(
            *(ready.generate(session, url, GenerateRequest(prompt, asked, 7)) for prompt in prompts)
        )
    )


def test_the_manifest_is_the_servers_and_holds_no_key(ready: Sglang, url: str) -> None:
    manifest = ready.inspect(url, KEY)
    expected = {
        "engine": "sglang",
        "engine_version": "sglang 0.5.23",
        "model": "tiny-reasoner",
        "served_model_name": "tiny-reasoner",
        "context_length": CONTEXT,
        "max_total_num_tokens": POOL,
        "max_req_input_len": CONTEXT - 6,
        "max_running_requests": 4,
        "device": "cpu",
    }
    assert {name: manifest[name] for name in expected} == expected
    assert KEY not in str(manifest) and str(real_sglang.ROOT) not in str(manifest)
    ask(ready, url, [5], max_new_tokens=50)
    assert fingerprint(ready.inspect(url, KEY)) == fingerprint(manifest), "it does not change with use"


def test_what_this_version_knows_is_found_by_asking(ready: Sglang, url: str) -> None:
    assert ready._dialects[url] == Dialect(
        prompt_end=CONTEXT - 6,
        vocabulary_size=4096,
        seeded=True,
        ids_in_logprobs=False,
        loads="/v1/loads?include=core,queues",
    )


def test_its_tokenizer_is_ours(ready: Sglang, url: str) -> None:
    assert ready.tokenizer(url, KEY).vocabulary_size <= 4096
    other = engine(tokenizer=str(real_sglang.SMOLLM2))
    other.inspect(url, KEY)
    with pytest.raises(EyasError, match=r"^model\.tokenizer: it reads "):
        other.tokenizer(url, KEY)


def test_a_wrong_key_and_another_model_stop_the_run(url: str) -> None:
    with pytest.raises(EyasError, match=r"^server\.api_key_env"):
        engine().inspect(url, "wrong")
    with pytest.raises(EyasError, match=r"^model\.id"):
        engine(id="other").inspect(url, KEY)
    with pytest.raises(EyasError, match=r"^model\.kv_dtype"):
        engine(kv_dtype="fp8_e4m3").inspect(url, KEY)


def test_greedy_answers_are_equal_and_sampled_ones_are_not(ready: Sglang, url: str) -> None:
    prompt = ready.tokenizer(url, KEY).encode("Why is the sky blue?", control=False)
    one, two = ask(ready, url, prompt, prompt, temperature=0.0, max_new_tokens=60)
    assert one.output_ids == two.output_ids and len(one.output_ids) <= 60
    sampled = ask(ready, url, *[prompt] * 4, max_new_tokens=60)
    assert len({tuple(completion.output_ids) for completion in sampled}) > 1
    for completion in sampled:
        assert completion.usage["completion_tokens"] == len(completion.output_ids)
        assert completion.usage["prompt_tokens"] == len(prompt)


def test_answers_end_with_the_stop_id_once(ready: Sglang, url: str) -> None:
    stops = ready.tokenizer(url, KEY).stop_ids
    found = ask(ready, url, *[[5, n] for n in range(16)], max_new_tokens=200)
    ended = [one for one in found if one.finish.type == "stop"]
    assert ended
    for completion in ended:
        assert completion.output_ids[-1] in stops and not set(completion.output_ids[:-1]) & set(stops)
        assert completion.effective_max_new == 200


@pytest.mark.parametrize(
    ("prompt", "limit", "effective"),
    [(9, 1015, 1013), (9, 1013, 1013), (1000, 24, 22), (1016, 8, 6), (1017, 7, 5), (1017, 1, 1)],
)
def test_what_the_server_cuts_silently_is_recorded(
    ready: Sglang, url: str, prompt: int, limit: int, effective: int
) -> None:
    (completion,) = ask(ready, url, [5] * prompt, **{**LONG, "max_new_tokens": limit})
    assert completion.finish.type == "length"
    assert completion.effective_max_new == len(completion.output_ids) == effective


def test_a_prompt_that_does_not_fit_or_would_kill_the_server_is_rejected(ready: Sglang, url: str) -> None:
    for prompt in ([5] * 1018, [5] * 5000, [], [-1], [4096], [5, 2**31]):
        with pytest.raises(Reject):
            ask(ready, url, prompt, max_new_tokens=1)
    assert ask(ready, url, [5], max_new_tokens=1)[0].output_ids


def test_answers_follow_a_regular_expression_or_a_grammar(ready: Sglang, url: str) -> None:
    tokenizer = ready.tokenizer(url, KEY)
    for shape in ({"regex": "[a-d]{3,9}"}, {"grammar": 'root ::= [a-d] [a-d] [a-d] ("x" | "y")?'}):
        for completion in ask(ready, url, [5], [6], max_new_tokens=50, **shape):
            assert completion.finish.type == "stop"
            assert re.fullmatch("[a-d]{3,9}[xy]?", tokenizer.decode(completion.output_ids)[0])
    with pytest.raises(EyasError, match=r"^sampling\.regex: Failed to compile regex grammar"):
        ask(ready, url, [5], regex="([")
    with pytest.raises(EyasError, match=r"^sampling\.grammar: Failed to compile ebnf grammar"):
        ask(ready, url, [5], grammar="root ::= nowhere")
    with pytest.raises(EyasError, match="repetition_penalty must be in"):
        ask(ready, url, [5], repetition_penalty=3.0)


def test_twelve_over_four_slots_are_seen_in_the_load_and_all_answered(ready: Sglang, url: str) -> None:
    async def many(session: Session) -> tuple[list[Completion], list[Load | None]]:
        sampling = SamplingConfig(**{**LONG, "max_new_tokens": 60})
        asked = asyncio.gather(
            *(ready.generate(session, url, GenerateRequest([5, n], sampling, 7)) for n in range(12))
        )
        seen = []
        while not asked.done():
            seen.append(await ready.load(session, url))
            await asyncio.sleep(0.05)
        return await asked, seen

    found, seen = run(many)
    assert [len(completion.output_ids) for completion in found] == [60] * 12
    loads = [load for load in seen if load is not None]
    assert max(load.running for load in loads) == 4
    assert max(load.waiting for load in loads) >= 4
    assert all(load.kv_use is not None and 0 <= load.kv_use <= 1 for load in loads)


def test_a_retraction_loses_nothing_and_is_told(ready: Sglang, url: str) -> None:
    found = ask(ready, url, *[[5, n] for n in range(4)], **LONG)
    assert [len(completion.output_ids) for completion in found] == [900] * 4
    assert sum(completion.usage["num_retractions"] for completion in found) >= 1


def test_what_is_aborted_is_no_answer(ready: Sglang, url: str) -> None:
    async def aborted(session: Session) -> list[Completion | BaseException]:
        asked = [
            asyncio.create_task(
                ready.generate(session, url, GenerateRequest([5, n], SamplingConfig(**LONG), 7))
            )
            for n in range(6)
        ]
        await asyncio.sleep(2)
        assert (await session.post(f"{url}/abort_request", b'{"abort_all": true}')).status == 200
        return await asyncio.gather(*asked, return_exceptions=True)

    found = run(aborted)
    assert all(type(one) is Retry for one in found), found
    assert {str(one) for one in found} == {"aborted: Aborted", "aborted: Abort in waiting queue"}
