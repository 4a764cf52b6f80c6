"""How a conversation goes on from an answer: the answer as history, the recorded messages behind it, or why it ends there."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from eyas.config import ModelConfig
from eyas.plugins import Reasoning, Said
from eyas.records import Message, Prompt, Reply, Turn
from eyas.tool_calls import Call, canonical, recorded

WHOLE = (
    "closed",
    "closed_by_tool",
    "empty",
    "none",
)  # reasoning states of answers that a serving stack reads as meant
UNREADABLE = "a tool call of the answer before it cannot be read"


class Ended(Exception):
    """The conversation ends at this answer; the argument is a short constant phrase."""


def next_turn(prompt: Prompt, turn: int, reply: Reply, model: ModelConfig, reasoning: Reasoning) -> Prompt:
    """The prompt of the turn after `turn`, whose `prompt` got `reply`. Raises Ended if nothing leads there."""
    try:
        following = _on(prompt, turn, reply, model, reasoning)
    except RecursionError:  # thousands of brackets, as an answer in a loop has them
        raise Ended(UNREADABLE) from None
    return replace(prompt, messages=[*prompt.messages, *following])


def _on(prompt: Prompt, at: int, reply: Reply, model: ModelConfig, reasoning: Reasoning) -> list[Message]:
    turn = prompt.turns[at]
    said = _whole(prompt, reply, reasoning)
    calls = _matched(said.calls, turn, at)
    message = Message(
        role="assistant",
        # As SGLang's parsers leave it; templates write white space of their own around both.
        content=(said.unparsed if model.tools == "system" else said.content).strip(),
    )
    if thought := said.reasoning.strip():
        message = replace(message, **{reasoning.history_field: thought})
    if calls and model.tools == "template":
        # Arguments as an object: SGLang and vLLM parse them before the template sees them.
        shaped = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
        message = replace(message, tool_calls=shaped)
    return [message, *_spliced(turn, calls)]


def _whole(prompt: Prompt, reply: Reply, reasoning: Reasoning) -> Said:
    """What the reply says. Raises Ended for one that a serving stack would not read as it was meant."""
    if reply.finish.type == "length":
        raise Ended("the answer before it was cut at the limit")
    split = reasoning.split(reply)
    if split.state not in WHOLE:
        raise Ended(f"the answer before it has malformed reasoning ({split.state})")
    inner = set(reply.output_ids[:-1] if reply.output_ids[-1] in reply.stop_ids else reply.output_ids)
    if split.foreign or inner & (set(reply.control_ids) - split.markers):
        raise Ended("the answer before it holds a control token")
    try:
        return reasoning.said(reply, prompt.tools)
    except ValueError:
        raise Ended(UNREADABLE) from None


def _matched(calls: Sequence[Call], turn: Turn, at: int) -> list[Call]:
    """The model's calls with the ids that it or the record gave them. Raises Ended unless they are the recorded ones."""
    try:
        known = recorded(turn.calls)
    except ValueError:
        raise Ended("a recorded tool call cannot be read") from None
    if calls and not known:
        raise Ended("the model called a tool where the recorded answer calls none")
    if known and not calls:
        raise Ended("the model called no tool where the recorded answer calls one")
    if [call.name for call in calls] != [call.name for call in known]:
        raise Ended("the model called other tools than the recorded answer")
    if list(map(_arguments, calls)) != list(map(_arguments, known)):
        raise Ended("the model called a tool with other arguments than the recorded ones")
    return [
        Call(call.name, call.arguments, call.id or old.id or f"call_{at}_{number}")
        for number, (call, old) in enumerate(zip(calls, known, strict=True))
    ]


def _arguments(call: Call) -> str:
    return canonical(call.arguments)


def _spliced(turn: Turn, calls: Sequence[Call]) -> list[Message]:
    """The recorded messages, results of tools under the ids of the model's calls. Raises Ended if one has no call, or no result.

    A result belongs to the call that it names. One that names none belongs to the first that has no result yet, and one
    that names an unknown one to the first that has no name, either.
    """
    waiting = {
        str(old.get("id") or f"#{number}"): call
        for number, (old, call) in enumerate(zip(turn.calls, calls, strict=True))
    }
    messages = []
    for message in turn.messages:
        if message.role != "tool":
            messages.append(message)
            continue
        name = message.tool_call_id
        if name not in waiting:
            name = next((other for other in waiting if name is None or other.startswith("#")), None)
        if name is None:
            raise Ended("a recorded tool result belongs to no recorded call")
        messages.append(replace(message, tool_call_id=waiting.pop(name).id))
    if waiting:
        raise Ended("a recorded tool call has no result")
    return messages
