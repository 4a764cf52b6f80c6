"""Tool calls are read from answers as serving stacks read them, and what cannot be read is said to be so."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from eyas.tool_calls import DEEPEST, NOTATIONS, Call, Notation, canonical, recorded

LOOK: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string"}, "for": {"type": "integer"}, "in": {"type": "array"}},
            },
        },
    }
]
ARGUMENTS = {"at": "12", "for": 3, "in": ["a", "b"]}
JSON = json.dumps(ARGUMENTS)

READ: dict[str, tuple[Notation, str, str]] = {
    "Hermes, Qwen3": (
        "tagged",
        f'Let me see.\n<tool_call>\n{{"name": "look", "arguments": {JSON}}}\n</tool_call>',
        "Let me see.\n",
    ),
    "Qwen3-Coder": (
        "tagged",
        "<tool_call>\n<function=look>\n<parameter=at>\n12\n</parameter>\n<parameter=for>\n3\n</parameter>\n"
        '<parameter=in>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>',
        "",
    ),
    "GLM-4.5": (
        "tagged",
        "Hm.<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>12</arg_value>\n<arg_key>for</arg_key>\n<arg_value>3</arg_value>\n"
        '<arg_key>in</arg_key>\n<arg_value>["a", "b"]</arg_value>\n</tool_call>',
        "Hm.",
    ),
    "Kimi": (
        "kimi",
        f"So: <|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
        "So: ",
    ),
    "DeepSeek-R1": (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
    ),
    "DeepSeek-V3.1": (
        "deepseek",
        f"Now.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Now.",
    ),
    "DeepSeek-V3.2": (
        "deepseek",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="at" string="true">12</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="for" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="in" string="false">["a", "b"]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "",
    ),
    "gpt-oss after reasoning": (
        "harmony",
        f"<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{JSON}",
        "",
    ),
    "gpt-oss, recipient first, a word to the user before": (
        "harmony",
        f"<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant to=functions.look<|channel|>commentary json<|message|>{JSON}",
        "One moment.",
    ),
    "system prompt": ("plain", f'{{"name": "look", "arguments": {JSON}}}\n', ""),
    "Llama 3.1": ("plain", f' {{"name": "look", "parameters": {JSON}}}', ""),
}


@pytest.mark.parametrize("name", READ)
def test_a_call_is_read_with_its_name_its_arguments_and_the_content_before_it(name: str) -> None:
    notation, text, content = READ[name]
    said, (call,) = NOTATIONS[notation](text, LOOK)
    assert said == content
    assert (call.name, call.arguments) == ("look", ARGUMENTS)
    assert call.id == ("functions.look:0" if notation == "kimi" else None)


@pytest.mark.parametrize("notation", NOTATIONS)
def test_an_answer_without_a_call_is_all_content(notation: Notation) -> None:
    text = 'The JSON is {"name": "look"}.\n\nIs that so?'
    assert NOTATIONS[notation](text, LOOK) == (text, [])


def test_several_calls_keep_their_order() -> None:
    one, two = (
        f'<tool_call>\n{{"name": "look", "arguments": {{"at": "{at}"}}}}\n</tool_call>' for at in "ab"
    )
    _, calls = NOTATIONS["tagged"](f"{one}\n{two}", LOOK)
    assert [call.arguments["at"] for call in calls] == ["a", "b"]
    section = "".join(
        f'<|tool_call_begin|>functions.look:{n}<|tool_call_argument_begin|>{{"at": "{at}"}}<|tool_call_end|>'
        for n, at in enumerate("ab")
    )
    _, calls = NOTATIONS["kimi"](f"<|tool_calls_section_begin|>{section}<|tool_calls_section_end|>", LOOK)
    assert [(call.id, call.arguments["at"]) for call in calls] == [
        ("functions.look:0", "a"),
        ("functions.look:1", "b"),
    ]
    _, calls = NOTATIONS["plain"](
        '[{"name": "look", "arguments": {}}, {"name": "look", "arguments": {}}]', LOOK
    )
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("notation", "text"),
    [
        ("tagged", '<tool_call>\n{"name": "look", "arguments": {'),
        ("tagged", "<tool_call>\nlook at it, please\n<b></tool_call>"),
        ("tagged", '<tool_call>{"arguments": {}}</tool_call>'),
        ("tagged", "<tool_call><function=look><parameter=at>home</function></tool_call>"),
        ("tagged", "<tool_call>look<arg_key>for<arg_key>at</arg_key><arg_value>home</arg_value></tool_call>"),
        ("tagged", f"<tool_call>look{'<arg_key>at</arg_key><arg_value>' * 300}</tool_call>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>look<|tool_call_begin|>look:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{<|tool_call_end|>"),
        ("kimi", "<|tool_calls_section_begin|>look<|tool_calls_section_end|>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_calls_section_end|>"),
        ("deepseek", "<｜tool▁calls▁begin｜>look<｜tool▁calls▁end｜>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>[]<｜tool▁call▁end｜>"),
        ("deepseek", '<｜DSML｜function_calls><｜DSML｜invoke name="look">'),
        ("deepseek", '<｜DSML｜invoke name="look"><｜DSML｜parameter name="at" string="true">home</｜DSML｜invoke>'),
        ("deepseek", '<｜DSML｜invoke name="look"><｜DSML｜parameter name="at">home</｜DSML｜parameter></｜DSML｜invoke>'),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁call▁end｜>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("tagged", "<tool_call><function=look><parameter=>home</parameter></function></tool_call>"),
        ("tagged", "<tool_call><function=look><parameter=at>a<parameter=at>b</parameter></function></tool_call>"),
        ("harmony", "<|start|>assistant<|channel|>commentary to=functions.look<|message|>{"),
        ("harmony", "<|channel|>commentary to=functions.look"),
    ],
)  # fmt: skip
def test_a_call_that_is_begun_and_cannot_be_read_is_an_error(notation: Notation, text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        NOTATIONS[notation](text, LOOK)


# Notation, what an answer starts with, what it then repeats without end.
LOOPS: list[tuple[Notation, str, str]] = [
    ("tagged", "", "<tool_call>"),
    ("tagged", "", "<tool_call>look</tool_call>"),
    ("tagged", "<tool_call>", "<function=look>"),
    ("tagged", "<tool_call><function=look>", "<parameter="),
    ("tagged", "<tool_call><function=look>", "<parameter=at>\n"),
    ("tagged", "<tool_call><function=look><parameter=at>", "\n"),
    ("tagged", "<tool_call>look", "<arg_key>"),
    ("tagged", "<tool_call>look", "<arg_key>at</arg_key><arg_value>"),
    ("tagged", "<tool_call>look<arg_key>at</arg_key>", " "),
    ("kimi", "<|tool_calls_section_begin|>", "<|tool_call_begin|>look:0<|tool_call_argument_begin|>"),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>", " "),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>", ":0 "),
    ("deepseek", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"),
    ("deepseek", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```"),
    ("deepseek", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>look<｜tool▁sep｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "look<｜tool▁sep｜>"),
    ("deepseek", "", '<｜DSML｜invoke name="look">'),
    ("deepseek", '<｜DSML｜invoke name="look">', '<｜DSML｜parameter name="at" string="true">'),
    ("harmony", "", "<|start|>assistant<|channel|>"),
    ("harmony", "<|start|>assistant", " to="),
    ("harmony", "", "<|message|>"),
    ("plain", "", '{"name": "look", "arguments": {}} '),
    ("plain", "", "[] "),
]  # fmt: skip
LOOPING = """
import contextlib, json, sys
from eyas.tool_calls import NOTATIONS
for notation, start, again in json.loads(sys.argv[1]):
    for end in "", "</tool_call>", "</｜DSML｜invoke>":
        with contextlib.suppress(ValueError):
            NOTATIONS[notation](start + again * (1_000_000 // len(again)) + end, [])
"""


def test_answers_of_a_million_characters_that_loop_are_read_in_linear_time() -> None:
    # Seconds for all; each pattern that looks for an end from every beginning would take minutes for one.
    subprocess.run([sys.executable, "-c", LOOPING, json.dumps(LOOPS)], check=True, timeout=60)


@pytest.mark.parametrize(
    "parameters", [None, "none", ["at"], {"properties": ["at"]}, {"properties": {"at": "a place"}}]
)
def test_a_tool_whose_schema_is_none_can_be_called(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    text = "<tool_call>look<arg_key>at</arg_key><arg_value>home</arg_value></tool_call>"
    assert NOTATIONS["tagged"](text, [tool]) == ("", [Call("look", {"at": "home"})])


def test_arguments_may_be_nested_so_deep_and_no_deeper_whoever_asks() -> None:
    def look(depth: int) -> str:
        return f'{{"name": "look", "arguments": {{"at": {"[" * depth}{"]" * depth}}}}}'

    _, (call,) = NOTATIONS["plain"](look(DEEPEST - 2), LOOK)
    assert canonical(call.arguments).count("[") == DEEPEST - 2
    for depth in (DEEPEST, 400, 20_000):
        assert NOTATIONS["plain"](look(depth), LOOK) == (look(depth), [])
        with pytest.raises((ValueError, RecursionError)):
            NOTATIONS["tagged"](f"<tool_call>{look(depth)}</tool_call>", LOOK)


def test_a_json_answer_is_a_call_only_of_a_known_tool() -> None:
    text = '{"name": "Bob", "arguments": {"age": 3}}'
    assert NOTATIONS["plain"](text, LOOK) == (text, [])
    assert NOTATIONS["plain"](text, []) == (text, [])


def test_arguments_are_equal_whatever_their_order_spacing_and_spelling_of_numbers() -> None:
    assert canonical({"b": [1.0, {"y": True, "x": "é"}], "a": 2}) == canonical(
        {"a": 2.0, "b": [1, {"x": "é", "y": True}]}
    )
    different = [{"a": 1}, {"a": "1"}, {"a": True}, {"a": 1.5}, {"a": None}, {}, {"a": [1]}]
    assert len(set(map(canonical, different))) == len(different)


def test_recorded_calls_have_arguments_as_text_or_as_an_object() -> None:
    calls = [
        {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"at": "a"}'}},
        {"function": {"name": "look", "arguments": {"at": "a"}}},
        {"function": {"name": "wait", "arguments": ""}},
    ]
    assert recorded(calls) == [Call("look", {"at": "a"}, "x"), Call("look", {"at": "a"}), Call("wait", {})]
    for wrong in ({}, {"function": {"name": 3}}, {"function": {"name": "look", "arguments": "[1]"}}):
        with pytest.raises(ValueError, match=r"."):
            recorded([wrong])
