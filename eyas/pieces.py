"""Ids → text, byte for byte, and how much of the text is complete after each id.

A token's bytes need not be whole characters: an emoji may come as three tokens. Answers are decoded on the event loop, so
the usual case goes without a loop over tokens: 1,400 ids take about 65 µs (tests/bench/test_encoding.py).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

import numpy as np

from eyas.lengths import NOTHING, Array, places, spell


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
        self._bytes = np.frombuffer(b"".join(pieces), np.uint8)
        # As wide as numpy's own indices: narrower ones would be widened for each answer.
        self._sizes = np.array([len(piece) for piece in pieces], np.intp)
        self._starts = self._sizes.cumsum() - self._sizes
        # Characters that begin in a token, and whether it begins with bytes that belong to one before.
        begins = np.append((self._bytes & 0xC0) != 0x80, True)
        begun = np.cumsum(begins, dtype=np.int32) - begins
        self._characters = begun[self._starts + self._sizes] - begun[self._starts]
        # As `spell` has them; what is not ASCII stands for more than a byte of it can tell.
        self._spelt = np.minimum(self._characters + ord(NOTHING), 0x80).astype(np.uint8)
        self._continues = ~begins[self._starts]

    def __len__(self) -> int:
        return len(self._pieces)

    def decode(self, ids: Sequence[int] | Array) -> tuple[str, str]:
        """Text without an end token at the very end, and for each id how many characters it completes, as `spell` has it.

        Bytes that are no UTF-8 become U+FFFD. Raises IndexError for an id that the vocabulary does not have.
        """
        total = len(ids)
        count = total - bool(total and int(ids[-1]) in self._stops)
        if not count:
            return "", NOTHING * total
        at = places(ids)[:count]
        sizes = self._sizes.take(at)
        text = self._text(at, sizes)
        if text is None or np.count_nonzero(sizes) < count:
            return self._decode_one_by_one(at.tolist(), total)
        lengths = self._lengths(at, text.isascii())
        return text, lengths if count == total else lengths + NOTHING

    def _lengths(self, at: Array, is_ascii: bool) -> str:
        """How many characters each token completes, as `spell` has it."""
        if is_ascii:
            spelt: bytes = self._spelt.take(at).tobytes()
            if spelt.isascii():
                return spelt.decode()
        counts = self._characters.take(at)
        # The last character of a token is complete only with the next one, if that goes on with it.
        goes_on = self._continues.take(at[1:])
        counts[:-1] -= goes_on
        counts[1:] += goes_on
        return spell(counts)

    def _text(self, at: Array, sizes: Array) -> str | None:
        """The text of tokens, None where their bytes are no UTF-8."""
        index = (self._starts.take(at) - (sizes.cumsum() - sizes)).repeat(sizes)
        index += np.arange(len(index))
        try:
            text: str = self._bytes.take(index).tobytes().decode()
        except UnicodeDecodeError:
            return None
        return text

    def _decode_one_by_one(self, body: Sequence[int], count: int) -> tuple[str, str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        pieces = [*(self._pieces[token] for token in body), *[b""] * (count - len(body))]
        texts = [decoder.decode(piece, final=at == count) for at, piece in enumerate(pieces, start=1)]
        return "".join(texts), spell([len(text) for text in texts])
