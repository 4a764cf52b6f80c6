"""Synthetic responses for benchmarks: lengths, ids and texts as real ones have them, in any number and flat memory.

A pool of 2,000 answers is drawn once; response n is answer n mod 2,000 under a prompt of its own. The pool is 10 MB of
JSON, so its repetition lies outside every compression window (2 MiB at level 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import msgspec
import numpy as np

from eyas.config import GenerateSettings, ModelConfig, SamplingConfig, TrainSettings, ValidateSettings
from eyas.journal import Answered, Rendered
from eyas.lengths import spell
from eyas.plugins import registry
from eyas.records import Delivery, Finish, Message, Origin, Prompt, Reply, Response
from eyas.render import render_hash, render_identity
from eyas.request import Hasher
from eyas.units import place

POOL = 2_000
VOCABULARY = 150_000
STOP, CLOSE = VOCABULARY - 1, VOCABULARY - 2
ADDED = {"</think>": CLOSE, "<|im_end|>": STOP}
LIMIT = 8_192  # max_new_tokens
SERVER = "0" * 32
DATASET = "synthetic"

MODEL = ModelConfig(
    id="synthetic",
    context=32_768,
    reasoning={
        "name": "tags",
        "open": "<think>",
        "close": "</think>",
        "opened_by_prompt": True,
        "prefill": "",
        "implicit_closers": [],
        "single_token": True,
    },
)
GENERATE = GenerateSettings(
    dataset=DATASET,
    model=MODEL,
    sampling=SamplingConfig(max_new_tokens=LIMIT),
    turns="first",
    samples=1,
    reasoning_required=True,
    budget_tokens=None,
    checks=None,
)
VALIDATE = ValidateSettings(
    dataset=DATASET,
    reasoning=MODEL.reasoning,
    # All checks with their own policies and options.
    checks={
        found.cls.name: {"policy": found.cls.default_policy, **msgspec.to_builtins(found.cls.Options())}  # type: ignore[attr-defined]
        for found in registry().all()
        if found.kind == "check"
    },
)
TRAIN = TrainSettings(dataset=DATASET)


@dataclass(frozen=True)
class Answer:
    """One answer of the pool, with the prompt text and ids that it is asked under."""

    prompt: str
    prompt_ids: list[int]
    output_ids: list[int]
    finish: Finish
    text: str
    text_lengths: str


def _pieces(random: np.random.Generator) -> list[str]:
    """Texts of all ids: 4.2 characters on average, a space before most, one in fifty outside ASCII."""
    letters = np.array(list("etaoinshrdlucmfwygpbvk"))
    lengths = random.poisson(2.4, VOCABULARY) + 1
    drawn = "".join(letters[np.minimum(random.geometric(0.12, int(lengths.sum())), len(letters)) - 1])
    ends = np.cumsum(lengths)
    pieces = [drawn[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
    pieces = [f" {piece}" if at % 5 else piece for at, piece in enumerate(pieces)]
    for at in range(2_000, VOCABULARY, 50):
        pieces[at] = " “" + pieces[at].strip() + "é”"
    pieces[CLOSE] = "</think>"
    return pieces


@cache
def pool(size: int, tokens: int | None = None) -> list[Answer]:
    """The answers. Outputs have 350 tokens on average and up to 8,192, or `tokens` each; prompts 180. 98 % close their reasoning."""
    random = np.random.default_rng(7)
    pieces = _pieces(random)
    # Word frequencies: the r-th most frequent id is drawn with probability ~ 1/r.
    weights = 1 / np.arange(3, VOCABULARY - 32 + 3)
    reach = np.cumsum(weights / weights.sum())

    def draw(count: int) -> list[int]:
        return np.searchsorted(reach, random.random(count)).tolist()

    def length(median: float, sigma: float, most: int) -> int:
        return min(most, int(random.lognormal(np.log(median), sigma)) + 4)

    answers = []
    for _ in range(size):
        prompt_ids = draw(length(130, 0.8, 4_096))
        ids = draw(length(200, 1.0, LIMIT) if tokens is None else tokens - 1)
        if random.random() < 0.98:
            ids[int(len(ids) * random.uniform(0.3, 0.9))] = CLOSE
        cut = len(ids) >= LIMIT or random.random() < 0.02
        text = "".join(pieces[token] for token in ids)
        ends = np.cumsum([len(pieces[token]) for token in ids]).tolist()
        if not cut:
            ids, ends = [*ids, STOP], [*ends, ends[-1]]
        answers.append(
            Answer(
                prompt="".join(pieces[token] for token in prompt_ids),
                prompt_ids=prompt_ids,
                output_ids=ids,
                finish=Finish(type="length") if cut else Finish(type="stop", matched=STOP),
                text=text,
                text_lengths=spell(np.diff(ends, prepend=0)),
            )
        )
    return answers


def key(n: int) -> str:
    """Of the n-th prompt, from 0."""
    return f"{n:016x}-0"


def prompts(count: int) -> Iterator[Prompt]:
    """`count` different prompts, in the fixed order."""
    for n, answer in zip(range(count), _endless(count), strict=False):
        yield Prompt(
            key=key(n),
            messages=[Message(role="user", content=f"{n}{answer.prompt}")],
            turns=[],
            tools=[],
            origin=Origin(source="chat", revision=None, file="data.jsonl", row=n + 1),
            occurrence=0,
            group=f"{n:016x}",
        )


def entries(count: int) -> Iterator[Rendered | Answered]:
    """What `generate` journals for `prompts(count)`: a rendering and an answer each."""
    identity = render_identity(MODEL, "")
    hasher = Hasher(MODEL, GENERATE.sampling)
    for n, (prompt, answer) in enumerate(zip(prompts(count), _endless(count), strict=False)):
        ids = [n % VOCABULARY, *answer.prompt_ids]
        yield Rendered(render=render_hash(prompt, identity), ids=ids, refusal=None)
        reply = Reply(
            request=hasher.hash(ids, 0, 0),
            prompt_ids=ids,
            output_ids=answer.output_ids,
            finish=answer.finish,
            text=answer.text,
            text_lengths=answer.text_lengths,
            stop_ids=[STOP],
            added_tokens=ADDED,
            control_ids=[STOP],
            effective_max_new=LIMIT,
            constrained=False,
        )
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(answer.output_ids)}
        delivery = Delivery(attempt=1, server=SERVER, started=float(n), finished=n + 0.5, usage=usage)
        yield Answered(reply=reply, delivery=delivery)


def _endless(count: int) -> Iterator[Answer]:
    while True:
        yield from pool(min(count, POOL))


def responses(count: int) -> Iterator[Response]:
    """What `generate` writes for `prompts(count)`."""
    answers = (entry.reply for entry in entries(count) if isinstance(entry, Answered))
    return (place(reply, prompt.key, 0, 0) for prompt, reply in zip(prompts(count), answers, strict=True))
