"""Decoding is byte for byte what was generated, and knows which characters are complete after each id."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.lengths import ends_of, spell
from eyas.pieces import Pieces

END, CONTROL = 256, 257
WORDS = ["Hello", " wörld", "漢字", "😀", "", "\n\n"]
# 256 bytes, an end token, a control token, and words of several characters.
VOCABULARY = [*(bytes([i]) for i in range(256)), b"<end>", b"<ctl>", *(word.encode() for word in WORDS)]
PIECES = Pieces(VOCABULARY, [END])


def decode(ids: list[int]) -> tuple[str, list[int]]:
    """The text, and how much of it is complete after each id."""
    text, lengths = PIECES.decode(ids)
    return text, ends_of(lengths).tolist()


def by_the_book(ids: list[int]) -> tuple[str, list[int]]:
    """Bytes one token after the other through Python's own decoder."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text, ends = "", []
    for at, token in enumerate(ids):
        last = at == len(ids) - 1
        text += decoder.decode(b"" if last and token == END else VOCABULARY[token], final=last)
        ends.append(len(text))
    return text, ends


@given(st.lists(st.integers(0, len(VOCABULARY) - 1)), st.booleans())
def test_any_ids_decode_as_by_the_book(ids: list[int], ended: bool) -> None:
    ids = [*ids, END] if ended else ids
    assert decode(ids) == by_the_book(ids)


@given(st.text(), st.booleans())
def test_text_in_bytes_decodes_as_by_the_book(text: str, ended: bool) -> None:
    ids = [*text.encode(), END] if ended else [*text.encode()]
    assert decode(ids)[0] == text
    assert decode(ids) == by_the_book(ids)


def test_a_character_counts_once_its_last_byte_is_there() -> None:
    assert decode([0x61, *"é😀".encode(), 0x62]) == ("aé😀b", [1, 1, 2, 2, 2, 2, 3, 4])


def test_bytes_cut_short_are_a_replacement_character_at_the_last_id() -> None:
    assert decode([0x61, 0xF0, 0x9F]) == ("a\ufffd", [1, 1, 2])
    assert decode([0x61, 0xF0, 0x9F, END]) == ("a\ufffd", [1, 1, 1, 2])


def test_only_the_last_end_token_is_no_text() -> None:
    assert decode([END, 0x61, END, END]) == ("<end>a<end>", [5, 6, 11, 11])
    assert decode([END]) == ("", [0])
    assert decode([]) == ("", [])


@pytest.mark.parametrize("wrong", [-1, len(VOCABULARY), 1 << 40])
@pytest.mark.parametrize("before", [[], [0x61], [0xF0]])
def test_an_id_that_the_vocabulary_does_not_have_is_an_error(wrong: int, before: list[int]) -> None:
    with pytest.raises(IndexError):
        PIECES.decode([*before, wrong, END])


@given(st.lists(st.one_of(st.integers(0, 12), st.integers(0, 400), st.just(0xD000))))
def test_lengths_of_any_size_are_spelt_and_read(counts: list[int]) -> None:
    assert len(spell(counts)) == len(counts)
    assert ends_of(spell(counts)).tolist() == [sum(counts[: at + 1]) for at in range(len(counts))]


def test_lengths_are_readable() -> None:
    assert spell([4, 0, 10]) == "40:"
