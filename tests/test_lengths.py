"""Token ids as a server told them are the list of them, and cost no number each."""

from __future__ import annotations

from operator import add
from pathlib import Path

import msgspec
import numpy as np
import pytest
from helpers import answered
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from eyas.audit import AuditAnswer
from eyas.journal import Answered, Journal, JournalWriter
from eyas.lengths import ID_END, Ids, places
from eyas.plugins import Split
from eyas.units import place

IDS = st.lists(st.integers(0, ID_END - 1))


@given(IDS, st.integers(-5, 5), st.integers(-5, 5))
def test_they_are_the_list_of_them(ids: list[int], start: int, stop: int) -> None:
    told = Ids(msgspec.json.encode(ids))
    assert told == ids and ids == told and told == Ids(b" [" + told.json[1:])
    assert [*told] == ids and len(told) == len(ids) and repr(told) == repr(ids)
    assert told[start:stop] == ids[start:stop]
    assert add(told, [1]) == [*ids, 1] and add([1], told) == [1, *ids]
    if ids:
        assert type(told[-1]) is int and told[-1] == ids[-1]
        assert ids[0] in told and told.count(ids[0]) == ids.count(ids[0])
    assert places(told).tolist() == ids and places(told).dtype == np.int64


@pytest.mark.parametrize(
    "told",
    [
        "null",
        "{}",
        "7",
        '"7"',
        "[1.5]",
        "[1e3]",
        "[-1]",
        '["1"]',
        "[null]",
        "[true]",
        "[[1]]",
        "[1,[2]]",
        "[2147483648]",
        "[18446744073709551615]",
        "[99999999999999999999999,1]",
        "[5,-9223372036854775809]",
        "[1,",
        "",
    ],
)
def test_what_is_no_array_of_ids_is_refused(told: str) -> None:
    with pytest.raises(ValueError, match="no array of token ids"):
        Ids(told.encode())


def test_they_are_journalled_on_one_line_as_they_came(tmp_path: Path) -> None:
    entry = answered("a")
    reply = replace(entry.reply, output_ids=Ids(b"[ 5,\n 6 ]"), text_lengths="00")
    with JournalWriter(tmp_path) as writer:
        writer.append(Answered(reply=reply, delivery=entry.delivery))
    found = Journal(tmp_path).answered(reply.request)
    assert found is not None and found.reply.output_ids == [5, 6] and type(found.reply.output_ids) is list
    assert found.reply == reply


def test_the_audit_keeps_the_same_of_them_as_of_a_list() -> None:
    reply = answered("a").reply
    listed, told = (replace(reply, output_ids=ids) for ids in ([5, 6, 7, 8, 9], Ids(b"[5, 6,7,8,9]")))
    split = Split("closed", 2)
    assert AuditAnswer.of("k", told, split) == AuditAnswer.of("k", listed, split)


@given(IDS, st.sets(st.integers(-1, 30), max_size=3), st.lists(st.integers(0, 30), max_size=9))
def test_what_an_answer_holds_is_told_alike(ids: list[int], tokens: set[int], own: list[int]) -> None:
    """Whatever the tokens: the tokenizer's own, end tokens, others, or some of each."""
    ids += [0, 7, 30][: len(tokens)]
    added = {str(token): token for token in own[1:]}
    reply = replace(answered("a").reply, stop_ids=own[:1], added_tokens=added)
    listed, told = (
        place(replace(reply, output_ids=some), "k", 0, 0) for some in (ids, Ids(msgspec.json.encode(ids)))
    )
    for wanted in (tokens, set(own), tokens & set(own)):
        assert listed.holds(wanted) == told.holds(wanted) == (not wanted.isdisjoint(listed.inner.tolist()))


def test_tokens_far_apart_are_found_among_many_between_them() -> None:
    ids = [*range(3, 3000), 31_000]
    reply = replace(answered("a").reply, stop_ids=[2], added_tokens={"<a>": 31_000, "<b>": 40_000})
    response = place(replace(reply, output_ids=Ids(msgspec.json.encode(ids))), "k", 0, 0)
    assert response.holds([31_000]) and response.holds([2, 500]) and response.holds([0, 2999])
    assert not response.holds([2, 40_000]) and not response.holds([0, 3000, 50_000])


def test_nothing_else_than_ids_is_journalled_in_their_place(tmp_path: Path) -> None:
    entry = answered("a")
    with JournalWriter(tmp_path) as writer, pytest.raises(TypeError, match="has no JSON"):
        writer.append(replace(entry, reply=replace(entry.reply, output_ids=np.array([1]))))
