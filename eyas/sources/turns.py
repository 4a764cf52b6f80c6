"""What chat-shaped datasets have in common: columns of text, and lists of turns under many names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from eyas.plugins import Skip
from eyas.records import Message

Role = Literal["system", "user", "assistant", "tool"]

# Every role name that the public sets use. `function_call` is a ShareGPT turn in which the assistant calls.
ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
UNKNOWN_ROLE = Skip("a turn has an unknown role")
NOT_TEXT = Skip("a turn has content that is not text")
NO_TEXT = Skip("a turn has no text")


def text(row: dict[str, Any], column: str) -> str:
    """The text in a column. Raises KeyError if there is no such column, TypeError if it holds something else."""
    value = row[column]
    if not isinstance(value, str):
        raise TypeError(f"column {column!r} holds {type(value).__name__}, not text")
    return value


def system_message(row: dict[str, Any], column: str | None) -> list[Message]:
    """The system prompt in a column; none where the row has null or a blank there, or `column` is None."""
    if column is None or row[column] is None or not (content := text(row, column)).strip():
        return []
    return [Message(role="system", content=content)]


def identity(row: dict[str, Any], column: str | None) -> str | None:
    """The row's id as text; None if there is no such column or the row has none. Raises TypeError for what is no id."""
    value = None if column is None else row.get(column)
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"column {column!r} holds {type(value).__name__}, not an id")
    return str(value)


def question_and_answer(question: str, answer: str) -> list[Message]:
    return [Message(role="user", content=question), Message(role="assistant", content=answer)]


def decoded(value: Any, column: str) -> Any:
    """`value`, or what it spells in JSON if it is text: so SWE-smith and CSV files keep lists in a column."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"column {column!r} is text but not JSON ({error})") from None


def tools(row: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """The tools in a column, as JSON text or as a list; none if it is missing, null or empty."""
    found = without_nulls(decoded(row.get(column) or [], column)) or []
    if not isinstance(found, list):
        raise TypeError(f"column {column!r} holds {type(found).__name__}, not a list of tools")
    for tool in found:
        if not isinstance(tool, dict):
            raise TypeError(f"column {column!r} holds {type(tool).__name__} in its list, not a tool")
    return found


def messages(
    turns: Any, column: str, role: str, *contents: str, roles: Mapping[str, Role] = ROLES
) -> list[Message] | Skip:
    """The turns of a column as messages. `role` names the field of the role, `contents` those that may hold the text.

    A field that is null is one that the row has not: Parquet gives every object the fields of all others. Raises
    TypeError or ValueError naming column and turn for what is not a list of turns.
    """
    if not isinstance(turns, list):
        raise TypeError(f"column {column!r} holds {type(turns).__name__}, not a list of turns")
    found: list[Message] = []
    open_call: str | None = None  # a call that came without an id, whose result has none either
    for number, turn in enumerate(turns, start=1):
        where = f"column {column!r}, turn {number}"
        if not isinstance(turn, dict):
            raise TypeError(f"{where}: is {type(turn).__name__}, not an object")
        name = turn.get(role)
        if not isinstance(name, str):
            raise ValueError(f"{where}: has no text in {role!r}")
        if name not in roles:
            return UNKNOWN_ROLE
        answers = roles[name] == "assistant"
        content = next((turn[field] for field in contents if turn.get(field) is not None), None)
        if content is None and answers:
            content = ""  # an answer that is nothing but tool calls
        if isinstance(content, list):
            content = _join_parts(content)
        elif content is None:
            if not any(field in turn for field in contents):
                raise ValueError(f"{where}: has no text in {' or '.join(map(repr, contents))}")
            return NO_TEXT
        if not isinstance(content, str):
            return NOT_TEXT
        # Others call nothing, and what was called once must not get into a prompt.
        calls = (without_nulls(turn.get("tool_calls")) or None) if answers else None
        if calls is not None and not (
            isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
        ):
            raise TypeError(f"{where}: 'tool_calls' is not a list of calls")
        identity = _label(turn.get("tool_call_id"))
        if roles[name] == "tool":
            several = turn.get("tool_call_ids")  # SWE-smith's way, a list of one
            if identity is None and isinstance(several, list) and several:
                identity = _label(several[0])
            identity, open_call = identity or open_call, None
        elif answers and calls is None and (function := _function(turn, name, content)):
            open_call = f"call_{number}"
            calls = [{"id": open_call, "type": "function", "function": function}]
            content = "" if name == "function_call" else content
        found.append(
            Message(
                role=roles[name],
                content=content,
                name=_label(turn.get("name")),
                tool_calls=calls,
                tool_call_id=identity,
            )
        )
    return found


def _function(turn: dict[str, Any], name: str, content: str) -> dict[str, Any] | None:
    """Name and arguments (as JSON text, OpenAI's way) of the function that a turn calls without `tool_calls`.

    `function_call` is OpenAI's older field for it, and in ShareGPT's kind of set a turn whose value is the call.
    """
    value = without_nulls(turn.get("function_call"))
    if name == "function_call":
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    spelt = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": value["name"], "arguments": spelt}


def _label(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _join_parts(parts: list[Any]) -> str | None:
    """OpenAI content parts as one text, joined by nothing as chat templates do; None if a part is not text."""
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


def without_nulls(value: Any) -> Any:
    """`value` without the fields that are null: Parquet gives every object the fields of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
