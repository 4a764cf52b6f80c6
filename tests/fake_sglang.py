"""A fast SGLang server for tests: real wire format, no model. Its agreement with real replies is tested in test_fake_sglang.py.

It speaks as 0.4.10, 0.5.5 or 0.5.23 does; what it says of itself is what those versions said (tests/data/sglang), with the
values that a test sets. The answer is a function of the prompt ids alone; delays are random. As on a real CPU server, an id
outside the vocabulary ends the whole process.

Every generation is recorded as it was at the socket, one JSON line each. Run as a program:
`python fake_sglang.py --model FOLDER --port 0`; `make_model(FOLDER)` makes the tokenizer that goes with it.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import hashlib
import json
import os
import random
import re
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

CAPTURES = Path(__file__).parent / "data" / "sglang"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>"]
END = 2
FIRST_BYTE = len(CONTROL) + len(MARKERS)
VOCABULARY = FIRST_BYTE + 256
FAULTS = ("500", "503", "429", "reset", "stall", "cut short", "slow")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
_ADDED = re.compile("(" + "|".join(re.escape(text) for text in [*CONTROL, *MARKERS]) + ")")
_KEYS = [
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "custom_params",
    "stream_interval",
    "logit_bias",
]


# --- the vocabulary ----------------------------------------------------------------------------------------------


def make_model(folder: Path) -> Path:
    """The folder of a model without weights: a tokenizer of single bytes, a chat template, the configs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    added = [*CONTROL, *MARKERS]
    vocabulary = {text: token for token, text in enumerate([*added, *_byte_characters()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=text in CONTROL, normalized=False) for text in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": CONTROL[END], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": VOCABULARY, "eos_token_id": END, "dtype": "bfloat16"})
    )
    return folder


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order (openai/gpt-2, src/encoder.py, bytes_to_unicode)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def encode(text: str) -> list[int]:
    """Ids of `text`; spelt control tokens and markers become those."""
    ids: list[int] = []
    for part in _ADDED.split(text):
        if part in CONTROL:
            ids.append(CONTROL.index(part))
        elif part in MARKERS:
            ids.append(len(CONTROL) + MARKERS.index(part))
        else:
            ids += [byte + FIRST_BYTE for byte in part.encode()]
    return ids


_PIECES = [b"", b"", b"", *(text.encode() for text in MARKERS), *(bytes([byte]) for byte in range(256))]
_LETTERS = bytes(FIRST_BYTE + ord("a") + byte % 26 for byte in range(256))  # their ids


def decode(ids: list[int]) -> str:
    """Text of ids without control tokens."""
    return b"".join(map(_PIECES.__getitem__, ids)).decode(errors="replace")


def answer(prompt: list[int], limit: int, never_close: bool = False, length: int = 0) -> list[int]:
    """A function of the ids: mostly well-formed, now and then unclosed, and of very different lengths, or of `length`."""
    digest = hashlib.sha256(msgspec.json.encode(prompt)).digest()
    order = random.Random(digest)
    close = "" if never_close or digest[0] < 20 else "\n</think>\n\n"
    tail = [*encode(f"{close}It is {digest.hex()[-6:]}"), END]
    if length:
        return [*order.randbytes(length - len(tail)).translate(_LETTERS), *tail][:limit]
    words = order.choices(
        ["so", "then", "thus", "hence", "and", "but", "é", "😀"], k=order.choice([1, 3, 9, 30])
    )
    return [*encode(f"Because {digest.hex()[:12]} {' '.join(words)}."), *tail][:limit]


# --- versions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dialect:
    """How a version speaks. prefix: of its captures. aborted_waiting, told_then: what it says of a request that never ran."""

    prefix: str
    server_info: str
    model_info: str
    loads: str
    tokenizes: bool
    seeded: bool
    strict: bool
    tells_ids: bool
    rids_unique: bool
    eos_before_length: bool
    total_may_fill_context: bool
    aborted_waiting: str
    told_then: tuple[str, ...]


NEW = Dialect(
    prefix="a",
    server_info="/server_info",
    model_info="/model_info",
    loads="/v1/loads",
    tokenizes=True,
    seeded=True,
    strict=True,
    tells_ids=True,
    rids_unique=True,
    eos_before_length=True,
    total_may_fill_context=True,
    aborted_waiting="Abort in waiting queue",
    told_then=("weight_version", "weight_versions", "e2e_latency", "response_sent_to_client_ts"),
)
MIDDLE = Dialect(
    prefix="mid055",
    server_info="/get_server_info",
    model_info="/get_model_info",
    loads="/get_load",
    tokenizes=False,
    seeded=True,
    strict=False,
    tells_ids=True,
    rids_unique=False,
    eos_before_length=False,
    total_may_fill_context=False,
    aborted_waiting="Abort in waiting queue",
    told_then=("response_sent_to_client_ts",),
)
OLD = Dialect(
    prefix="old0410",
    server_info="/get_server_info",
    model_info="/get_model_info",
    loads="/get_load",
    tokenizes=False,
    seeded=False,
    strict=False,
    tells_ids=False,
    rids_unique=False,
    eos_before_length=False,
    total_may_fill_context=False,
    aborted_waiting="Abort before prefill",
    told_then=("prompt_tokens",),
)
DIALECTS = {"0.5.23": NEW, "0.5.5": MIDDLE, "0.4.10": OLD}
_SERVER_INFO = {
    "a": "b_server_info_api_key",
    "mid055": "mid055_ep_get_server_info",
    "old0410": "old0410_ep_get_server_info",
}


def captured(name: str) -> Any:
    """The JSON body of a kept capture."""
    return json.loads((CAPTURES / f"{name}.json").read_text())["response"]["json"]


# --- the server --------------------------------------------------------------------------------------------------


class Refusal(Exception):
    """Arguments: status and body of the reply."""


def refused(message: str) -> Refusal:
    return Refusal(400, {"error": {"message": message}})


@dataclass
class Running:
    """A request on its way; `aborted` is set when it is aborted."""

    rid: str
    aborted: asyncio.Event
    started: bool = False


class Server:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.dialect = DIALECTS[options.version]
        self.random = random.Random(os.getpid() if options.seed is None else options.seed)
        self.slots = asyncio.Semaphore(options.max_running)
        self.live: list[Running] = []
        self.faults_shown = self.retracted = 0
        prefix = self.dialect.prefix
        self.reply = captured(f"{prefix}_generate_input_ids_length")
        self.loads_body = captured(f"{prefix}_ep_{'v1_loads' if prefix == 'a' else 'get_load'}")

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.check_key], client_max_size=1 << 26)
        router, dialect = app.router, self.dialect
        for path in ("/health", "/health_generate"):
            router.add_get(path, lambda _: web.Response())
        router.add_get(dialect.server_info, lambda _: _json(self.server_info()))
        router.add_get(dialect.model_info, lambda _: _json(self.model_info()))
        if dialect.prefix == "a":
            router.add_get("/get_server_info", lambda _: _json(self.server_info()))
            router.add_get("/get_model_info", lambda _: _json(self.model_info()))
        router.add_get(dialect.loads, lambda _: _json(self.loads()))
        if self.options.metrics:
            router.add_get("/metrics", lambda _: web.Response(text=self.metrics()))
        if dialect.tokenizes:
            router.add_post("/tokenize", self.tokenize)
        router.add_post("/generate", self.generate)
        router.add_post("/abort_request", self.abort)
        return app

    @web.middleware
    async def check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        key = os.environ.get("EYAS_API_KEY")
        open_paths = ("/health", "/health_generate", "/metrics")
        if key and request.path not in open_paths and request.headers.get("Authorization") != f"Bearer {key}":
            return _json({"error": "Unauthorized"}, 401)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _json({"detail": error.reason}, error.status)

    # --- what it says of itself ----------------------------------------------------------------------------------

    def server_info(self) -> dict[str, Any]:
        options = self.options
        info = captured(_SERVER_INFO[self.dialect.prefix])
        key = os.environ.get("EYAS_API_KEY")
        changed = {
            "model_path": str(options.model),
            "served_model_name": options.served_name or str(options.model),
            "revision": options.revision,
            "dtype": options.dtype,
            "kv_cache_dtype": options.kv_dtype,
            "quantization": options.quantisation,
            "context_length": options.context,
            "max_total_num_tokens": options.pool,
            "max_req_input_len": self.longest_prompt,
            "random_seed": random.getrandbits(30),
            "api_key": key,
            "admin_api_key": None,
            "launch_command": f"--api-key {key}",
            "preferred_sampling_params": options.preferred,
            "enable_metrics": options.metrics,
        }
        for state in info["internal_states"]:
            state |= {name: value for name, value in changed.items() if name in state}
            if "effective_max_running_requests_per_dp" in state:
                state["effective_max_running_requests_per_dp"] = options.max_running
        return info | {name: value for name, value in changed.items() if name in info}

    def model_info(self) -> dict[str, Any]:
        options = self.options
        info = captured(f"{self.dialect.prefix}_ep_{'' if self.dialect.prefix == 'a' else 'get_'}model_info")
        changed = {
            "model_path": str(options.model),
            "served_model_name": options.served_name or str(options.model),
            "tokenizer_path": str(options.model),
            "preferred_sampling_params": options.preferred,
            "weight_version": options.weight_version,
        }
        return info | {name: value for name, value in changed.items() if name in info}

    @property
    def longest_prompt(self) -> int:
        return min(self.options.context, self.options.pool) - 6

    @property
    def running(self) -> int:
        return sum(request.started for request in self.live)

    def loads(self) -> Any:
        body = copy.deepcopy(self.loads_body)
        waiting = len(self.live) - self.running
        if self.dialect.prefix == "a":
            usage = self.running / self.options.max_running
            body["loads"][0] |= {
                "num_running_reqs": self.running,
                "num_waiting_reqs": waiting,
                "token_usage": usage,
            }
        elif self.dialect.prefix == "mid055":
            body[0] |= {"num_reqs": len(self.live), "num_waiting_reqs": waiting}
        return body

    def metrics(self) -> str:
        labels = 'engine_type="unified",model_name="fake",pp_rank="0",tp_rank="0"'
        values = {
            "num_running_reqs": self.running,
            "num_queue_reqs": len(self.live) - self.running,
            "token_usage": self.running / self.options.max_running,
        }
        return "".join(
            f"# TYPE sglang:{name} gauge\nsglang:{name}{{{labels}}} {value:.1f}\n"
            for name, value in values.items()
        )

    async def tokenize(self, request: web.Request) -> web.Response:
        ids = encode((await request.json())["prompt"])
        return _json({"tokens": ids, "count": len(ids), "max_model_len": self.options.context})

    # --- generation ----------------------------------------------------------------------------------------------

    async def abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        for running in self.live:
            if body.get("abort_all") or running.rid.startswith(body.get("rid") or "\0"):
                running.aborted.set()
        return web.Response()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = self.read(await request.read())
        except Refusal as refusal:
            status, answer_ = refusal.args
            return _json(answer_, status) if status != 500 else _internal_error()
        prompt, sampling = body["input_ids"], body["sampling_params"]
        probe = sampling["max_new_tokens"] <= 32 and prompt == [0]
        if not probe and (fault := self.fault(prompt)):
            failed = await self.fail(fault, request)
            if failed is not None:
                return failed
        running = Running(body["rid"], asyncio.Event())
        self.live.append(running)
        try:
            return await self.answer(running, prompt, sampling, body, probe)
        finally:
            self.live.remove(running)

    def read(self, raw: bytes) -> dict[str, Any]:
        """The body of a request, checked as the server does it. Ends the process for an id that would crash a real one."""
        dialect, options = self.dialect, self.options
        try:
            body = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise Refusal(400, _bad_request(f"json_invalid: {error}")) from None
        if not isinstance(body, dict):
            raise Refusal(400, _bad_request("dataclass_type: Input should be a dictionary"))
        sampling = body.setdefault("sampling_params", {})
        body.setdefault("rid", uuid.uuid4().hex)
        known = [*_KEYS, "stop_regex", "sampling_seed"] if dialect.seeded else _KEYS
        for key in sampling:
            if key not in known:
                expected = ", ".join(f"`{name}`" for name in known)
                strict = {"error": f"unknown field `{key}`, expected one of {expected}"}
                raise Refusal(400, strict) if dialect.strict else Refusal(500, None)
        ids = body.get("input_ids")
        if ids is None:
            raise refused("Either text, input_ids or input_embeds should be provided.")
        if not ids:
            raise refused("input_ids cannot be empty.")
        limit = sampling.setdefault("max_new_tokens", 128)
        if len(ids) >= options.context:
            raise refused(
                f"The input ({len(ids)} tokens) is longer than the model's context length ({options.context} tokens)."
            )
        total = len(ids) + limit
        if total > options.context or (total == options.context and not dialect.total_may_fill_context):
            raise refused(
                f"Requested token count exceeds the model's maximum context length of {options.context} tokens. You "
                f"requested a total of {total} tokens: {len(ids)} tokens from the input messages and {limit} tokens for "
                f"the completion. Please reduce the number of tokens in the input messages or the completion to fit "
                f"within the limit."
            )
        if not 0 < (top_p := sampling.get("top_p", 1.0)) <= 1:
            raise refused(f"top_p must be in (0, 1], got {top_p}.")
        if min(ids) < 0 or max(ids) >= VOCABULARY:
            print("IndexError: index out of range in self", file=sys.stderr, flush=True)
            os._exit(1)
        if len(ids) >= self.longest_prompt:
            raise refused(
                f"Input length ({len(ids)} tokens) exceeds the maximum allowed length ({self.longest_prompt} tokens). "
                f"Use a shorter input or enable --allow-auto-truncate."
            )
        if dialect.rids_unique and any(running.rid == body["rid"] for running in self.live):
            raise refused(f"Duplicate request ID detected: {body['rid']}")
        if options.max_queued is not None and len(self.live) >= options.max_running + options.max_queued:
            raise Refusal(503, _unavailable("The request queue is full."))
        return body

    async def answer(
        self,
        running: Running,
        prompt: list[int],
        sampling: dict[str, Any],
        body: dict[str, Any],
        probe: bool,
    ) -> web.Response:
        options, dialect = self.options, self.dialect
        limit = min(sampling["max_new_tokens"], self.longest_prompt + 4 - len(prompt))
        tokens = answer(prompt, limit, options.never_close, options.tokens)
        ends = tokens[-1] == END and (dialect.eos_before_length or len(tokens) < limit)
        finish: dict[str, Any] = (
            {"type": "stop", "matched": END} if ends else {"type": "length", "length": limit}
        )
        if await _first(self.slots.acquire(), running.aborted):
            try:
                running.started = True
                slow = options.slow and options.slow in decode(prompt)
                delay = 1.0 if slow else self.random.random() * options.delay
                if not probe and await _aborted_within(delay, running.aborted):
                    finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                    tokens = tokens[: len(tokens) // 2]
                elif not probe:
                    self.record(prompt, tokens, body)
            finally:
                self.slots.release()
        else:
            finish, tokens = {"type": "abort", "message": dialect.aborted_waiting}, []
        return _json(self.reply_of(prompt, tokens, finish, body))

    def reply_of(
        self, prompt: list[int], tokens: list[int], finish: dict[str, Any], body: dict[str, Any]
    ) -> dict[str, Any]:
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        meta = {**self.reply["meta_info"], "id": body["rid"], "finish_reason": finish, **counts}
        if "weight_versions" in meta:
            meta["weight_version"] = self.options.weight_version
            meta["weight_versions"] = [
                {"version": self.options.weight_version, "start": 0, "end": len(tokens)}
            ]
        if not (started := finish.get("message") != self.dialect.aborted_waiting):
            kept = ("id", "finish_reason", "completion_tokens", *self.dialect.told_then)
            meta = {name: value for name, value in meta.items() if name in kept}
        if body.get("return_logprob") and started:
            meta["input_token_logprobs"] = [] if self.dialect is NEW else [[None, prompt[-1], None]]
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in tokens]
            if self.dialect is NEW:
                meta["output_token_logprobs_length"] = len(tokens)
        shown = tokens[:-1] if tokens and tokens[-1] == END else tokens
        return {
            "text": decode(shown),
            **({"output_ids": tokens} if self.dialect.tells_ids else {}),
            "meta_info": meta,
        }

    def fault(self, prompt: list[int]) -> str | None:
        """The fault to show now: a scripted one for a text, or one of a seeded draw, each kind in turn."""
        if self.options.fail_always and self.options.fail_always in decode(prompt):
            return "500"
        if self.random.random() >= self.options.faults:
            return None
        self.faults_shown += 1
        return FAULTS[self.faults_shown % len(FAULTS)]

    async def fail(self, fault: str, request: web.Request) -> web.StreamResponse | None:
        """The failure, or nothing for a reply that is only slow."""
        if self.options.fault_log:
            with self.options.fault_log.open("a") as file:
                file.write(fault + "\n")
        if fault == "500":
            return _internal_error()
        if fault.isdigit():
            return _json(_unavailable("The request queue is full.", fault), int(fault))
        if fault == "slow":
            await asyncio.sleep(1.0)
            return None
        if fault == "stall":
            await asyncio.sleep(3600)
        assert request.transport is not None
        if fault == "cut short":
            request.transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
                b'{"text":"Because","output_ids":[66, 101'
            )
            await asyncio.sleep(0.05)
        request.transport.abort()
        return web.Response()

    def record(self, prompt: list[int], tokens: list[int], body: dict[str, Any]) -> None:
        if self.options.record is None:
            return
        sampling = body["sampling_params"]
        line = {
            "rid": body["rid"],
            "prompt": prompt,
            "tokens": tokens,
            "sampling": sampling,
            "seed": sampling.get("sampling_seed"),
            "temperature": sampling.get("temperature"),
            "in_flight": self.running,
            "waiting": len(self.live) - self.running,
            "time": time.time(),
        }
        with self.options.record.open("a") as file:
            file.write(json.dumps(line) + "\n")


async def _first(wanted: Any, aborted: asyncio.Event) -> bool:
    """Whether `wanted` came before the request was aborted."""
    task, stop = asyncio.ensure_future(wanted), asyncio.ensure_future(aborted.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        stop.cancel()
        if not task.done():
            task.cancel()


async def _aborted_within(delay: float, aborted: asyncio.Event) -> bool:
    try:
        await asyncio.wait_for(aborted.wait(), delay)
    except TimeoutError:
        return False
    return True


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _internal_error() -> web.Response:
    return web.Response(status=500, text="Internal Server Error")


def _bad_request(message: str) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}


def _unavailable(message: str, code: str = "503") -> dict[str, Any]:
    return {"object": "error", "message": message, "type": code, "param": None, "code": int(code)}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=Path("fake"), help="what it says that it serves")
    parser.add_argument("--version", choices=DIALECTS, default="0.5.23", help="whose dialect it speaks")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--pool", type=int, default=1 << 20, help="tokens of KV cache")
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--max-queued", type=int, help="beyond it requests get HTTP 503")
    parser.add_argument("--delay", type=float, default=0.0, help="longest answer time in s")
    parser.add_argument(
        "--tokens", type=int, default=0, help="length of every answer; 0 for very different ones"
    )
    parser.add_argument("--load", type=float, default=0.0, help="time to load in s")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--never-close", action="store_true", help="no answer closes its reasoning")
    parser.add_argument("--slow", help="prompts with this text take 1 s")
    parser.add_argument("--fail-always", help="prompts with this text get HTTP 500")
    parser.add_argument(
        "--faults", type=float, default=0.0, help="share of generations that fail in some way"
    )
    parser.add_argument("--fault-log", type=Path, help="one line for each fault shown")
    parser.add_argument("--seed", type=int, help="of the delays and faults")
    parser.add_argument("--metrics", action="store_true", help="/metrics is there")
    parser.add_argument("--served-name", help="what it says that the model is called")
    parser.add_argument("--revision", help="… its revision")
    parser.add_argument("--quantisation", help="… its quantisation")
    parser.add_argument("--dtype", default="auto", help="… the format of its weights")
    parser.add_argument("--kv-dtype", default="auto", help="… of its KV cache")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--preferred", type=json.loads, help="its --preferred-sampling-params")
    return parser.parse_args(arguments)


async def serve(options: argparse.Namespace) -> None:
    runner = web.AppRunner(Server(options).app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, options.host, options.port)
    await site.start()
    print(f"http://{options.host}:{runner.addresses[0][1]}", flush=True)
    # The end of stdin means that whoever started this is gone.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    time.sleep(given.load)
    asyncio.run(serve(given))
