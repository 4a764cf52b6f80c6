"""Responses for tests, made from the bytes of their tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from eyas.records import Finish, Response

END = 2  # the stop id, and one of the control ids
CONTROL = [0, 1, END]


def decode(tokens: Sequence[bytes]) -> tuple[str, list[int]]:
    """Text of byte tokens, and after each how many of its characters are complete: the definition, token by token."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, ends = "", []
    for token in tokens:
        text += decoder.decode(token)
        ends.append(len(text))
    return text + decoder.decode(b"", final=True), ends


def response(tokens: Sequence[str | bytes], *, cut: bool = False, **fields: Any) -> Response:
    """A response of these tokens, ended by the stop id unless it is cut at the limit. Equal tokens have equal ids."""
    pieces = [token.encode() if isinstance(token, str) else token for token in tokens]
    text, ends = decode(pieces)
    numbers: dict[bytes, int] = {}
    ids = [numbers.setdefault(piece, 100 + len(numbers)) for piece in pieces]
    if not cut:
        ids.append(END)
        ends.append(len(text))
    made: dict[str, Any] = {
        "request": "0" * 64,
        "prompt_ids": [1, 50, 51],
        "output_ids": ids,
        "finish": Finish(type="length") if cut else Finish(type="stop", matched=END),
        "text": text,
        "text_ends": ends,
        "stop_ids": [END],
        "control_ids": CONTROL,
        "effective_max_new": 4096,
        "constrained": False,
        "key": "k",
        "turn": 0,
        "sample": 0,
    }
    return Response(**(made | fields))
