"""Token ids for numpy, and how many characters of a text each token completes."""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import msgspec
import numpy as np
from simdjson import Array as JsonArray
from simdjson import Parser

Array = np.ndarray[tuple[int], np.dtype[Any]]
ID_END = 1 << 31  # what servers and trainers hold ids in has 32 bits
NOTHING = "0"  # spells that a token completes no character


class Ids(Sequence[int]):
    """Token ids as a server told them in JSON, in an array: a Python number each would take longer than all else that is done
    with them. Equal to the list of them; a slice is a list.

    array: shape [tokens], int64. json: as it was told, on one line.
    """

    __slots__ = ("array", "json")

    def __init__(self, json: bytes) -> None:
        """json: valid. Raises ValueError if it is no array of ids."""
        try:
            # A parser holds what it parsed last, so each has its own.
            parsed = Parser().parse(json)
            # It would flatten arrays inside.
            if not isinstance(parsed, JsonArray) or json.rfind(b"[") != json.find(b"["):
                raise TypeError
            told = np.frombuffer(parsed.as_buffer(of_type="u"), np.uint64)
            if told.size and told[told.argmax()] >= ID_END:
                raise TypeError
        except (ValueError, TypeError, RuntimeError):  # the last for numbers beyond 64 bits
            raise ValueError("no array of token ids") from None
        self.array: Array = told.view(np.int64)
        self.json = json if b"\n" not in json else msgspec.json.format(json, indent=-1)  # a line in a journal

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        found: int | list[int] = self.array[at].tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __add__(self, more: list[int]) -> list[int]:
        return self[:] + more

    def __radd__(self, others: list[int]) -> list[int]:
        return others + self[:]

    def __eq__(self, other: object) -> bool:
        return self[:] == (other[:] if isinstance(other, Ids) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])


def places(ids: Sequence[int] | Array) -> Array:
    """`ids` for numpy, shape [tokens]; a third of the time that np.array takes. Raises IndexError for what is no id."""
    if isinstance(ids, np.ndarray):
        return ids
    if isinstance(ids, Ids):
        return ids.array
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
    counts = codes.astype(np.int64)
    counts -= ord(NOTHING)
    return np.add.accumulate(counts, out=counts)
