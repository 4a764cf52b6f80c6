"""What chat-shaped datasets have in common: columns of text, and lists of turns under many names."""

from __future__ import annotations

from typing import Any, Literal

from eyas.plugins import Skip
from eyas.records import Message

# Every role name that the public sets use. `function_call` is a ShareGPT turn in which the assistant calls.
ROLES: dict[str, Literal["system", "user", "assistant", "tool"]] = {
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


def text(row: dict[str, Any], column: str) -> str:
    """The text in a column. Raises KeyError if there is no such column, TypeError if it holds something else."""
    value = row[column]
    if not isinstance(value, str):
        raise TypeError(f"column {column!r} holds {type(value).__name__}, not text")
    return value


def question_and_answer(question: str, answer: str) -> list[Message]:
    return [Message(role="user", content=question), Message(role="assistant", content=answer)]


def messages(turns: Any, column: str, role: str, *contents: str) -> list[Message] | Skip:
    """The turns of a column as messages. `role` names the field of the role, `contents` those that may hold the text.

    Raises TypeError or ValueError naming column and turn for what is not a list of turns.
    """
    if not isinstance(turns, list):
        raise TypeError(f"column {column!r} holds {type(turns).__name__}, not a list of turns")
    found: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        where = f"column {column!r}, turn {number}"
        if not isinstance(turn, dict):
            raise TypeError(f"{where}: is {type(turn).__name__}, not an object")
        name = turn.get(role)
        if not isinstance(name, str):
            raise ValueError(f"{where}: has no text in {role!r}")
        if name not in ROLES:
            return UNKNOWN_ROLE
        content = next((turn[field] for field in contents if turn.get(field) is not None), None)
        if content is None and ROLES[name] == "assistant":
            content = ""  # an answer that is nothing but tool calls
        if isinstance(content, list):
            content = _join_parts(content)
            if content is None:
                return NOT_TEXT
        if not isinstance(content, str):
            raise ValueError(f"{where}: has no text in {' or '.join(map(repr, contents))}")
        found.append(
            Message(
                role=ROLES[name],
                content=content,
                name=_label(turn.get("name")),
                tool_calls=without_nulls(turn.get("tool_calls")) or None,
                tool_call_id=_label(turn.get("tool_call_id")),
            )
        )
    return found


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
