"""What a prompt costs on its way to ids and an answer on its way to text, against the bare library calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from helpers import prompt
from real_tokenizers import folder
from tokenizers import Tokenizer

from eyas.config import ModelConfig
from eyas.render import Renderer
from eyas.tokenizer import load_tokenizer

QUESTION = "Why is the sky blue in the day, red at dusk and black at night? " * 19  # about 300 tokens
ANSWER = 1_400  # ids


def microseconds(call: Callable[[], object], rounds: int) -> float:
    """CPU time of one call, the best of five tries."""
    best = float("inf")
    for _ in range(5):
        started = time.thread_time()
        for _ in range(rounds):
            call()
        best = min(best, (time.thread_time() - started) / rounds)
    return best * 1e6


def test_render(full: bool, benchmark: Any, tell: Callable[..., None]) -> None:
    model = ModelConfig(id="m", tokenizer=str(folder("qwen3")))
    tokenizer = load_tokenizer(model)
    tokenizer.speed_up()
    library = Tokenizer.from_file(str(folder("qwen3") / "tokenizer.json"))
    renderer, asked = Renderer(model, tokenizer, ""), prompt("k", QUESTION)
    text = tokenizer.decode(renderer.render(asked))[0]
    rounds = 300 if full else 1
    ours = microseconds(lambda: renderer.render(asked), rounds)
    theirs = microseconds(lambda: library.encode(text, add_special_tokens=False).ids, rounds)
    benchmark.pedantic(renderer.render, args=(asked,), rounds=1)
    tell("render 300 tokens", ratio=ours / theirs, us=ours, library_us=theirs)


def test_decode(full: bool, benchmark: Any, tell: Callable[..., None]) -> None:
    tokenizer = load_tokenizer(ModelConfig(id="m", tokenizer=str(folder("qwen3"))))
    ids = (tokenizer.encode(QUESTION, control=False) * 10)[:ANSWER]
    emoji = [*ids, *tokenizer.encode("🫠", control=False)]
    pieces = [tokenizer.decode([token])[0] for token in range(tokenizer.vocabulary_size)]
    rounds = 300 if full else 1
    ours = microseconds(lambda: tokenizer.decode(ids), rounds)
    mixed = microseconds(lambda: tokenizer.decode(emoji), rounds)
    theirs = microseconds(lambda: "".join([pieces[token] for token in ids]), rounds)
    benchmark.pedantic(tokenizer.decode, args=(ids,), rounds=1)
    tell("decode 1,400 ids", ratio=ours / theirs, us=ours, with_an_emoji_us=mixed, plain_join_us=theirs)
