"""A fast llama.cpp server for tests: real wire format, no model. Its agreement with real replies is tested in test_fake_llamacpp.py.

The answer is a function of the prompt ids alone; delays are random. Every generation is recorded as it was at the
socket: one JSON line of {prompt, tokens, seed}. Run as a program: `python fake_llamacpp.py --model tiny.gguf --port 0`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 2
FAULTS = ("500", "503", "429", "reset", "stall", "cut short", "not json")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Fields of a request that the reply's generation_settings do not repeat.
NO_SETTINGS = ("prompt", "response_fields", "return_tokens", "cache_prompt")
_CONTROL = re.compile("(" + "|".join(re.escape(text) for text in CONTROL) + ")")


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order (openai/gpt-2, src/encoder.py, bytes_to_unicode)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def make_model(path: Path, parts: int = 0, template: str = TEMPLATE) -> Path:
    """A GGUF file with a byte vocabulary, a chat template and one weight. parts: files of the model; 0: not split."""
    import numpy as np
    from gguf import GGUFWriter, TokenType

    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*CONTROL, *_byte_characters()])
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 256)
    writer.add_eos_token_id(END)
    writer.add_chat_template(template)
    writer.add_uint16("split.count", parts)
    writer.add_tensor("weight", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encode(text: str, special: bool = True) -> list[int]:
    ids: list[int] = []
    for part in _CONTROL.split(text) if special else [text]:
        if special and part in CONTROL:
            ids.append(CONTROL.index(part))
        else:
            ids += [byte + 3 for byte in part.encode()]
    return ids


def piece(token: int) -> str | list[int]:
    """What a token stands for; bytes where that is no whole text."""
    if token < len(CONTROL):
        return CONTROL[token]
    byte = token - 3
    return chr(byte) if byte < 128 else [byte]


def decode(ids: list[int]) -> str:
    return bytes(token - 3 for token in ids if token > 2).decode(errors="replace")


def answer(prompt: list[int], limit: int, never_close: bool = False) -> list[int]:
    """A function of the ids: mostly well-formed, now and then unclosed, and of very different lengths."""
    digest = hashlib.sha256(json.dumps(prompt).encode()).digest()
    order = random.Random(digest)
    words = [
        order.choice(["so", "then", "thus", "hence", "and", "but", "é", "😀"])
        for _ in range(order.choice([1, 3, 9, 30]))
    ]
    body = f"Because {digest.hex()[:12]} {' '.join(words)}."
    close = "" if never_close or digest[0] < 20 else "\n</think>\n\n"
    return [*encode(body + close + f"It is {digest.hex()[-6:]}", special=False), END][:limit]


class Server:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.random = random.Random(os.getpid() if options.seed is None else options.seed)
        self.slots = asyncio.Semaphore(options.slots)
        self.in_flight = self.faults_shown = 0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.check_key], client_max_size=1 << 26)
        app.router.add_get("/health", lambda _: _json({"status": "ok"}))
        app.router.add_get("/props", self.props)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/completion", self.completion)
        return app

    @web.middleware
    async def check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        key = os.environ.get("EYAS_API_KEY")
        if key and request.path != "/health" and request.headers.get("Authorization") != f"Bearer {key}":
            return _error(401, "Invalid API Key", "authentication_error")
        return await handler(request)

    async def props(self, _request: web.Request) -> web.Response:
        return _json(
            {
                "default_generation_settings": {"params": {}, "n_ctx": self.options.context},
                "total_slots": self.options.slots,
                "model_ftype": self.options.quantisation,
                "model_path": str(self.options.model),
                "build_info": "b0-fake",
            }
        )

    async def models(self, _request: web.Request) -> web.Response:
        meta = {
            "vocab_type": 2,
            "n_vocab": 259,
            "n_params": self.options.parameters,
            "size": 4 * self.options.parameters,
            "ftype": "Q4_1",
        }
        return _json(
            {"object": "list", "data": [{"id": "fake", "object": "model", "tags": [], "meta": meta}]}
        )

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.options.fail_encoding and self.options.fail_encoding in body["content"]:
            return web.Response(status=500, text="fault")
        ids = encode(body["content"], body.get("parse_special", True))
        if body.get("with_pieces"):
            return _json({"tokens": [{"id": token, "piece": piece(token)} for token in ids]})
        return _json({"tokens": ids})

    async def completion(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt, limit = body["prompt"], body["n_predict"]
        if not prompt:
            return _error(400, '"prompt" must not be empty', "invalid_request_error")
        if not all(0 <= token < 259 for token in prompt):
            return _error(400, "Prompt contains invalid tokens", "invalid_request_error")
        if len(prompt) >= self.options.context:
            return _error(
                400,
                f"request ({len(prompt)} tokens) exceeds the available context size ({self.options.context} tokens), try increasing it",
                "exceed_context_size_error",
                n_prompt_tokens=len(prompt),
                n_ctx=self.options.context,
            )
        room = min(limit, self.options.context - len(prompt))
        asked = [*prompt, body.get("seed", -1)] if self.options.by_seed else prompt
        tokens = self.scripted(prompt)[:room] or answer(asked, room, self.options.never_close)
        if limit > 1:
            if fault := self.fault(prompt):
                return await self.fail(fault, request)
            self.in_flight += 1
            try:
                async with self.slots:
                    slow = self.options.slow and self.options.slow in decode(prompt)
                    await asyncio.sleep(
                        self.options.slow_for if slow else self.random.random() * self.options.delay
                    )
                    self.record(prompt, tokens, body)
            finally:
                self.in_flight -= 1
        settings = {name: value for name, value in body.items() if name not in NO_SETTINGS}
        settings["logit_bias"] = [{"bias": None, "token": END}] if body.get("ignore_eos") else []
        reply = {
            "index": 0,
            "content": decode(tokens),
            "tokens": tokens,
            "stop": True,
            "model": str(self.options.model),
            "tokens_predicted": len(tokens),
            "tokens_evaluated": len(prompt),
            "generation_settings": settings,
            "truncated": False,
            "stop_type": "eos" if tokens[-1] == END else "limit",
            "stopping_word": "",
        }
        fields = body.get("response_fields")
        return _json({name: reply[name] for name in fields} if fields else reply)

    def scripted(self, prompt: list[int]) -> list[int]:
        """The reply that --replies has for the text that stands last in the prompt; nothing if it has none."""
        if self.options.replies is None:
            return []
        text, replies = decode(prompt), json.loads(self.options.replies.read_text())
        last = max(replies, key=text.rfind)
        return [*encode(replies[last], special=False), END] if last in text else []

    def fault(self, prompt: list[int]) -> str | None:
        """The fault to show now: a scripted one for a text, or one of a seeded draw, each kind in turn."""
        if self.options.fail_always and self.options.fail_always in decode(prompt):
            return "500"
        if self.random.random() >= self.options.faults:
            return None
        self.faults_shown += 1
        return FAULTS[self.faults_shown % len(FAULTS)]

    async def fail(self, fault: str, request: web.Request) -> web.StreamResponse:
        if self.options.fault_log:
            with self.options.fault_log.open("a") as file:
                file.write(fault + "\n")
        if fault.isdigit():
            return web.Response(status=int(fault), text="fault")
        if fault == "stall":
            await asyncio.sleep(3600)
        if fault == "not json":
            return web.Response(text="<html>", content_type="application/json")
        assert request.transport is not None
        if fault == "cut short":
            request.transport.write(b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"tokens": [1, 2')
            await asyncio.sleep(0.05)
        request.transport.abort()
        return web.Response()

    def record(self, prompt: list[int], tokens: list[int], body: dict[str, Any]) -> None:
        if self.options.record is None:
            return
        line = json.dumps(
            {
                "prompt": prompt,
                "tokens": tokens,
                "seed": body["seed"],
                "temperature": body["temperature"],
                "in_flight": self.in_flight,
                "time": time.time(),
            }
        )
        with self.options.record.open("a") as file:
            file.write(line + "\n")


def _json(value: Any) -> web.Response:
    return web.json_response(value)


def _error(status: int, message: str, kind: str, **details: int) -> web.Response:
    error = {"code": status, "message": message, "type": kind, **details}
    return web.json_response({"error": error}, status=status)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--delay", type=float, default=0.0, help="longest answer time in s")
    parser.add_argument("--load", type=float, default=0.0, help="time to load in s")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--never-close", action="store_true", help="no answer closes its reasoning")
    parser.add_argument("--replies", type=Path, help="JSON: what to answer, by a text in the prompt")
    parser.add_argument("--slow", help="prompts with this text take --slow-for")
    parser.add_argument("--slow-for", type=float, default=1.0, help="seconds")
    parser.add_argument("--fail-always", help="prompts with this text get HTTP 500")
    parser.add_argument("--fail-encoding", help="text with this in it is not tokenized but gets HTTP 500")
    parser.add_argument(
        "--faults", type=float, default=0.0, help="share of generations that fail in some way"
    )
    parser.add_argument("--fault-log", type=Path, help="one line for each fault shown")
    parser.add_argument("--by-seed", action="store_true", help="another seed gives another answer")
    parser.add_argument("--seed", type=int, help="of the delays and faults")
    parser.add_argument("--quantisation", default="Q4_1", help="what the server says that it holds")
    parser.add_argument("--parameters", type=int, default=1, help="size of the model that it holds")
    return parser.parse_args(arguments)


async def serve(options: argparse.Namespace) -> None:
    runner = web.AppRunner(Server(options).app(), access_log=None)
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
