"""The llama.cpp engine: replies as captured from a real server, and the real server itself."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import requests
from fake_llamacpp import make_model
from hypothesis import given
from hypothesis import strategies as st
from real_model import KEY, MODEL, engine, launched, model_file, running

from eyas.config import SamplingConfig, fingerprint
from eyas.engines import llamacpp
from eyas.engines.llamacpp import (
    LAUNCHER,
    LlamaCpp,
    LlamaCppTokenizer,
    ServerOptions,
    Vocabulary,
    read_completion,
    read_vocabulary,
    request_fields,
)
from eyas.errors import EyasError
from eyas.lengths import ends_of
from eyas.plugins import Completion, GenerateRequest, Launch, Reject, Retry
from eyas.records import Finish
from eyas.wire import Session

KEPT = Path(__file__).parent / "data" / "llamacpp"
SHARED = Path(__file__).parents[2] / "shared" / "captures" / "llamacpp"

# --- replies -----------------------------------------------------------------------------------------------------

PARIS = [504, 3575, 282, 4649, 314, 7042, 30, 2]
EXPECTED: dict[str, Any] = {
    "completion_eos": (PARIS, Finish(type="stop", matched=2)),
    "completion_n_predict_-1": (PARIS, Finish(type="stop", matched=2)),
    "completion_at_ctx": ([314, 260, 3575, 282, 4649, 47, 2], Finish(type="stop", matched=2)),
    "completion_limit": (PARIS[:5], Finish(type="length")),
    "completion_probs": (PARIS[:3], Finish(type="length")),
    "completion_mixed": ([79, 104, 198, 198], Finish(type="length")),
    "completion_n_predict_0": ([504], Finish(type="length")),
    "completion_no_return_tokens": (Retry, "token ids lost"),
    "completion_stop_string": (Retry, "ended by 'word'"),
    "completion_stream": (Retry, "reply cut short"),
    "completion_stream_eos": (Retry, "reply cut short"),
    "completion_exact_ctx": (Reject, "prompt too long for the context"),
    "completion_too_long": (Reject, "prompt too long for the context"),
    "completion_bad_token": (Reject, "prompt has ids outside the vocabulary"),
    "completion_neg_token": (Reject, "prompt has ids outside the vocabulary"),
    "completion_empty_prompt": (Reject, "empty prompt"),
    "completion_bad_grammar": (EyasError, "sampling.grammar: "),
    "completion_bad_json": (EyasError, "HTTP 400"),
    "completion_bad_type": (EyasError, "must be number"),
    "completion_missing_prompt": (EyasError, "key 'prompt' not found"),
    "completion_batch": (EyasError, "not llama.cpp's"),
    "not_found": (EyasError, "HTTP 404"),
}


def capture(path: Path) -> tuple[int, bytes]:
    head, _, body = path.read_bytes().partition(b"\r\n\r\n" if b"\r\n\r\n" in path.read_bytes() else b"\n\n")
    return int(head.split()[1]), body


def check_capture(name: str, path: Path) -> None:
    expected, detail = EXPECTED[name]
    status, body = capture(path)
    if isinstance(expected, list):
        completion = read_completion(status, body, 64)
        assert (completion.output_ids, completion.finish) == (expected, detail)
        assert completion.usage["completion_tokens"] == len(expected)
        assert completion.effective_max_new == (64 if detail.type == "stop" else len(expected))
    else:
        with pytest.raises(expected, match=re.escape(detail)):
            read_completion(status, body, 64)


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.txt")), ids=lambda path: path.name.split(".")[0])
def test_captured_reply_has_its_meaning(path: Path) -> None:
    check_capture(path.name.removesuffix(".response.txt"), path)


def test_every_completion_ever_captured_has_its_meaning() -> None:
    if not SHARED.is_dir():
        pytest.skip(f"the full set of captures is not at {SHARED}")
    paths = [*SHARED.glob("completion_*.response.txt"), SHARED / "not_found.response.txt"]
    assert {path.name.removesuffix(".response.txt") for path in paths} == set(EXPECTED)
    for path in paths:
        check_capture(path.name.removesuffix(".response.txt"), path)


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (401, b'{"error":{"message":"Invalid API Key"}}', EyasError, "server.api_key_env"),
        (403, b"", EyasError, "server.api_key_env"),
        (429, b"", Retry, "HTTP 429"),
        (408, b"", Retry, "HTTP 408"),
        (500, b"oops", Retry, "HTTP 500"),
        (503, b'{"error":{"message":"Loading model","type":"unavailable_error"}}', Retry, "HTTP 503"),
        (200, b'{"tokens":[1,2', Retry, "cut short"),
        (200, b"", Retry, "cut short"),
        (200, b'{"choices":[]}', EyasError, "not llama.cpp's"),
    ],
)
def test_failures_are_told_apart(status: int, body: bytes, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        read_completion(status, body, 8)


def reply(**changes: Any) -> bytes:
    whole = {
        "tokens": [5, 6],
        "stop_type": "limit",
        "tokens_predicted": 2,
        "tokens_evaluated": 3,
        "truncated": False,
    }
    return json.dumps({**whole, **changes}).encode()


def test_a_server_that_holds_less_than_asked_lowers_the_effective_limit() -> None:
    assert read_completion(200, reply(truncated=True), 100).effective_max_new == 2
    assert read_completion(200, reply(), 2).effective_max_new == 2


@pytest.mark.parametrize("changes", [{"tokens": [6]}, {"tokens": [], "tokens_predicted": 0}])
def test_an_answer_without_all_its_ids_is_never_accepted(changes: dict[str, Any]) -> None:
    with pytest.raises(Retry, match="token ids lost"):
        read_completion(200, reply(**changes), 8)


@pytest.mark.parametrize("end", ["limit", "eos"])
def test_an_answer_beyond_what_was_asked_for_is_none(end: str) -> None:
    assert read_completion(200, reply(stop_type=end), 2).output_ids == [5, 6]
    with pytest.raises(Retry, match="more token ids than asked for"):
        read_completion(200, reply(stop_type=end), 1)


def test_the_seed_that_means_any_is_never_sent() -> None:
    assert request_fields([1], SamplingConfig(), 0xFFFFFFFF, 1, 8)["seed"] == 0


# --- decoding ----------------------------------------------------------------------------------------------------


def byte_tokenizer() -> LlamaCppTokenizer:
    """Ids 0 to 255 are bytes, 256 is the end, 257 a control token."""
    pieces = [*(bytes([i]) for i in range(256)), b"<end>", b"<ctl>"]
    vocabulary = Vocabulary(
        format=llamacpp.VOCABULARY_FORMAT,
        size=0,
        mtime_ns=0,
        template="",
        pieces=pieces,
        control_ids=[256, 257],
        added_ids=[256, 257],
        special_tokens={},
        served={},
    )
    return LlamaCppTokenizer(None, vocabulary, [256])  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[7, 258], [-1, 7], [2**40], [9] * 9 + [258, 256]])
def test_an_id_that_the_model_file_does_not_have_is_told_with_the_remedy(ids: list[int]) -> None:
    with pytest.raises(EyasError, match=r"server\.engine\.model_file: it has ids below 258, the server gave"):
        byte_tokenizer().decode(ids)


@given(st.lists(st.integers(0, 257), max_size=40))
def test_text_lengths_count_only_characters_that_stay(ids: list[int]) -> None:
    tokenizer = byte_tokenizer()
    text, lengths = tokenizer.decode(ids)
    ends = ends_of(lengths).tolist()
    shown = ids[:-1] if ids[-1:] == [256] else ids
    pieces = [{256: b"<end>", 257: b"<ctl>"}.get(i, bytes([i % 256])) for i in shown]
    assert text == b"".join(pieces).decode(errors="replace")
    assert len(ends) == len(ids)
    assert ends == sorted(ends)
    assert not ids or ends[-1] == len(text)
    for i, end in enumerate(ends[:-1]):
        follow = [*ids[: i + 1], *"→ and on".encode()]
        assert tokenizer.decode(follow)[0][:end] == text[:end]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back_from_its_bytes(text: str) -> None:
    ids = list(text.encode())
    decoded, lengths = byte_tokenizer().decode([*ids, 256])
    assert decoded == text
    assert lengths.count("1") == len(text)


def test_an_unfinished_character_at_the_end_is_replaced_and_belongs_to_the_last_id() -> None:
    assert byte_tokenizer().decode([0x61, 0xF0, 0x9F]) == ("a\ufffd", "101")
    assert byte_tokenizer().decode([0x61, 0xF0, 0x9F, 256]) == ("a\ufffd", "1001")


def test_control_tokens_inside_decode_to_their_spelling() -> None:
    assert byte_tokenizer().decode([257, 256, 0x61, 256])[0] == "<ctl><end>a"


def test_every_captured_answer_decodes_to_its_text() -> None:
    if not SHARED.is_dir():
        pytest.skip(f"the captured answers are not at {SHARED}")
    tokenizer = LlamaCppTokenizer(None, read_vocabulary(model_file()), [0, 2, 4])  # type: ignore[arg-type]
    answers = [
        json.loads(line)
        for file in SHARED.glob("think/*.jsonl")
        for line in file.read_text().split("\n")
        if line
    ]
    assert len(answers) == 180
    for answer in answers:
        text, lengths = tokenizer.decode(answer["tokens"])
        assert text and answer["full"].endswith(text)
        assert ends_of(lengths)[-1] == len(text)


# --- the model file ----------------------------------------------------------------------------------------------


def plain(path: Path, **options: Any) -> LlamaCpp:
    return LlamaCpp(
        ServerOptions(model_file=str(path), **options), msgspec.structs.replace(MODEL, sha256=None)
    )


def test_a_missing_model_file_names_key_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"server\.engine\.model_file: .*make model"):
        plain(tmp_path / "none.gguf").launch(sys.executable)


def test_a_model_file_with_another_digest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    other = LlamaCpp(ServerOptions(model_file=str(tmp_path / "m.gguf")), MODEL)
    with pytest.raises(EyasError, match=r"model\.sha256"):
        other.launch(sys.executable)


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EyasError, match=rf"server\.engine\.port: 127\.0\.0\.1:{port} is taken .* or 0"):
            plain(tmp_path / "m.gguf", port=port).launch(sys.executable)


def test_each_process_gets_a_port_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    urls = [launch.url for launch in plain(tmp_path / "m.gguf", processes=3).launch(sys.executable)]
    assert len(set(urls)) == 3


def test_a_file_that_is_no_model_has_no_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"garbage" * 100)
    with pytest.raises(EyasError, match="not a whole GGUF file"):
        read_vocabulary(tmp_path / "m.gguf")


def test_a_file_tells_what_a_server_of_it_says(tmp_path: Path) -> None:
    assert read_vocabulary(make_model(tmp_path / "m.gguf")).served == {
        "vocabulary_size": 259,
        "parameters": 1,
        "weight_bytes": 4,
    }


@pytest.mark.parametrize(("parts", "told"), [(0, 3), (1, 3), (2, 1)])
def test_one_part_of_a_split_model_tells_nothing_of_its_weights(
    tmp_path: Path, parts: int, told: int
) -> None:
    path = make_model(tmp_path / "m.gguf", parts=parts)
    assert len(read_vocabulary(path).served) == told


def test_the_real_file_tells_what_its_server_said() -> None:
    _, body = capture(KEPT / "exchanges" / "models.txt")
    meta = json.loads(body)["data"][0]["meta"]
    assert read_vocabulary(model_file()).served == {
        "vocabulary_size": meta["n_vocab"],
        "parameters": meta["n_params"],
        "weight_bytes": meta["size"],
    }


def test_the_kept_vocabulary_is_used_only_for_the_file_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    made: list[int] = []

    def extract(model_file: Path, stat: Any) -> Vocabulary:
        made.append(stat.st_size)
        return Vocabulary(
            llamacpp.VOCABULARY_FORMAT, stat.st_size, stat.st_mtime_ns, "", [b"a"], [], [], {}, {}
        )

    monkeypatch.setattr(llamacpp, "_extract_vocabulary", extract)
    for _ in range(2):
        read_vocabulary.cache_clear()
        read_vocabulary(path)
    assert made == [4]
    (tmp_path / "m.gguf.vocabulary").write_bytes(b"\xff torn")
    read_vocabulary.cache_clear()
    read_vocabulary(path)
    path.write_bytes(b"GGUF2")
    read_vocabulary.cache_clear()
    read_vocabulary(path)
    assert made == [4, 4, 5]


# --- the launcher ------------------------------------------------------------------------------------------------


def test_the_launcher_needs_only_the_standard_library_and_xllamacpp() -> None:
    tree = ast.parse(LAUNCHER.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        name.split(".")[0]
        for node in imports
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert names - set(sys.stdlib_module_names) == {"xllamacpp"}


def run_to_failure(launch: Launch, log: Path, **limits: Any) -> str:
    with log.open("wb") as output:
        subprocess.run(
            launch.argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"EYAS_API_KEY": KEY},
            timeout=30,
            check=False,
            **limits,
        )
    return log.read_text(encoding="utf-8", errors="replace")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a dead parent on Linux only")
def test_the_launcher_does_not_load_for_a_supervisor_that_is_gone(tmp_path: Path) -> None:
    """Killed before the launcher could ask the kernel to tell."""
    (tmp_path / "garbage.gguf").write_bytes(b"garbage")
    launch = plain(tmp_path / "garbage.gguf").launch(sys.executable)[0]
    ended, end = os.pipe()
    os.close(end)
    with os.fdopen(ended) as stdin:
        done = subprocess.run(
            launch.argv, stdin=stdin, capture_output=True, text=True, timeout=30, check=False
        )
    assert (done.returncode, done.stderr) == (1, "the supervisor is gone\n")


@pytest.mark.engine
def test_real_causes_of_failure_become_one_sentence(tmp_path: Path) -> None:
    real, log = engine(), tmp_path / "log"

    (tmp_path / "garbage.gguf").write_bytes(b"garbage" * 1000)
    garbage = plain(tmp_path / "garbage.gguf").launch(sys.executable)[0]
    assert "not a GGUF" in str(real.explain(run_to_failure(garbage, log)))

    (tmp_path / "cut.gguf").write_bytes(model_file().read_bytes()[:20_000_000])
    cut = plain(tmp_path / "cut.gguf").launch(sys.executable)[0]
    assert "cut short" in str(real.explain(run_to_failure(cut, log)))

    launch = real.launch(sys.executable)[0]
    with socket.create_server(("127.0.0.1", int(launch.url.rpartition(":")[2]))):
        assert "port is taken" in str(real.explain(run_to_failure(launch, log)))

    # -S: without site-packages, as in an environment that lacks the engine.
    bare = Launch([launch.argv[0], "-S", *launch.argv[1:]], {}, launch.url)
    assert "xllamacpp is not installed" in str(real.explain(run_to_failure(bare, log)))

    large = engine(msgspec.structs.replace(MODEL, context=400_000)).launch(sys.executable)[0]
    text = run_to_failure(
        large, log, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2_000_000_000, 2_000_000_000))
    )
    assert "not enough memory" in str(real.explain(text))

    assert real.explain("ImportError: libgomp.so.1: cannot open shared object file") is not None
    assert real.explain("all is well") is None


@pytest.mark.engine
def test_the_launcher_ends_at_once_when_told(tmp_path: Path) -> None:
    real = engine()
    with launched(real.launch(sys.executable)[0]) as loading:
        time.sleep(0.3)
        loading.terminate()
        assert loading.wait(2) == -signal.SIGTERM
    log = tmp_path / "log"
    with log.open("wb") as output, launched(real.launch(sys.executable)[0], output) as process:
        deadline = time.monotonic() + 30
        while b"listening on http" not in log.read_bytes().split(b"model loaded")[-1]:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
        assert process.wait(5) == 0


# --- the real server ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with running(engine()) as url:
        yield url


HEADERS = {"Authorization": f"Bearer {KEY}"}


def ask(url: str, path: str, **fields: Any) -> requests.Response:
    return requests.post(url + path, json=fields, headers=HEADERS, timeout=60)


def generate(url: str, prompt: list[int], context: int = MODEL.context, **sampling: Any) -> Completion:
    asking = engine(msgspec.structs.replace(MODEL, context=context))

    async def once() -> Completion:
        async with Session(KEY) as session:
            return await asking.generate(session, url, GenerateRequest(prompt, SamplingConfig(**sampling), 5))

    return asyncio.run(once())


QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.engine
def test_streaming_loses_ids_and_plain_replies_do_not(server: str) -> None:
    """Why `generate` does not stream. If this fails because streaming got mended, streaming may be considered."""
    fields = {
        **{"prompt": [1], "n_predict": 40, "return_tokens": True, "temperature": 0.0, "cache_prompt": False},
        "grammar": 'root ::= "😀漢字😀😀"',
    }
    whole = ask(server, "/completion", **fields).json()
    assert whole["content"] == "😀漢字😀😀"
    assert len(whole["tokens"]) == whole["tokens_predicted"]
    events = ask(server, "/completion", **fields, stream=True).content.decode().split("\n\n")
    streamed = [json.loads(event.removeprefix("data: ")) for event in events if event]
    ids = [token for event in streamed for token in event["tokens"]]
    assert streamed[-1]["tokens_predicted"] == whole["tokens_predicted"]
    assert len(ids) < len(whole["tokens"])


@pytest.mark.engine
def test_known_texts_and_ids_agree(server: str) -> None:
    tokenizer = engine().tokenizer(server, KEY)
    assert tokenizer.vocabulary_size == 49152
    assert tokenizer.stop_ids == [0, 2, 4]
    assert tokenizer.control_ids == list(range(17))
    assert "<|im_start|>" in tokenizer.template
    assert tokenizer.encode(QUESTION, control=True)[:3] == [1, 4093, 198]
    assert not set(tokenizer.encode(QUESTION, control=False)) & set(tokenizer.control_ids)
    assert tokenizer.encode("", control=False) == []
    with pytest.raises(Reject, match="Unicode"):
        tokenizer.encode("\ud800", control=False)


@pytest.mark.engine
def test_a_vocabulary_of_another_model_is_noticed(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = read_vocabulary(model_file())
    pieces = own.pieces[:300] + own.pieces[301:] + own.pieces[300:301]
    monkeypatch.setattr(llamacpp, "read_vocabulary", lambda _: msgspec.structs.replace(own, pieces=pieces))
    with pytest.raises(EyasError, match="use the file that the server serves"):
        engine().tokenizer(server, KEY)


@pytest.mark.engine
def test_a_model_of_the_same_tokenizer_and_quantisation_is_noticed(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = read_vocabulary(model_file())
    for fact, value in own.served.items():
        other = msgspec.structs.replace(own, served=own.served | {fact: 7})
        monkeypatch.setattr(llamacpp, "read_vocabulary", lambda _, other=other: other)
        with pytest.raises(EyasError, match=rf"^server\.url: {server} .*\({fact} {value}, .*gguf has 7\)"):
            engine().inspect(server, KEY)


@pytest.mark.engine
def test_a_look_at_the_model_takes_no_place_in_the_queue(server: str) -> None:
    fields = {"prompt": [1], "n_predict": 60, "ignore_eos": True}
    asking = [
        threading.Thread(target=ask, args=(server, "/completion"), kwargs=fields, daemon=True)
        for _ in range(4)
    ]
    for thread in asking:
        thread.start()
    slots = f"{server}/slots"
    while not all(slot["is_processing"] for slot in requests.get(slots, headers=HEADERS, timeout=60).json()):
        time.sleep(0.02)
    told = engine().identify(server, KEY)
    assert {name: told[name] for name in LlamaCpp.model_fields} == {
        "quantisation": "Q4_1",
        "parameters": 134_515_008,
        "weight_bytes": 96_576_768,
        "vocabulary_size": 49_152,
    }
    assert all(thread.is_alive() for thread in asking)
    for thread in asking:
        thread.join()


@pytest.mark.engine
def test_a_server_is_known_by_name_before_and_after(server: str, tmp_path: Path) -> None:
    """One engine that first saw the model under another name, as after a restart with another file."""
    asking = engine()
    asking.inspect(server, KEY)
    assert asking._names == {server: model_file().name}
    asking._names[server] = "other.gguf"

    async def once() -> Completion:
        async with Session(KEY) as session:
            return await asking.generate(session, server, GenerateRequest([1], SamplingConfig(), 5))

    for look in (lambda: asking.inspect(server, KEY), lambda: asyncio.run(once())):
        with pytest.raises(EyasError, match=rf"answers as {model_file().name}, it was other\.gguf"):
            look()


@pytest.mark.engine
def test_answers_end_by_stop_or_limit_and_keep_every_id(server: str) -> None:
    tokenizer = engine().tokenizer(server, KEY)
    prompt = tokenizer.encode(QUESTION, control=True)
    stopped = generate(server, prompt, temperature=0.0, max_new_tokens=100)
    assert stopped.finish == Finish(type="stop", matched=2)
    assert stopped.output_ids[-1] == 2
    assert stopped.effective_max_new == 100
    assert "Paris" in tokenizer.decode(stopped.output_ids)[0]
    assert stopped.usage == {"prompt_tokens": len(prompt), "completion_tokens": len(stopped.output_ids)}
    cut = generate(server, prompt, temperature=0.0, max_new_tokens=3)
    assert (cut.output_ids, cut.finish) == (stopped.output_ids[:3], Finish(type="length"))
    full = generate(server, prompt, context=len(prompt) + 3, max_new_tokens=100, temperature=0.0)
    assert (full.output_ids, full.finish, full.effective_max_new) == (cut.output_ids, cut.finish, 3)


@pytest.mark.engine
def test_a_prompt_that_cannot_be_asked_never_leaves(server: str) -> None:
    for prompt, reason in [
        ([], "empty prompt"),
        ([49152], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
        ([1] * MODEL.context, "too long"),
    ]:
        with pytest.raises(Reject, match=reason):
            generate("http://127.0.0.1:9", prompt)
    with pytest.raises(EyasError, match=r"sampling\.grammar"):
        generate(server, [1], grammar="root ::= (")


@pytest.mark.engine
def test_a_server_that_is_away_or_breaks_off_is_asked_again() -> None:
    with pytest.raises(Retry, match="connection"):
        generate("http://127.0.0.1:9", [1])

    async def broken_off() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"tokens": [1')
            await writer.drain()
            writer.close()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        request = GenerateRequest([1], SamplingConfig(), 1)
        async with (
            await asyncio.start_server(answer, "127.0.0.1", 0) as broken,
            Session() as session,
        ):
            port = broken.sockets[0].getsockname()[1]
            with pytest.raises(Retry, match="connection"):
                await engine().generate(session, f"http://127.0.0.1:{port}", request)
        async with await asyncio.start_server(silent, "127.0.0.1", 0) as slow:
            port = slow.sockets[0].getsockname()[1]
            async with Session() as session:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await engine().generate(session, f"http://127.0.0.1:{port}", request)

    asyncio.run(broken_off())


@pytest.mark.engine
def test_no_default_of_the_server_decides_a_token(server: str) -> None:
    """Every sampling setting that the server knows is sent, or is named here as without effect on what is sent."""
    inert = {
        *("dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
        *(
            "dry_sequence_breakers",
            "mirostat_tau",
            "mirostat_eta",
            "adaptive_decay",
            "max_tokens",
            "n_discard",
        ),
        *(
            "grammar",
            "grammar_lazy",
            "grammar_triggers",
            "preserved_tokens",
            "chat_format",
            "reasoning_format",
        ),
        *("reasoning_in_content", "generation_prompt", "speculative.types", "timings_per_token"),
        *("post_sampling_probs", "backend_sampling", "lora"),
    }
    fields = request_fields([1], SamplingConfig(max_new_tokens=1), 3, 1, MODEL.context)
    applied = ask(server, "/completion", **fields).json()["generation_settings"]
    assert set(applied) - set(fields) == inert
    assert {name: applied[name] for name in fields if name in applied} == {
        name: value for name, value in fields.items() if name in applied
    }


@pytest.mark.engine
def test_temperature_zero_is_greedy_under_our_sampler_order(server: str) -> None:
    prompt = engine().tokenizer(server, KEY).encode(QUESTION, control=True)
    ours = generate(server, prompt, temperature=0.0, top_p=0.9, max_new_tokens=30)
    greedy = ask(
        server, "/completion", prompt=prompt, n_predict=30, samplers=["top_k"], top_k=1, return_tokens=True
    ).json()
    assert ours.output_ids == greedy["tokens"]


@pytest.mark.engine
def test_equal_launches_have_equal_manifests_without_secrets(server: str) -> None:
    first = engine().inspect(server, KEY)
    with running(engine()) as url:
        second = engine().inspect(url, KEY)
    assert fingerprint(first) == fingerprint(second)
    text = json.dumps(first)
    assert KEY not in text and server.rpartition(":")[2] not in text
    assert first["engine_version"].startswith("xllamacpp 20")
    assert (first["slots"], first["slot_context"], first["threads"]) == (2, 512, 1)


@pytest.mark.engine
def test_a_server_that_contradicts_the_config_stops_the_run(server: str) -> None:
    for model, message in [
        (msgspec.structs.replace(MODEL, quantisation="Q8_0"), r"model\.quantisation: .*Q4_1.*Q8_0"),
        (msgspec.structs.replace(MODEL, context=4096), r"model\.context: .*512.*4,096"),
    ]:
        with pytest.raises(EyasError, match=message):
            engine(model).inspect(server, KEY)
    with pytest.raises(EyasError, match=r"server\.api_key_env"):
        engine().inspect(server, "wrong")
