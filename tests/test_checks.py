"""Checks: what each finds, and what it must not find."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import END, response

from eyas.checks.control_tokens import ControlTokens, ControlTokensOptions
from eyas.checks.degenerate import Degenerate, DegenerateOptions
from eyas.checks.empty_answer import EmptyAnswer
from eyas.checks.length import Length
from eyas.checks.reasoning import ReasoningBlock
from eyas.checks.stop_token import StopToken
from eyas.checks.unicode import Unicode
from eyas.plugins import Check, NoOptions, Split
from eyas.reasoning.tags import Tags, TagsOptions
from eyas.records import Finish, Response

CLOSED = Split("closed", 0)
CAPTURES = Path(__file__).parents[2] / "shared" / "captures" / "llamacpp" / "think"


def faults(check: type[Check], made: Response, split: Split = CLOSED, **options: Any) -> list[str]:
    return list(check(check.Options(**options)).faults(made, split))


# --- length -------------------------------------------------------------------------------------------------------


def test_cut_answers_are_found_and_kept_by_default() -> None:
    assert faults(Length, response(["a"], cut=True)) == ["cut at the limit"]
    assert faults(Length, response(["a"])) == []
    assert Length.default_policy == "mark"


# --- stop token ---------------------------------------------------------------------------------------------------

STOP, CUT = Finish(type="stop", matched=END), Finish(type="length")
MISSING, EARLY = "stop id missing at the end", "stop id before the end"
IDLE = "stop id that did not end the answer"


@pytest.mark.parametrize(
    ("ids", "finish", "expected"),
    [
        ([7, 8, END], STOP, []),
        ([END], STOP, []),
        ([7, 8], STOP, [MISSING]),
        ([], STOP, [MISSING]),
        ([7, END, 8], STOP, [MISSING, EARLY]),
        ([7, END, END], STOP, [EARLY]),
        ([7, 3, END], STOP, [EARLY]),
        ([7, 3], STOP, [MISSING, EARLY]),
        ([7, 9], Finish(type="stop", matched=9), []),
        ([7, 9, 8, 9], Finish(type="stop", matched=9), [EARLY]),
        ([7, 8], CUT, []),
        ([], CUT, []),
        ([7, END, 8], CUT, [EARLY]),
        ([7, 8, END], CUT, [IDLE]),
        ([7, 8], Finish(type="stop", matched="\n\n"), []),
        ([7, END], Finish(type="stop", matched="\n\n"), [IDLE]),
        ([7, 8], Finish(type="stop"), [MISSING]),
    ],
)
def test_stop_id_must_be_once_and_last_exactly_when_it_ended_the_answer(
    ids: list[int], finish: Finish, expected: list[str]
) -> None:
    made = response([], output_ids=ids, finish=finish, text_lengths="0" * len(ids), stop_ids=[END, 3])
    assert faults(StopToken, made) == expected


# --- reasoning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("closed", []),
        ("closed_by_tool", []),
        ("truncated_in_reasoning", []),
        ("none", ["no reasoning"]),
        ("empty", ["empty reasoning"]),
        ("unclosed", ["reasoning never closed"]),
        ("double_close", ["reasoning closed twice"]),
        ("reopened", ["reasoning reopened"]),
        ("stray_open", ["reasoning opened twice"]),
    ],
)
def test_missing_and_malformed_reasoning_is_found_by_its_state(state: Any, expected: list[str]) -> None:
    assert faults(ReasoningBlock, response(["a"]), Split(state, 0)) == expected


def test_no_reasoning_is_no_fault_where_none_was_asked_but_malformed_reasoning_is() -> None:
    assert faults(ReasoningBlock, response(["a"]), Split("none", 0, asked=False)) == []
    assert faults(ReasoningBlock, response(["a"]), Split("reopened", 0, asked=False)) == [
        "reasoning reopened"
    ]


# --- empty answer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "cut", "empty"),
    [
        (["<think>", "a", "</think>", "\n\n", "b"], False, False),
        (["<think>", "a", "</think>", "\n\n"], False, True),
        (["<think>", "a", "</think>"], False, True),
        (["<think>", "a", "</think>"], True, False),
        (["<think>", "a"], True, False),
        (["<think>", "a"], False, False),
        (["<think>", "a", "<call>"], False, False),
        ([], False, True),
        ([" "], False, True),
        (["b"], False, False),
        ([], True, False),
    ],
)
def test_empty_answer_is_one_that_stopped_after_its_reasoning(
    tokens: list[str], cut: bool, empty: bool
) -> None:
    made = response(tokens, cut=cut)
    split = Tags(TagsOptions(implicit_closers=["<call>"])).split(made)
    assert faults(EmptyAnswer, made, split) == (["empty answer"] if empty else [])


# --- control tokens -----------------------------------------------------------------------------------------------


def test_control_token_in_the_answer_is_found_but_not_the_end_token() -> None:
    fault = ["control token in the answer"]
    assert faults(ControlTokens, response(["a"])) == []
    assert faults(ControlTokens, response([], output_ids=[7, 1, 8, END], text_lengths="0" * 4)) == fault
    assert faults(ControlTokens, response([], output_ids=[7, END, 8, END], text_lengths="0" * 4)) == fault
    assert faults(ControlTokens, response([], cut=True, output_ids=[7, END], text_lengths="0" * 2)) == fault
    assert faults(ControlTokens, response([], cut=True)) == []


def test_control_tokens_that_the_config_allows_are_no_fault() -> None:
    made = response([], output_ids=[7, 1, 8, END], text_lengths="0" * 4)
    assert ControlTokensOptions().allowed == []
    assert faults(ControlTokens, made, allowed=[1]) == []


def test_control_tokens_of_the_reasoning_format_are_no_fault_but_markers_of_prompts_are() -> None:
    fault = ["control token in the answer"]
    made = response([], output_ids=[7, 1, 8, 0, END], text_lengths="0" * 5)
    assert faults(ControlTokens, made, Split("closed", 0, markers=frozenset({0, 1}))) == []
    assert faults(ControlTokens, made, Split("closed", 0, markers=frozenset({1}))) == fault
    assert faults(ControlTokens, response(["a"]), Split("closed", 0, foreign=True)) == fault


def test_a_guard_behind_the_stop_id_is_a_fault() -> None:
    """Kimi ends a turn with two tokens; a server that stops at the second gives one more than was asked for."""
    guard = 3
    assert faults(
        StopToken,
        response(
            [], output_ids=[7, END, guard], finish=Finish(type="stop", matched=guard), stop_ids=[END, guard]
        ),
    ) == [EARLY]
    assert (
        faults(
            StopToken,
            response(
                [], output_ids=[7, guard], finish=Finish(type="stop", matched=guard), stop_ids=[END, guard]
            ),
        )
        == []
    )


# --- unicode ------------------------------------------------------------------------------------------------------


def test_undecodable_bytes_are_found_but_not_a_character_cut_by_the_limit() -> None:
    fault = ["undecodable bytes in the answer"]
    assert faults(Unicode, response(["Grüße 🦅"])) == []
    assert faults(Unicode, response(["a", b"\xf0\x9f"], cut=True)) == []
    assert faults(Unicode, response(["a", b"\xf0\x9f"])) == fault
    assert faults(Unicode, response(["a", b"\xf0\x9f", "b"], cut=True)) == fault
    assert faults(Unicode, response([b"\xff", b"\xf0\x9f"], cut=True)) == fault


# --- degenerate ---------------------------------------------------------------------------------------------------

PERIOD, NGRAMS = "repeats with a short period", "few distinct n-grams"


def tokens_of(text: str) -> list[str]:
    """Word pieces of up to six letters, single digits and single marks, about as a byte-pair tokenizer cuts."""
    return re.findall(r" ?[A-Za-z_]{1,6}| ?\d| {2,}|\n+| ?[^\w\s]|\s", text)


def degenerate(tokens: Sequence[str], *, cut: bool = True) -> list[str]:
    return faults(Degenerate, response(tokens, cut=cut))


PROSE = tokens_of("A falcon that hunts from the fist must first trust the falconer; that takes weeks. ")


@pytest.mark.parametrize("passage", ["so ", "0, ", "Wait, let me check that again.\n\n", "".join(PROSE)])
@pytest.mark.parametrize("cut", [True, False])
def test_exact_loop_at_the_end_is_found_whatever_its_phase_and_ending(passage: str, cut: bool) -> None:
    unit = tokens_of(passage)
    loop = unit * (200 // len(unit) + 5)
    for phase in range(min(len(unit), 4)):
        assert PERIOD in degenerate(PROSE + loop[: len(loop) - phase], cut=cut)


def test_loop_of_a_whole_paragraph_is_found() -> None:
    paragraph = [f" w{number}" for number in range(400)]
    assert degenerate(PROSE + paragraph * 5) == [PERIOD]


def test_loop_that_changes_a_word_now_and_then_is_found() -> None:
    unit = tokens_of("Wait, let me check that again. ")
    loop = [token for turn in range(120) for token in [*unit, *([f" {turn}"] if turn % 9 == 0 else [])]]
    assert NGRAMS in degenerate(PROSE + loop)


def table(rows: int, columns: int) -> str:
    cells = [" | ".join(str(row * column) for column in range(1, columns + 1)) for row in range(1, rows + 1)]
    return "| " + " |\n| ".join(cells) + " |\n"


LEGITIMATE = {
    "nothing": "",
    "a short refrain": "Na na na na, na na na na, hey hey hey, goodbye. " * 3,
    "laughter": "Ha ha ha ha ha ha ha ha ha ha! ",
    "a multiplication table": table(20, 12),
    "rules of a table": "|" + "---|" * 24 + "\n",
    "a zero matrix in a code block": "```python\nm = [\n"
    + "    [0, 0, 0, 0, 0, 0, 0, 0],\n" * 8
    + "]\n```\n",
    "a lookup table": ", ".join(f"0x{(n * n * 37) % 256:02x}" for n in range(256)),
    "a list of similar JSON objects": json.dumps(
        [{"id": n, "name": f"sensor_{n}", "enabled": True, "unit": "celsius"} for n in range(80)], indent=1
    ),
    "navigation links": "".join(
        f'<li><a href="#part{n}" class="nav-link text-white">Part {n}</a></li>\n' for n in range(1, 60)
    ),
    "a case statement": "".join(f"    case {n}: return names[{n}];\n" for n in range(100)),
    "imports": "".join(
        f"from package.module_{name} import {name}\n" for name in "abcdefghijklmnopqrstuvwxyz" * 2
    ),
    "insert statements": "".join(
        f"INSERT INTO users (id, name, age) VALUES ({n}, 'user{n}', {20 + n * 7 % 50});\n" for n in range(60)
    ),
    "numbered checks": "".join(f"Check {n}: {n} * {n} = {n * n}, so it is no solution.\n" for n in range(60)),
    "digits of a number": "".join(random.Random(1).choices("0123456789", k=1000)),
    "a DNA sequence": "".join(random.Random(1).choices("ACGT", k=1000)),
}


@pytest.mark.parametrize("kind", LEGITIMATE)
@pytest.mark.parametrize("cut", [True, False])
def test_ordinary_repetition_is_no_fault(kind: str, cut: bool) -> None:
    assert degenerate(tokens_of(LEGITIMATE[kind]), cut=cut) == []
    assert degenerate(PROSE * 2 + tokens_of(LEGITIMATE[kind]), cut=cut) == []


def captured() -> Iterator[dict[str, Any]]:
    for path in sorted(CAPTURES.glob("*.json*")):
        text = path.read_text(encoding="utf-8")
        rows = (
            [json.loads(line) for line in text.split("\n") if line]
            if path.suffix == ".jsonl"
            else json.loads(text)
        )
        yield from (row for row in rows if "tokens" in row)


@pytest.mark.skipif(not CAPTURES.is_dir(), reason="no captured answers on this machine")
def test_no_captured_answer_of_the_small_model_is_degenerate_or_ends_wrongly() -> None:
    rows = list(captured())
    assert len(rows) > 400
    for row in rows:
        finish = STOP if row["stop"] == "eos" else CUT
        made = response([], output_ids=row["tokens"], finish=finish, text_lengths="0" * len(row["tokens"]))
        for check in (Degenerate, StopToken, ControlTokens):
            assert faults(check, made) == [], row["full"]


def has_period(ids: Sequence[int], options: DegenerateOptions) -> bool:
    """The definition, by trying every period."""
    for period in range(1, options.max_period + 1):
        covered = max(options.min_repeats * period, options.min_tokens)
        if covered <= len(ids) and all(ids[-n] == ids[-n - period] for n in range(1, covered - period + 1)):
            return True
    return False


def has_few_ngrams(ids: Sequence[int], options: DegenerateOptions) -> bool:
    if len(ids) < options.window:
        return False
    last = ids[-options.window :]
    grams = [tuple(last[at : at + options.ngram]) for at in range(len(last) - options.ngram + 1)]
    return len(set(grams)) < options.min_distinct * len(grams)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(3, 6), max_size=40),
    st.lists(st.integers(3, 5), min_size=1, max_size=15),
    st.integers(0, 8),
    st.lists(st.integers(3, 6), max_size=1),
    st.builds(
        DegenerateOptions,
        max_period=st.integers(1, 20),
        min_repeats=st.integers(2, 5),
        min_tokens=st.integers(2, 40),
        window=st.integers(16, 40),
        ngram=st.integers(1, 5),
        min_distinct=st.floats(0, 1),
    ),
)
def test_degenerate_agrees_with_its_definition(
    start: list[int], unit: list[int], repeats: int, rest: list[int], options: DegenerateOptions
) -> None:
    ids = start + unit * repeats + rest
    found = list(
        Degenerate(options).faults(
            response([], cut=True, output_ids=ids, text_lengths="0" * len(ids)), CLOSED
        )
    )
    assert (PERIOD in found) == has_period(ids, options)
    assert (NGRAMS in found) == has_few_ngrams(ids, options)


def test_checks_without_thresholds_take_no_options() -> None:
    for check in (Length, StopToken, ReasoningBlock, EmptyAnswer, Unicode):
        assert check.Options is NoOptions
