"""How a conversation goes on: the answer as history, recorded tool results under its own calls, or the reason why it ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers import prompt
from replies import END, Own
from replies import response as made

from eyas.config import ModelConfig
from eyas.plugins import registry
from eyas.records import Message, Prompt, Response, Turn
from eyas.turns import Ended, next_turn

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
OPEN, CLOSE, CALL, CALLED = Own("<think>"), Own("</think>"), Own("<tool_call>"), Own("</tool_call>")
KIMI = [
    Own(f"<|tool_{part}|>")
    for part in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
]
NEXT = Message(role="user", content="And then?")


def call(name: str = "look", identity: str | None = "call_7", **arguments: Any) -> dict[str, Any]:
    named = {"id": identity} if identity else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def result(content: str = "It is dark.", identity: str | None = "call_7") -> Message:
    return Message(role="tool", content=content, tool_call_id=identity)


def conversation(*following: Message, calls: list[dict[str, Any]] | None = None) -> Prompt:
    return prompt("k", tools=[TOOL], turns=[Turn(calls=calls or [], messages=list(following))])


def goes_on(
    asked: Prompt, reply: Response, reasoning: str = "qwen3", tools: str = "template"
) -> list[Message]:
    """The messages behind the opening."""
    model = ModelConfig(id="m", tools=tools)  # type: ignore[arg-type]
    format_ = registry().create("reasoning", reasoning, {}, "model.reasoning")
    found = next_turn(asked, 0, reply, model, format_)  # type: ignore[arg-type]
    assert found.messages[:1] == asked.messages and (found.key, found.turns) == (asked.key, asked.turns)
    return found.messages[1:]


def ends(asked: Prompt, reply: Response, reasoning: str = "qwen3", **options: Any) -> str:
    with pytest.raises(Ended) as end:
        goes_on(asked, reply, reasoning, **options)
    return str(end.value)


def qwen(*answer: str, thought: str = "\nHm.\n", **fields: Any) -> Response:
    return made([OPEN, thought, CLOSE, "\n\n", *answer], **fields)


def written(name: str = "look", **arguments: Any) -> list[str]:
    return [CALL, "\n" + json.dumps({"name": name, "arguments": arguments}) + "\n", CALLED]


# --- history -----------------------------------------------------------------------------------------------------


def test_an_answer_is_history_with_its_reasoning_apart_and_the_recorded_user_goes_on() -> None:
    assert goes_on(conversation(NEXT), qwen("It is 4.\n")) == [
        Message(role="assistant", content="It is 4.", reasoning_content="Hm."),
        NEXT,
    ]


def test_reasoning_that_the_prompt_opened_is_history_without_its_delimiters() -> None:
    reply = made(["Hm.", CLOSE, "Four."], prompt=["Hi", OPEN])
    (said, _) = goes_on(conversation(NEXT), reply, "kimi_k2.5")
    assert (said.content, said.reasoning_content) == ("Four.", "Hm.")


@pytest.mark.parametrize("reasoning", ["none", "qwen3"])
def test_an_answer_without_reasoning_has_none_in_history(reasoning: str) -> None:
    (said, _) = goes_on(conversation(NEXT), made(["Four."]), reasoning)
    assert said == Message(role="assistant", content="Four.")


def test_harmony_gives_reasoning_under_the_name_that_its_template_reads() -> None:
    start, channel, message, end = map(Own, ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"))
    again = [end, start, "assistant", channel, "analysis", message]
    final = [end, start, "assistant", channel, "final", message, "Four."]
    reply = made([channel, "analysis", message, "Hm.", *again, "Oh.", *final], prompt=["Hi", start])
    (said, _) = goes_on(conversation(NEXT), reply, "gpt_oss")
    assert (said.content, said.thinking, said.reasoning_content) == ("Four.", "Hm.\nOh.", None)
    to_tool = [end, start, "assistant", channel, "commentary to=functions.look ", Own("<|constrain|>"), "json", message, "{}"]  # fmt: skip
    reply = made([channel, "analysis", message, "Hm.", *to_tool], prompt=["Hi", start])
    (said, _) = goes_on(conversation(result(), calls=[call()]), reply, "gpt_oss")
    assert (said.content, said.thinking, len(said.tool_calls or [])) == ("", "Hm.", 1)


# --- calls and results -------------------------------------------------------------------------------------------


def test_a_recorded_result_is_spliced_in_where_the_call_is_the_recorded_one() -> None:
    asked = conversation(result(), NEXT, calls=[call(at="home", n=1)])
    said, told, then = goes_on(asked, qwen("I look.\n", *written(n=1.0, at="home")))
    shaped = {
        "id": "call_7",
        "type": "function",
        "function": {"name": "look", "arguments": {"n": 1.0, "at": "home"}},
    }
    assert said == Message(role="assistant", content="I look.", reasoning_content="Hm.", tool_calls=[shaped])
    assert (told, then) == (result(), NEXT)


def test_a_result_has_the_id_that_the_model_gave_its_call() -> None:
    section, begin, argument, end, over = KIMI
    tokens = ["Hm.", CLOSE, section, begin, "functions.look:0", argument, "{}", end, begin, "functions.look:1", argument, '{"at": "b"}', end, over]  # fmt: skip
    reply = made(tokens, prompt=["Hi", OPEN])
    results = [result("second", "b"), result("first", "a")]
    said, *told = goes_on(
        conversation(*results, calls=[call(identity="a"), call(identity="b", at="b")]), reply, "kimi_k2.5"
    )
    assert [made["id"] for made in said.tool_calls or []] == ["functions.look:0", "functions.look:1"]
    assert [(m.content, m.tool_call_id) for m in told] == [
        ("second", "functions.look:1"),
        ("first", "functions.look:0"),
    ]


def test_results_without_an_id_belong_to_the_calls_in_order() -> None:
    asked = conversation(
        result("a", None), result("b", None), calls=[call(identity=None), call(identity=None)]
    )
    said, *told = goes_on(asked, qwen(*written(), *written()))
    assert [made["id"] for made in said.tool_calls or []] == ["call_0_0", "call_0_1"]
    assert [(m.content, m.tool_call_id) for m in told] == [("a", "call_0_0"), ("b", "call_0_1")]


def test_a_call_that_ends_reasoning_is_a_call() -> None:
    asked = conversation(result(), calls=[call()])
    said, _ = goes_on(asked, made([OPEN, "Hm. ", *written()]))
    assert (said.content, said.reasoning_content, len(said.tool_calls or [])) == ("", "Hm.", 1)


def test_where_the_template_knows_no_tools_the_call_stays_in_the_content() -> None:
    text = '{"name": "look", "arguments": {}}'
    said, told = goes_on(conversation(result(), calls=[call()]), made([text]), "none", tools="system")
    assert said == Message(role="assistant", content=text) and told == result()


# --- where it ends -----------------------------------------------------------------------------------------------

CALLING = conversation(result(), calls=[call(at="home")])
ENDS: list[tuple[str, Prompt, Response]] = [
    ("the model called no tool where the recorded answer calls one", CALLING, qwen("It is dark.")),
    ("the model called a tool where the recorded answer calls none", conversation(NEXT), qwen(*written())),
    ("the model called other tools than the recorded answer", CALLING, qwen(*written("wait", at="home"))),
    ("the model called other tools than the recorded answer", CALLING, qwen(*written(at="home"), *written(at="home"))),
    ("the model called a tool with other arguments than the recorded ones", CALLING, qwen(*written(at="Home"))),
    ("the model called a tool with other arguments than the recorded ones", CALLING, qwen(*written(at="home", n=1))),
    ("a tool call of the answer before it cannot be read", CALLING, qwen(CALL, '{"name": "look"', CALLED)),
    ("a tool call of the answer before it cannot be read", CALLING, qwen('<tool_call>{"name": "look", "arguments": {"at": "home"}}</tool_call>')),
    ("a recorded tool call cannot be read", conversation(result(), calls=[{"function": {}}]), qwen(*written())),
    ("a recorded tool result belongs to no recorded call", conversation(result()), qwen("It is dark.")),
    ("a recorded tool result belongs to no recorded call", conversation(result(), result(), calls=[call(), call(identity="b")]), qwen(*written(), *written())),
    ("a tool call of the answer before it cannot be read", CALLING, qwen(CALL, '{"name": "look", "arguments": {"at": ' + "[" * 20_000, CALLED)),
    ("a recorded tool call has no result", conversation(NEXT, calls=[call()]), qwen(*written())),
    ("the answer before it was cut at the limit", conversation(NEXT), qwen("It is", cut=True)),
    ("the answer before it has malformed reasoning (unclosed)", conversation(NEXT), made([OPEN, "Hm."])),
    ("the answer before it has malformed reasoning (double_close)", conversation(NEXT), qwen("It is 4.", CLOSE)),
    ("the answer before it holds a control token", conversation(NEXT), qwen("It is 4.", Own("<tool_response>"))),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "asked", "reply"), ENDS)
def test_a_conversation_ends_where_the_record_does_not_fit_the_answer(
    reason: str, asked: Prompt, reply: Response
) -> None:
    assert ends(asked, reply) == reason


def test_brackets_without_end_are_content_where_calls_have_no_marks() -> None:
    said, then = goes_on(conversation(NEXT), made(["[" * 20_000]), "none", tools="system")
    assert (said.content, said.tool_calls, then) == ("[" * 20_000, None, NEXT)


def test_a_control_token_inside_an_answer_ends_it() -> None:
    reply = made(["It is 4.", "<|im_start|>", "user"])
    smuggled = made(["It is 4.", "x"], control_ids=[reply.output_ids[1], END])
    assert ends(conversation(NEXT), smuggled, "none") == "the answer before it holds a control token"
