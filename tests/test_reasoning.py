"""Reasoning formats: where reasoning ends, in tokens, and in which state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import Own, response

from eyas.errors import EyasError
from eyas.plugins import Split, registry
from eyas.reasoning.delimited import Delimited
from eyas.reasoning.formats import (
    DeepSeekV31,
    EffortOptions,
    Glm,
    GptOss,
    KimiK2Thinking,
)
from eyas.reasoning.none import NoReasoning
from eyas.reasoning.tags import Tags, TagsOptions

Token = str | bytes


def split(*tokens: Token, cut: bool = False, **options: Any) -> tuple[str, int]:
    found = Tags(TagsOptions(**options)).split(response(tokens, cut=cut))
    return found.state, found.reasoning_tokens


def format_named(name: str, **options: Any) -> Delimited:
    made = registry().create("reasoning", name, options, "model.reasoning")
    assert isinstance(made, Delimited)
    return made


def test_without_a_format_everything_is_answer() -> None:
    found = NoReasoning(None).split(response(["<think>", "a", "</think>", "b"]))
    assert found == Split("none", 0, asked=False)


# --- delimiters that are ordinary text to the tokenizer -----------------------------------------------------------

STATES: list[tuple[list[str], bool, str, int]] = [
    (["<think>", "a", "</think>", "b"], False, "closed", 3),
    (["\n", "<think>", "a", "</think>", "b"], False, "closed", 4),
    (["<think>", "a", "</think>", "b"], True, "closed", 3),
    (["<think>", "a", "b"], True, "truncated_in_reasoning", 3),
    (["<think>", "a", "</thi"], True, "truncated_in_reasoning", 3),
    (["<think>", "a", "b"], False, "unclosed", 4),
    (["<think>", "\n\n", "</think>", "b"], False, "empty", 3),
    (["<think>", "</think>"], False, "empty", 2),
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
    (["<think>", "a", "<tool_call>", "b"], False, "closed_by_tool", 2),
    (["<think>", "a", "<tool_call>", "b"], True, "closed_by_tool", 2),
    (["<think>", "a", "<tool_call>", "b", "</think>", "c"], False, "closed", 5),
    (["<think>", "a", "<tool_call>", "b", "</think>", "<tool_call>", "c"], False, "closed", 5),
    (["<think>", "a", "<tool_call>", "b", "<think>"], False, "reopened", 2),
    (["<think>", "a", "</think>", "<tool_call>", "b"], False, "closed", 3),
    (["<think>", "\n", "<tool_call>", "b"], False, "empty", 2),
    (["<tool_call>", "b"], False, "none", 0),
]
OPENED_STATES: list[tuple[list[str], bool, str, int]] = [
    (["a", "</think>", "b"], False, "closed", 2),
    (["</think>", "b"], False, "empty", 1),
    (["<think>", "a", "</think>", "b"], False, "stray_open", 3),
    (["a", "b"], True, "truncated_in_reasoning", 2),
    (["a", "b"], False, "unclosed", 3),
    ([], False, "unclosed", 1),
    ([], True, "truncated_in_reasoning", 0),
    (["<tool_call>", "a"], False, "empty", 0),
    (["a", "<tool_call>", "b"], False, "closed_by_tool", 1),
]


@pytest.mark.parametrize(
    ("tokens", "cut", "state", "reasoning"),
    [
        *STATES,
        (["<th", "ink>", "a", "</", "think", ">\n\n", "b"], False, "closed", 6),
        (["<think></think>"], False, "empty", 1),
        (["<think>", "a", "[TOOL]", "<tool_call>"], False, "closed_by_tool", 2),
    ],
)
def test_states_of_a_model_that_opens_reasoning_itself(
    tokens: list[str], cut: bool, state: str, reasoning: int
) -> None:
    closers = ["<tool_call>", "[TOOL]"]
    assert split(*tokens, cut=cut, implicit_closers=closers) == (state, reasoning)


@pytest.mark.parametrize(("tokens", "cut", "state", "reasoning"), OPENED_STATES)
def test_output_starts_inside_reasoning_where_the_prompt_opened_it(
    tokens: list[str], cut: bool, state: str, reasoning: int
) -> None:
    found = split(*tokens, cut=cut, opened_by_prompt=True, implicit_closers=["<tool_call>"])
    assert found == (state, reasoning)


def test_token_that_merges_the_close_with_what_follows_belongs_to_reasoning() -> None:
    assert split("a.", "\n</", "think", ">\n\nThe", " end", opened_by_prompt=True) == ("closed", 4)


def test_closer_whose_first_character_is_split_over_tokens_is_not_reasoning() -> None:
    found = split("é", b"\xe2\x97", b"\x81tool", "▷", opened_by_prompt=True, implicit_closers=["◁tool▷"])
    assert found == ("closed_by_tool", 1)


def test_token_that_ends_reasoning_and_begins_a_call_belongs_to_the_call() -> None:
    assert split("a", "b<call", ">", opened_by_prompt=True, implicit_closers=["<call>"]) == (
        "closed_by_tool",
        1,
    )


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


# --- delimiters that are tokens of their own ----------------------------------------------------------------------

OPEN, CLOSE, CALL = Own("<think>"), Own("</think>"), Own("<tool_call>")
MIDDLE, CALLS = Own("<|im_middle|>"), Own("<|tool_calls_section_begin|>")
SPELT_OPEN, SPELT_CLOSE = ["<", "think", ">"], ["</", "think", ">"]


def own(tokens: Sequence[str]) -> list[str]:
    return [Own(token) if token in (OPEN, CLOSE, CALL) else token for token in tokens]


def verdict(
    name: str, tokens: Sequence[Token], prompt: Sequence[Token], cut: bool = False
) -> tuple[str, int]:
    found = format_named(name).split(response(tokens, prompt=prompt, cut=cut))
    return found.state, found.reasoning_tokens


@pytest.mark.parametrize(("tokens", "cut", "state", "reasoning"), STATES)
@pytest.mark.parametrize(
    ("name", "header"),
    [("qwen3", "<|im_start|>"), ("glm", "<|assistant|>"), ("deepseek_r1", "<｜Assistant｜>")],
)
def test_states_on_ids_where_the_model_opens_reasoning(
    name: str, header: str, tokens: list[str], cut: bool, state: str, reasoning: int
) -> None:
    call = Own("<｜tool▁calls▁begin｜>") if name == "deepseek_r1" else CALL
    made = [call if token == CALL else token for token in own(tokens)]
    assert verdict(name, made, ["Hi", Own(header)], cut) == (state, reasoning)


@pytest.mark.parametrize(("tokens", "cut", "state", "reasoning"), OPENED_STATES)
@pytest.mark.parametrize("name", ["kimi_k2.5", "deepseek_r1", "deepseek_v3.1", "qwen3", "glm"])
def test_states_on_ids_where_the_prompt_opened_reasoning(
    name: str, tokens: list[str], cut: bool, state: str, reasoning: int
) -> None:
    call = {"kimi_k2.5": CALLS}.get(name, Own("<｜tool▁calls▁begin｜>") if "deepseek" in name else CALL)
    made = [call if token == CALL else token for token in own(tokens)]
    assert verdict(name, made, ["Hi", Own("<header>"), OPEN, "\n"], cut) == (state, reasoning)


def test_kimi_k2_thinking_opens_reasoning_itself() -> None:
    assert verdict("kimi_k2_thinking", [OPEN, "a", CLOSE, "b"], [MIDDLE]) == ("closed", 3)
    assert verdict("kimi_k2_thinking", [OPEN, "a", CALLS, "b"], [MIDDLE]) == ("closed_by_tool", 2)
    assert verdict("kimi_k2_thinking", ["a", CLOSE, "b"], [MIDDLE]) == ("none", 0)


def test_a_call_of_deepseek_v3_2_ends_reasoning_though_only_its_middle_is_a_token() -> None:
    tokens = ["a", "\n\n<", Own("｜DSML｜"), "function", "_calls>"]
    assert verdict("deepseek_v3.1", tokens, [OPEN]) == ("closed_by_tool", 1)
    spelt = ["a", "\n\n<", "｜DSML", "｜", "function_calls>"]
    assert verdict("deepseek_v3.1", spelt, [OPEN]) == ("unclosed", 6)


@pytest.mark.parametrize("name", ["kimi_k2.5", "deepseek_v3.1", "qwen3", "glm", "deepseek_r1"])
def test_a_spelt_delimiter_is_ordinary_text(name: str) -> None:
    tokens = ["the ", *SPELT_CLOSE, " tag", CLOSE, "b", *SPELT_OPEN, "c", *SPELT_CLOSE]
    assert verdict(name, tokens, [OPEN]) == ("closed", 6)
    assert verdict(name, ["a", *SPELT_CLOSE, "b"], [OPEN]) == ("unclosed", 6)


def test_an_ordinary_token_with_the_text_of_a_delimiter_is_no_delimiter() -> None:
    assert verdict("qwen3", ["a", "</think>", "b", CLOSE, "c"], [OPEN]) == ("closed", 4)


def test_a_delimiter_behind_half_a_character_is_found() -> None:
    assert verdict("qwen3", ["a", b"\xe2\x97", CLOSE, "c"], [OPEN]) == ("closed", 3)


def test_tags_split_on_ids_where_delimiters_are_single_tokens() -> None:
    tokens = (OPEN, "the ", *SPELT_CLOSE, " tag", CLOSE, *SPELT_OPEN, "b")
    assert split(*tokens, single_token=True) == ("closed", 7)
    assert split(*tokens) == ("reopened", 5)
    assert split(*SPELT_OPEN, "a", CLOSE, single_token=True) == ("none", 0)


@pytest.mark.parametrize(
    "prompt", [[OPEN, CLOSE], [OPEN, "\n\n", CLOSE, "\n\n"], [Own("<|assistant|>"), CLOSE]]
)
def test_where_the_prompt_ended_reasoning_all_is_answer_and_none_was_asked(prompt: list[str]) -> None:
    for name in ("kimi_k2.5", "deepseek_v3.1", "qwen3", "glm"):

        def found(*tokens: Token, name: str = name) -> Split:
            return format_named(name).split(response(tokens, prompt=["Hi", *prompt]))

        assert (found("a").state, found("a").reasoning_tokens, found("a").asked) == ("none", 0, False)
        assert found("a", CLOSE, "b").state == "double_close"
        assert found(OPEN, "a", CLOSE, "b").state == "reopened"
        assert found(*SPELT_OPEN, "a", *SPELT_CLOSE).state == "none"


def test_reasoning_was_asked_wherever_the_prompt_leaves_it_to_the_model() -> None:
    plain = response(["a"], prompt=[Own("<｜Assistant｜>")])
    assert format_named("deepseek_r1").split(plain).asked
    assert not format_named("deepseek_v3.1").split(plain).asked, "its template opens reasoning, or wants none"
    assert format_named("deepseek_v3.1").split(response(["a"], prompt=[OPEN])).asked


def test_an_earlier_turn_does_not_open_reasoning() -> None:
    prompt = [Own("<|im_start|>"), OPEN, "old", Own("<|im_end|>"), Own("<|im_start|>"), "assistant\n"]
    assert verdict("qwen3", ["a"], prompt) == ("none", 0)


# --- harmony ------------------------------------------------------------------------------------------------------

_HARMONY = re.compile(r"(<\|[a-z]+\|>)")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
CALL_HEAD = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def harmony(text: str) -> list[str]:
    return [Own(part) if _HARMONY.fullmatch(part) else part for part in _HARMONY.split(text) if part]


@pytest.mark.parametrize(
    ("text", "cut", "state", "reasoning"),
    [
        (f"{ANALYSIS}why{FINAL}so", False, "closed", 10),
        (f"{ANALYSIS}why", True, "truncated_in_reasoning", 4),
        (f"{ANALYSIS}why<|end|><|start|>assistant<|channel|>final", True, "truncated_in_reasoning", 9),
        (f"{ANALYSIS}why<|end|>", False, "unclosed", 6),
        (f"{ANALYSIS}why<|end|>{CALL_HEAD}{{}}", False, "closed_by_tool", 5),
        (f"{ANALYSIS}why<|end|><|start|>assistant to=functions.f<|channel|>commentary json", False, "closed_by_tool", 5),
        (f"{ANALYSIS}why<|end|><|start|>assistant{ANALYSIS[:-11]} to=python code<|message|>1", False, "closed_by_tool", 5),
        (f"{ANALYSIS}why<|end|><|start|>assistant{ANALYSIS}so{FINAL}b", False, "closed", 17),
        (f"{ANALYSIS}why{ANALYSIS}so{FINAL}b", False, "stray_open", 14),
        (f"{ANALYSIS}why{FINAL}so<|end|><|start|>assistant{ANALYSIS}b", False, "reopened", 10),
        (f"{ANALYSIS}why{FINAL}so{FINAL}b", False, "double_close", 10),
        (f"{ANALYSIS} {FINAL}so", False, "empty", 10),
        (f"{ANALYSIS}why<|end|><|start|>assistant<|channel|>commentary<|message|>I look{FINAL}so", False, "closed_by_tool", 5),
        ("<|channel|>final<|message|>so", False, "none", 0),
    ],
)  # fmt: skip
def test_states_of_harmony_whose_delimiters_are_sequences(
    text: str, cut: bool, state: str, reasoning: int
) -> None:
    assert verdict("gpt_oss", harmony(text), [Own("<|start|>"), "assistant"], cut) == (state, reasoning)


def test_a_harmony_delimiter_counts_only_if_its_own_tokens_stand_in_it() -> None:
    tokens = [*harmony(ANALYSIS), "say ", FINAL, *harmony(FINAL), "b"]
    assert verdict("gpt_oss", tokens, []) == ("closed", 11)
    half = [*harmony(FINAL)[:4], "final", "<|message|>"]
    assert verdict("gpt_oss", [*harmony(ANALYSIS), "a", *half, "b"], [])[0] == "unclosed"
    # As text, however its ordinary words are tokenized.
    merged = [*harmony(FINAL)[:3], Own("<|channel|>"), "fin", "al", Own("<|message|>")]
    assert verdict("gpt_oss", [*harmony(ANALYSIS), "a", *merged, "b"], []) == ("closed", 11)


# --- markers ------------------------------------------------------------------------------------------------------


def test_a_formats_own_markers_are_told_by_id() -> None:
    made = response([OPEN, "a", CALLS, Own("<|im_user|>"), "b"], prompt=[MIDDLE])
    found = KimiK2Thinking(None).split(made)
    assert found.markers == {made.added_tokens[OPEN], made.added_tokens[CALLS]}
    assert not found.foreign
    made = response(harmony(f"{ANALYSIS}a<|end|>{CALL_HEAD}"))
    every = {"<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"}
    assert GptOss(EffortOptions()).split(made).markers == {made.added_tokens[text] for text in every}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("qwen3", ["b", Own("<tool_response>"), "c"]),
        ("glm", ["b", Own("</tool_response>")]),
        ("deepseek_v3.1", [Own("<｜User｜>"), "c"]),
        ("deepseek_r1", [Own("<｜tool▁output▁begin｜>"), "c"]),
        ("gpt_oss", harmony("b<|end|><|start|>user<|message|>c")),
    ],
)
def test_a_marker_of_prompts_in_an_answer_is_foreign(name: str, tokens: list[str]) -> None:
    assert format_named(name).split(response(["a", *tokens], prompt=[OPEN])).foreign
    spelt = [str(token) for token in tokens]
    assert not format_named(name).split(response(["a", *spelt], prompt=[OPEN])).foreign


# --- the chat template's switch, and the self-test ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("kimi_k2.5", {}, {"thinking": True}),
        ("kimi_k2.5", {"thinking": False}, {"thinking": False}),
        ("deepseek_v3.1", {}, {"thinking": True}),
        ("qwen3", {"thinking": False}, {"enable_thinking": False}),
        ("glm", {}, {"enable_thinking": True}),
        ("gpt_oss", {"effort": "high"}, {"reasoning_effort": "high"}),
        ("kimi_k2_thinking", {}, {}),
        ("deepseek_r1", {}, {}),
        ("tags", {}, {}),
    ],
)
def test_a_format_tells_the_chat_template_whether_to_think(
    name: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert format_named(name, **options).template_options == expected


class SmallTokenizer:
    """Bytes, and the given tokens of its own from 256 on; all of them in `stops` end a turn."""

    template = ""
    control_ids: Sequence[int] = ()
    vocabulary_size = 512

    def __init__(self, *tokens: str, stops: Sequence[str] = ()) -> None:
        names = [*tokens, *stops]
        self.added_tokens = {text: 256 + n for n, text in enumerate(names)}
        self.stop_ids = [self.added_tokens[text] for text in stops]

    def encode(self, text: str, *, control: bool) -> list[int]:
        return [self.added_tokens[text]] if control and text in self.added_tokens else [*text.encode()]

    def decode(self, ids: Sequence[int]) -> tuple[str, str]:
        raise NotImplementedError


THINK = ("<think>", "</think>")
KIMI_STOPS = ("<|im_end|>", "[EOS]")
CHATML = "<|im_end|>\n<|im_start|>assistant\n"
FITTING: list[tuple[str, dict[str, Any], SmallTokenizer, str]] = [
    ("kimi_k2.5", {}, SmallTokenizer(*THINK, stops=KIMI_STOPS), "<|im_assistant|>assistant<|im_middle|><think>"),
    ("kimi_k2.5", {"thinking": False}, SmallTokenizer(*THINK, stops=KIMI_STOPS), "<|im_middle|><think></think>"),
    ("kimi_k2_thinking", {}, SmallTokenizer(*THINK, stops=KIMI_STOPS), "<|im_assistant|>assistant<|im_middle|>"),
    ("deepseek_r1", {}, SmallTokenizer(*THINK, stops=["<｜end▁of▁sentence｜>"]), "<｜Assistant｜><think>\n"),
    ("deepseek_r1", {}, SmallTokenizer(*THINK, stops=["<｜end▁of▁sentence｜>"]), "<｜Assistant｜>"),
    ("deepseek_v3.1", {}, SmallTokenizer(*THINK, stops=["<｜end▁of▁sentence｜>"]), "<｜Assistant｜><think>"),
    ("deepseek_v3.1", {"thinking": False}, SmallTokenizer(*THINK, stops=["<｜end▁of▁sentence｜>"]), "<｜Assistant｜></think>"),
    ("qwen3", {}, SmallTokenizer(*THINK, stops=["<|im_end|>"]), CHATML),
    ("qwen3", {}, SmallTokenizer(*THINK, stops=["<|im_end|>"]), CHATML + "<think>\n"),
    ("qwen3", {"thinking": False}, SmallTokenizer(*THINK, stops=["<|im_end|>"]), CHATML + "<think>\n\n</think>\n\n"),
    ("glm", {}, SmallTokenizer(*THINK, stops=Glm.stops), "<|assistant|>"),
    ("glm", {"thinking": False}, SmallTokenizer(*THINK, stops=Glm.stops), "/nothink<|assistant|>\n<think></think>"),
    ("gpt_oss", {}, SmallTokenizer(*GptOss.tokens, stops=GptOss.stops), "<|end|><|start|>assistant"),
    ("tags", {}, SmallTokenizer(), "<|im_start|>assistant\n"),
    ("tags", {"opened_by_prompt": True}, SmallTokenizer(), "assistant\n<think>\nLet me"),
    ("tags", {"single_token": True}, SmallTokenizer(*THINK), "assistant"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "tokenizer", "tail"), FITTING)
def test_a_format_accepts_the_model_it_is_for(
    name: str, options: dict[str, Any], tokenizer: SmallTokenizer, tail: str
) -> None:
    format_named(name, **options).self_test(tokenizer, tail)
    format_named(name, **options).self_test(tokenizer, None)


KIMI = SmallTokenizer(*THINK, stops=KIMI_STOPS)


@pytest.mark.parametrize(
    ("name", "options", "tokenizer", "tail", "error"),
    [
        # K2-Thinking's template under K2.5's format, and the other way round.
        ("kimi_k2.5", {}, KIMI, "<|im_middle|>", r"^model\.reasoning: .*'<think>'.*'<\|im_middle\|>'.*model\.template_options$"),
        ("kimi_k2_thinking", {}, KIMI, "<|im_middle|><think>", r"^model\.reasoning: .*model\.template_options$"),
        ("kimi_k2.5", {}, KIMI, "<think></think>", r"^model\.reasoning: "),
        ("kimi_k2.5", {"thinking": False}, KIMI, "<|im_middle|><think>", r"^model\.reasoning: .*'<think></think>'"),
        ("deepseek_v3.1", {}, SmallTokenizer(*THINK, stops=DeepSeekV31.stops), "<｜Assistant｜></think>", r"^model\.reasoning: "),
        ("qwen3", {}, SmallTokenizer("<think>", stops=["<|im_end|>"]), CHATML, r"^model\.reasoning: .*'</think>' as one token"),
        ("qwen3", {}, SmallTokenizer(*THINK), CHATML, r"^model\.reasoning: .*'<\|im_end\|>' as one token"),
        ("kimi_k2.5", {}, SmallTokenizer(*THINK, "[EOS]", stops=["<|im_end|>"]), "<think>", r"^model\.tokenizer: '\[EOS\]' .*generation_config\.json"),
        ("gpt_oss", {}, SmallTokenizer("<|start|>", stops=GptOss.stops), "", r"^model\.reasoning: .*'<\|channel\|>' as one token"),
        ("tags", {"opened_by_prompt": True}, SmallTokenizer(), "assistant", r"^model\.reasoning\.opened_by_prompt: it is true"),
        ("tags", {}, SmallTokenizer(), "assistant<think>\n", r"^model\.reasoning\.opened_by_prompt: it is false"),
        ("tags", {}, SmallTokenizer(*THINK), "", r"^model\.reasoning\.single_token: .*set it to true"),
        ("tags", {"single_token": True}, SmallTokenizer(), "", r"^model\.reasoning: .*'<think>' as one token"),
    ],
)  # fmt: skip
def test_a_format_that_does_not_fit_the_model_stops_the_run_with_one_line(
    name: str, options: dict[str, Any], tokenizer: SmallTokenizer, tail: str, error: str
) -> None:
    with pytest.raises(EyasError, match=error) as caught:
        format_named(name, **options).self_test(tokenizer, tail)
    assert "\n" not in str(caught.value)


# --- against a reference ------------------------------------------------------------------------------------------

PIECES: list[Token] = [
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
OWN = ["<o>", "</o>", "<t>", "<m>", "<s>"]
MIXED = [*map(Own, OWN), *OWN, "<", "o", "/", "t", ">", "m", "s", " ", "é", b"\xc3", "<o", "x<", "a"]


def symbols(token: Token) -> bytes:
    """The bytes of an ordinary token; for one of the tokenizer's own a byte that no text has."""
    if isinstance(token, Own):
        return bytes([0xF8 + OWN.index(token)])
    return token if isinstance(token, bytes) else token.encode()


def spelling(delimiter: str, own_tokens: Sequence[str]) -> bytes:
    """A delimiter in symbols."""
    parts = (
        re.split("(" + "|".join(map(re.escape, own_tokens)) + ")", delimiter) if own_tokens else [delimiter]
    )
    return b"".join(symbols(Own(part) if part in own_tokens else part) for part in parts)


def reference(
    tokens: Sequence[Token], total: int, cut: bool, opened: bool, plan: Delimited
) -> tuple[str, int]:
    """The splitter told again, symbol by symbol: delimiters as events, each a step of the state machine."""
    data = b"".join(map(symbols, tokens))
    spans, at = [], 0
    for token in tokens:
        spans.append((at, at + len(symbols(token))))
        at = spans[-1][1]
    kinds = [
        (plan.open, "open"),
        (plan.close, "close"),
        *((closer, "tool") for closer in plan.implicit_closers),
    ]
    known = [(spelling(text, plan.tokens), kind) for text, kind in kinds]
    events = [
        (start, start + len(delimiter), kind)
        for start in range(len(data))
        for delimiter, kind in known
        if data.startswith(delimiter, start)
    ]

    begin = 0
    if plan.drafts and any(kind == "close" for *_, kind in events):
        events = [event for event in events if event[2] != "tool"]
    if not opened:
        if not events or events[0][2] != "open" or data[: events[0][0]].strip():
            return "none", 0
        begin = events.pop(0)[1]
    ended: tuple[int, int, str] | None = None
    stray = reopened = twice = False
    for event in events:
        kind = event[2]
        before = data[: event[0]].endswith(spelling(plan.continues, plan.tokens)) if plan.continues else False
        if ended is None and kind == "open":
            stray |= not before
        elif ended is None:
            ended = event
        elif kind == "open":
            reopened = True
        elif kind == "close" and ended[2] == "close":
            twice = True
    if ended is None:
        return "truncated_in_reasoning" if cut else "unclosed", total
    start, end, kind = ended
    if kind == "close":
        count = sum(1 for low, _ in spans if low < end)
    else:
        count = sum(1 for _, high in spans if high <= start)
    if stray:
        return "stray_open", count
    if reopened:
        return "reopened", count
    if twice:
        return "double_close", count
    if not data[begin:start].strip():
        return "empty", count
    return "closed" if kind == "close" else "closed_by_tool", count


def agrees(
    plan: Delimited, tokens: Sequence[Token], prompt: Sequence[Token], cut: bool, opened: bool
) -> None:
    made = response(tokens, prompt=prompt, cut=cut)
    found = plan.split(made)
    expected = reference(tokens, len(made.output_ids), cut, opened, plan)
    assert (found.state, found.reasoning_tokens) == expected


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=24),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["</o>", "◁c▷"]),
    st.sampled_from([[], ["<t>"]]),
)
def test_split_of_text_agrees_with_a_byte_by_byte_reference(
    tokens: list[Token], cut: bool, opened: bool, close: str, tools: list[str]
) -> None:
    options = TagsOptions(open="<o>", close=close, opened_by_prompt=opened, implicit_closers=tools)
    agrees(Tags(options), tokens, [], cut, opened)


class Single(Delimited):
    """Delimiters of one token each."""

    name = "single"
    open, close, implicit_closers = "<o>", "</o>", ("<t>",)
    tokens = (open, close, *implicit_closers)
    prompt_ends = ("<o>", "<s>")


class Sequences(Delimited):
    """Delimiters of own and ordinary tokens, as harmony has them."""

    name = "sequences"
    open, close, implicit_closers = "<m>o<o>", "</o><s>a<m>a<o>", ("<s>a<m>t", "<s>a<t>")
    tokens = ("<o>", "</o>", "<m>", "<s>", "<t>")
    drafts = False
    continues = "</o><s>a"
    prompt_ends = ("<s>",)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(MIXED), max_size=24), st.booleans(), st.booleans())
def test_split_on_ids_agrees_with_the_reference(tokens: list[Token], cut: bool, opened: bool) -> None:
    agrees(Single(None), tokens, ["<o>", Own("<o>" if opened else "<s>"), "\n"], cut, opened)


PHRASES = [Sequences.open, Sequences.close, *Sequences.implicit_closers, Sequences.continues]


@st.composite
def phrases(draw: st.DrawFn) -> list[Token]:
    """Whole delimiters as the tokenizer has them or spelt out, with pieces of them between."""
    tokens: list[Token] = []
    for phrase in draw(st.lists(st.sampled_from([*PHRASES, *MIXED]), max_size=10)):
        if phrase in PHRASES and draw(st.integers(0, 4)):
            parts = re.split("(<[^>]+>)", str(phrase))
            tokens += [Own(part) if part in OWN else part for part in parts if part]
        else:
            tokens.append(phrase)
    return tokens


@settings(max_examples=400, deadline=None)
@given(phrases(), st.booleans())
def test_split_on_sequences_agrees_with_the_reference(tokens: list[Token], cut: bool) -> None:
    agrees(Sequences(None), tokens, [Own("<s>"), "a"], cut, opened=False)
