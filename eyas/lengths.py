"""Token ids as arrays, and how many characters of a text each token completes."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[tuple[int], np.dtype[Any]]
NOTHING = "0"  # spells that a token completes no character


def places(ids: Sequence[int] | Array) -> Array:
    """`ids` for numpy, shape [tokens]; a third of the time that np.array takes. Raises IndexError for what is no id."""
    if isinstance(ids, np.ndarray):
        return ids
    try:
        return np.frombuffer(array.array("I", ids), np.uint32)
    except (OverflowError, TypeError):
        raise IndexError("id outside the vocabulary") from None


def spell(counts: Sequence[int] | Array) -> str:
    """How many characters each token completes, shape [tokens], as one character each: "0" for none, "4" for four, ":" for ten.

    A journal holds as many of these as tokens, and numbers would take twice the room.
    """
    codes = np.asarray(counts, np.uint32) + ord(NOTHING)
    if codes.size and codes.max() < 0x80:
        return codes.astype(np.uint8).tobytes().decode("ascii")
    return codes.tobytes().decode("utf-32-le")


def ends_of(lengths: str) -> Array:
    """How many characters of the text are complete after each token, shape [tokens], from what `spell` made of them."""
    if lengths.isascii():
        codes: Array = np.frombuffer(lengths.encode(), np.uint8)
    else:
        codes = np.frombuffer(lengths.encode("utf-32-le"), np.uint32)
    return (codes - ord(NOTHING)).cumsum(dtype=np.int64)
