"""Small makers of records for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import zstandard

from eyas.journal import Answered, AnyEntry
from eyas.lengths import spell
from eyas.records import Delivery, Finish, Message, Origin, Prompt, Reply, Response


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def lengths_of(text_ends: Sequence[int]) -> str:
    """Reply.text_lengths from how many characters are complete after each token."""
    return spell(np.diff(text_ends, prepend=0))


def reply(name: str = "a", **changes: Any) -> Reply:
    """A well-formed reply of the tags format: two tokens of reasoning, a close, an answer, an end token."""
    fields: dict[str, Any] = {
        "request": digest(name),
        "prompt_ids": [1, 5, 6],
        "output_ids": [10, 11, 12, 13, 2],
        "finish": Finish(type="stop", matched=2),
        "text": "Why? </think> Yes",
        "text_lengths": lengths_of([4, 5, 13, 17, 17]),
        "stop_ids": [2],
        "control_ids": [1, 2],
        "added_tokens": {},
        "effective_max_new": 64,
        "constrained": False,
    }
    return Reply(**{**fields, **changes})


def response(key: str = "k", sample: int = 0, **changes: Any) -> Response:
    made = reply(**changes)
    return Response(
        key=key, turn=0, sample=sample, **{name: getattr(made, name) for name in made.__struct_fields__}
    )


def answered(name: str = "a", **changes: Any) -> Answered:
    delivery = Delivery(attempt=1, server=digest("server"), started=1.0, finished=2.5, usage={})
    return Answered(reply=reply(name, **changes), delivery=delivery)


def prompt(key: str, text: str = "Hello?", **changes: Any) -> Prompt:
    fields: dict[str, Any] = {
        "key": key,
        "messages": [Message(role="user", content=text)],
        "turns": [],
        "tools": [],
        "origin": Origin(source="text", revision=None, file="data.jsonl", row=1),
        "occurrence": 0,
        "group": digest(text)[:16],
    }
    return Prompt(**{**fields, **changes})


def journal_entries(segment: bytes) -> Iterator[AnyEntry]:
    """The entries in the bytes of a journal segment, read without Eyas' own reader."""
    lines = zstandard.ZstdDecompressor().stream_reader(segment, read_across_frames=True).read()
    for line in lines.splitlines():
        yield msgspec.json.decode(line, type=AnyEntry)
