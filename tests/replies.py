"""Responses for tests, made from the bytes of their tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from helpers import lengths_of

from eyas.records import Finish, Response

END = 2  # the stop id, and one of the control ids
CONTROL = [0, 1, END]
FIRST_ADDED, FIRST_ORDINARY = 50, 1000  # ids from here on


class Own(str):
    """A token of the tokenizer's own, with an id that no ordinary token of the same text has."""


def decode(tokens: Sequence[bytes]) -> tuple[str, list[int]]:
    """Text of byte tokens, and after each how many of its characters are complete: the definition, token by token."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, ends = "", []
    for token in tokens:
        text += decoder.decode(token)
        ends.append(len(text))
    return text + decoder.decode(b"", final=True), ends


def response(
    tokens: Sequence[str | bytes],
    *,
    prompt: Sequence[str | bytes] = ("Hi", "?"),
    cut: bool = False,
    **fields: Any,
) -> Response:
    """A response of these tokens, ended by the stop id unless it is cut at the limit. Equal tokens have equal ids."""
    numbers: dict[bytes, int] = {}
    added: dict[str, int] = {}

    def number(token: str | bytes) -> int:
        if isinstance(token, Own):
            return added.setdefault(str(token), FIRST_ADDED + len(added))
        return numbers.setdefault(_bytes(token), FIRST_ORDINARY + len(numbers))

    text, ends = decode([_bytes(token) for token in tokens])
    ids = [number(token) for token in tokens]
    if not cut:
        ids.append(END)
        ends.append(len(text))
    made: dict[str, Any] = {
        "request": "0" * 64,
        "prompt_ids": [1, *map(number, prompt)],
        "output_ids": ids,
        "finish": Finish(type="length") if cut else Finish(type="stop", matched=END),
        "text": text,
        "text_lengths": lengths_of(ends),
        "stop_ids": [END],
        "control_ids": CONTROL,
        "added_tokens": added,
        "effective_max_new": 4096,
        "constrained": False,
        "key": "k",
        "turn": 0,
        "sample": 0,
    }
    return Response(**(made | fields))


def _bytes(token: str | bytes) -> bytes:
    return token if isinstance(token, bytes) else token.encode()
