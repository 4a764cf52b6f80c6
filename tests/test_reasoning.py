"""Reasoning formats: where reasoning ends, in tokens, and in which state."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import response

from eyas.plugins import Split
from eyas.reasoning.none import NoReasoning
from eyas.reasoning.tags import Tags, TagsOptions


def split(*tokens: str | bytes, cut: bool = False, **options: Any) -> Split:
    return Tags(TagsOptions(**options)).split(response(tokens, cut=cut))


def test_without_a_format_everything_is_answer() -> None:
    found = NoReasoning(None).split(response(["<think>", "a", "</think>", "b"]))
    assert found == Split("none", 0)
    assert not NoReasoning.expects_reasoning


@pytest.mark.parametrize(
    ("tokens", "cut", "state", "reasoning"),
    [
        (["<think>", "a", "</think>", "b"], False, "closed", 3),
        (["\n", "<think>", "a", "</think>", "b"], False, "closed", 4),
        (["<th", "ink>", "a", "</", "think", ">\n\n", "b"], False, "closed", 6),
        (["<think>", "a", "</think>", "b"], True, "closed", 3),
        (["<think>", "a", "b"], True, "truncated_in_reasoning", 3),
        (["<think>", "a", "</thi"], True, "truncated_in_reasoning", 3),
        (["<think>", "a", "b"], False, "unclosed", 4),
        (["<think>", "\n\n", "</think>", "b"], False, "empty", 3),
        (["<think></think>"], False, "empty", 1),
        (["a", "b"], False, "none", 0),
        ([], False, "none", 0),
        ([], True, "none", 0),
        (["Use ", "<think>", "a", "</think>"], False, "none", 0),
        (["a", "</think>", "b"], False, "none", 0),
        (["<think>", "a", "</think>", "b", "</think>", "c"], False, "double_close", 3),
        (["<think>", "</think>", "</think>", "c"], False, "double_close", 2),
        (["<think>", "a", "</think>", "b", "<think>", "c"], False, "reopened", 3),
        (["<think>", "a", "</think>", "<think>", "c", "</think>", "d"], False, "reopened", 3),
        (["<think>", "a", "<think>", "b", "</think>", "c"], False, "stray_open", 5),
        (["<think>", "a", "<think>", "b", "</think>", "<think>", "</think>"], False, "stray_open", 5),
        (["<think>", "a", "<think>", "b"], True, "truncated_in_reasoning", 4),
        (["<think>", "a", "<call>", "b"], False, "closed_by_tool", 2),
        (["<think>", "a", "<call>", "b"], True, "closed_by_tool", 2),
        (["<think>", "a", "<call>", "b", "</think>"], False, "closed_by_tool", 2),
        (["<think>", "a", "<call>", "b", "<think>"], False, "reopened", 2),
        (["<think>", "a", "</think>", "<call>", "b"], False, "closed", 3),
        (["<think>", "a", "[TOOL]", "<call>"], False, "closed_by_tool", 2),
        (["<think>", "\n", "<call>", "b"], False, "empty", 2),
        (["<call>", "b"], False, "none", 0),
    ],
)
def test_states_of_a_model_that_opens_reasoning_itself(
    tokens: list[str], cut: bool, state: str, reasoning: int
) -> None:
    assert split(*tokens, cut=cut, implicit_closers=["<call>", "[TOOL]"]) == Split(state, reasoning)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "cut", "state", "reasoning"),
    [
        (["a", "</think>", "b"], False, "closed", 2),
        (["</think>", "b"], False, "empty", 1),
        (["<think>", "a", "</think>", "b"], False, "stray_open", 3),
        (["a", "b"], True, "truncated_in_reasoning", 2),
        (["a", "b"], False, "unclosed", 3),
        ([], False, "unclosed", 1),
        ([], True, "truncated_in_reasoning", 0),
        (["<call>", "a"], False, "empty", 0),
        (["a", "<call>", "b"], False, "closed_by_tool", 1),
    ],
)
def test_output_starts_inside_reasoning_where_the_prompt_opened_it(
    tokens: list[str], cut: bool, state: str, reasoning: int
) -> None:
    found = split(*tokens, cut=cut, opened_by_prompt=True, implicit_closers=["<call>"])
    assert found == Split(state, reasoning)  # type: ignore[arg-type]


def test_token_that_merges_the_close_with_what_follows_belongs_to_reasoning() -> None:
    assert split("a.", "\n</", "think", ">\n\nThe", " end", opened_by_prompt=True) == Split("closed", 4)


def test_closer_whose_first_character_is_split_over_tokens_is_not_reasoning() -> None:
    found = split("é", b"\xe2\x97", b"\x81tool", "▷", opened_by_prompt=True, implicit_closers=["◁tool▷"])
    assert found == Split("closed_by_tool", 1)


def test_token_that_ends_reasoning_and_begins_a_call_belongs_to_the_call() -> None:
    assert split("a", "b<call", ">", opened_by_prompt=True, implicit_closers=["<call>"]) == Split(
        "closed_by_tool", 1
    )


def test_delimiter_spelt_out_is_ordinary_text_to_a_tokenizer_that_has_it_as_one_token() -> None:
    tokens = ("<think>", "the ", "</", "think", ">", " tag", "</think>", "<", "think", ">", "b")
    assert split(*tokens, single_token=True) == Split("closed", 7)
    assert split(*tokens) == Split("reopened", 5)
    assert split("<", "think", ">", "a", "</think>", single_token=True) == Split("none", 0)


@pytest.mark.parametrize(
    "options",
    [
        {"open": "<t>", "close": "<t>"},
        {"open": "t>", "close": "</t>"},
        {"open": ""},
        {"implicit_closers": [""]},
        {"prefill": "<think>\n"},
        {"prefil": ""},
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, TagsOptions)


def test_prefill_is_what_the_prompt_gets() -> None:
    assert Tags(TagsOptions(prefill="<think>\n", opened_by_prompt=True)).prefill == "<think>\n"
    assert Tags(TagsOptions(prefill="<think>\n\n</think>\n\n")).prefill == "<think>\n\n</think>\n\n"


# --- against a reference ------------------------------------------------------------------------------------------

PIECES = [
    b"<o>",
    b"<",
    b"o",
    b">",
    b"</o>",
    b"</",
    "◁c▷".encode(),
    b"\xe2\x97",
    b"\x81c\xe2",
    b"\x96\xb7",
    b"\x81",
]
PIECES += [b"<t>", b"t>", b"t", b" ", b"\n", "é".encode(), b"\xc3", b"\xa9", b"x</o", b">x<t", b">x"]
WHOLE = [b"<o>", b"</o>", b"<t>", b"<", b"o", b"/", b"t", b">", b" ", "é".encode()]


def reference(tokens: list[bytes], total: int, cut: bool, options: TagsOptions) -> Split:
    """The splitter told again, byte by byte: delimiters as events, each a step of the state machine."""
    data = b"".join(tokens)
    spans, at = [], 0
    for token in tokens:
        spans.append((at, at + len(token)))
        at += len(token)
    kinds = [(options.open, "open"), (options.close, "close")]
    kinds += [(closer, "tool") for closer in options.implicit_closers]
    events = [
        (start, start + len(delimiter.encode()), kind)
        for start in range(len(data))
        for delimiter, kind in kinds
        if data.startswith(delimiter.encode(), start)
        and (not options.single_token or (start, start + len(delimiter.encode())) in spans)
    ]

    begin = 0
    if not options.opened_by_prompt:
        if not events or events[0][2] != "open" or data[: events[0][0]].strip():
            return Split("none", 0)
        begin = events.pop(0)[1]
    ended: tuple[int, int, str] | None = None
    stray = reopened = twice = False
    for event in events:
        kind = event[2]
        if ended is None and kind == "open":
            stray = True
        elif ended is None:
            ended = event
        elif kind == "open":
            reopened = True
        elif kind == "close" and ended[2] == "close":
            twice = True
    if ended is None:
        return Split("truncated_in_reasoning" if cut else "unclosed", total)
    start, end, kind = ended
    if kind == "close":
        count = sum(1 for low, _ in spans if low < end)
    else:
        count = sum(1 for _, high in spans if high <= start)
    if stray:
        return Split("stray_open", count)
    if reopened:
        return Split("reopened", count)
    if twice:
        return Split("double_close", count)
    if not data[begin:start].strip():
        return Split("empty", count)
    return Split("closed" if kind == "close" else "closed_by_tool", count)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=24),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["</o>", "◁c▷"]),
    st.sampled_from([[], ["<t>"]]),
)
def test_split_agrees_with_a_byte_by_byte_reference(
    tokens: list[bytes], cut: bool, opened: bool, close: str, tools: list[str]
) -> None:
    options = TagsOptions(open="<o>", close=close, opened_by_prompt=opened, implicit_closers=tools)
    made = response(tokens, cut=cut)
    assert Tags(options).split(made) == reference(tokens, len(made.output_ids), cut, options)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(WHOLE), max_size=24), st.booleans(), st.booleans())
def test_split_on_single_tokens_agrees_with_the_reference(
    tokens: list[bytes], cut: bool, opened: bool
) -> None:
    options = TagsOptions(
        open="<o>", close="</o>", opened_by_prompt=opened, implicit_closers=["<t>"], single_token=True
    )
    made = response(tokens, cut=cut)
    assert Tags(options).split(made) == reference(tokens, len(made.output_ids), cut, options)
