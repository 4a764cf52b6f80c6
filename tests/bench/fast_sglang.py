"""A server that costs almost nothing: SGLang's replies, made beforehand, over bare sockets.

`python fast_sglang.py MODEL TOKENS SECONDS`: TOKENS per reply, which comes SECONDS after its request. Makes the folder MODEL, a
tokenizer of 4,096 tokens trained on this project's documents, and prints its address. What it says of itself is what
the fake server of the tests says. On stdin's end it prints the most requests it ever had at once, and ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_sglang
import uvloop

REPLIES = 64
ROOT = Path(__file__).parent.parent.parent


def head(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)


class Answers:
    """What is sent back, by path."""

    def __init__(self, model: Path, tokens: int) -> None:
        options = fake_sglang.parse(["--model", str(model), "--pool", "100000000", "--context", "32768"])
        options.max_running = 100_000
        self.tokenizer = make_model(model)
        self.server = fake_sglang.Server(options)
        self.replies = itertools.cycle(
            [
                self._whole(self.generated(ids))
                for ids in itertools.islice(replies(self.tokenizer, tokens), REPLIES)
            ]
        )
        self.probe = self._whole(self.generated([300, fake_sglang.END]))
        self.infos = {
            b"/server_info": self._whole(self.server.server_info()),
            b"/model_info": self._whole(self.server.model_info()),
        }
        self.waiting = self.most = 0

    def generated(self, ids: list[int]) -> dict[str, Any]:
        finish = {"type": "stop", "matched": fake_sglang.END}
        reply = self.server.reply_of([1], [fake_sglang.END], finish, {"rid": "0" * 32})
        reply |= {"output_ids": ids, "text": self.tokenizer.decode(ids[:-1], skip_special_tokens=False)}
        reply["meta_info"]["completion_tokens"] = len(ids)
        return reply

    def loads(self) -> bytes:
        body = self.server.loads()
        body["loads"][0] |= {"num_running_reqs": self.waiting, "num_waiting_reqs": 0}
        return self._whole(body)

    @staticmethod
    def _whole(body: Any) -> bytes:
        # As compact as orjson makes it, which SGLang replies with (its Content-Length in the captures tells).
        raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        return head(raw) + raw


def documents() -> str:
    return "".join(
        path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("**/*.md")) if ".venv" not in path.parts
    )


def make_model(folder: Path) -> Any:
    """The tokenizer of a folder as fake_sglang.make_model makes it, but with words in its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    fake_sglang.make_model(folder)
    added = [*fake_sglang.CONTROL, *fake_sglang.MARKERS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=added, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents().splitlines(keepends=True), trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=text in fake_sglang.CONTROL, normalized=False) for text in added]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": tokenizer.get_vocab_size()}))
    return tokenizer


def replies(tokenizer: Any, tokens: int) -> Iterator[list[int]]:
    """Replies of `tokens` ids each: reasoning for two thirds, then an answer."""
    text = tokenizer.encode(documents()).ids
    close = tokenizer.encode("</think>").ids
    choose = random.Random(0)
    while True:
        at = choose.randrange(len(text) - tokens)
        words = text[at : at + tokens - len(close) - 1]
        cut = len(words) * 2 // 3
        if "\ufffd" in tokenizer.decode(words[:cut]) + tokenizer.decode(words[cut:]):
            continue  # cut inside a character, which no model does
        yield [*words[:cut], *close, *words[cut:], fake_sglang.END]


class Connection(asyncio.Protocol):
    def __init__(self, answers: Answers, seconds: float) -> None:
        self.answers, self.seconds = answers, seconds
        self.buffer = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        line, _, rest = self.buffer[:end].partition(b"\r\n")
        at = rest.lower().find(b"content-length:")
        length = int(rest[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        body = self.buffer[end + 4 :]
        if len(body) < length:
            return
        self.buffer = b""
        self.answer(line.split()[1].partition(b"?")[0], body)

    def answer(self, path: bytes, body: bytes) -> None:
        answers = self.answers
        if path == b"/generate":
            if b'"input_ids":[0]' in body:
                self.transport.write(answers.probe)
                return
            answers.waiting += 1
            answers.most = max(answers.most, answers.waiting)
            asyncio.get_running_loop().call_later(self.seconds, self.reply)
        elif path == b"/tokenize":
            ids = answers.tokenizer.encode(json.loads(body)["prompt"]).ids
            self.transport.write(answers._whole({"tokens": ids, "count": len(ids), "max_model_len": 32768}))
        elif path == b"/v1/loads":
            self.transport.write(answers.loads())
        elif path in answers.infos:
            self.transport.write(answers.infos[path])
        else:
            self.transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")

    def reply(self) -> None:
        self.answers.waiting -= 1
        self.transport.write(next(self.answers.replies))


async def main(model: Path, tokens: int, seconds: float) -> None:
    answers = Answers(model, tokens)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers, seconds), "127.0.0.1", 0, backlog=8192)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    ended = asyncio.Event()
    threading.Thread(
        target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(ended.set)), daemon=True
    ).start()
    await ended.wait()
    print(answers.most, flush=True)


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
