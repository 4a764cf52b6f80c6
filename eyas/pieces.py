"""Ids → text, byte for byte, and how much of the text is complete after each id.

A token's bytes need not be whole characters: an emoji may come as three tokens. Answers are decoded on the event loop, so
the usual case goes without a loop over tokens: 1,400 ids take about 65 µs (tests/bench/test_encoding.py).
"""

from __future__ import annotations

import array
import codecs
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def _byte_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others are moved up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


_BYTE_OF = _byte_characters()


def byte_level(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary; one that is not spelt in its characters is itself."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


class Pieces:
    """The bytes of every id of a vocabulary. `stop_ids` end an answer and are no text there."""

    def __init__(self, pieces: Sequence[bytes], stop_ids: Iterable[int]) -> None:
        self._pieces = pieces
        self._stops = frozenset(stop_ids)
        # None, which does not join, for a token that is no whole characters.
        self._texts = [_whole(piece) for piece in pieces]
        self._characters = np.array([len(text or "") for text in self._texts], np.int64)
        self._sizes = np.array([len(piece) for piece in pieces], np.int64)

    def __len__(self) -> int:
        return len(self._pieces)

    def decode(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Text without an end token at the very end, and for each id how many characters are complete after it.

        Bytes that are no UTF-8 become U+FFFD. Raises IndexError for an id that the vocabulary does not have.
        """
        body = ids[:-1] if ids and ids[-1] in self._stops else ids
        if not body:
            return "", [0] * len(ids)
        try:
            places = np.frombuffer(array.array("I", body), np.uint32)
        except (OverflowError, TypeError):
            raise IndexError("id outside the vocabulary") from None
        try:
            text = "".join(_pick(self._texts, body))  # type: ignore[arg-type]
            ends = self._characters.take(places).cumsum().tolist()
        except TypeError:
            data = b"".join(_pick(self._pieces, body))
            try:
                text = data.decode()
            except UnicodeDecodeError:
                return self._decode_one_by_one(body, len(ids))
            ends = _complete(data, self._sizes.take(places).cumsum())
        if len(body) < len(ids):
            ends.append(len(text))
        return text, ends

    def _decode_one_by_one(self, body: Sequence[int], count: int) -> tuple[str, list[int]]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        pieces = [*_pick(self._pieces, body), *[b""] * (count - len(body))]
        texts = [decoder.decode(piece, final=at == count) for at, piece in enumerate(pieces, start=1)]
        return "".join(texts), np.cumsum([len(text) for text in texts]).tolist()


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _pick(values: Sequence[T], ids: Sequence[int]) -> tuple[T, ...]:
    return itemgetter(*ids)(values) if len(ids) > 1 else (values[ids[0]],)


def _complete(data: bytes, ends: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
    """How many characters of valid UTF-8 `data` end at or before each byte offset of `ends`."""
    starts = np.cumsum((np.frombuffer(data, np.uint8) & 0xC0) != 0x80)
    # The character that starts at or covers the next byte is not complete; behind the last byte all are.
    complete: list[int] = (np.append(starts, starts[-1] + 1).take(ends) - 1).tolist()
    return complete
