"""Prompts of glaiveai/glaive-function-calling-v2: dialogues with function calls, as one text per row.

Columns per the dataset card and the anyscale templates' `preprocessing.py`. The text is not machine-made
throughout, so each habit of it is met where it is met below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.records import Message
from eyas.sources.turns import text

# A turn starts at a paragraph (two newlines, or three where there are functions), or right after the end mark; "USER:" in
# the middle of a text is text.
TURN = re.compile(r"(?:\A\s*|\n{2,}|<\|endoftext\|>\s*)(USER|ASSISTANT|FUNCTION RESPONSE):")
# A control token in many vocabularies: it must never reach a tokenizer as data.
END = "<|endoftext|>"
# Only answers end with the mark, so what stands before one is an answer, wherever on its line it begins.
MERGED = re.compile(r"\s*ASSISTANT:(?=.*<\|endoftext\|>)", re.DOTALL)
CALL = "<functioncall>"
# The arguments are JSON inside single quotes, so a call is no JSON; stray braces may follow.
QUOTED_CALL = re.compile(
    r"\s*\{\s*\"name\"\s*:\s*(?P<name>\"(?:[^\"\\]|\\.)*\")\s*,\s*\"arguments\"\s*:\s*'(?P<arguments>.*)'[\s}]*\Z",
    re.DOTALL,
)
UNREADABLE_FUNCTIONS = Skip("function definitions are not JSON")


class Glaive(Source):
    """Dialogues with function calls of glaiveai/glaive-function-calling-v2, tools in the OpenAI shape."""

    name = "glaive"

    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        instruction, chat = text(row, "system"), text(row, "chat")
        instruction = instruction.replace(END, "").strip().removeprefix("SYSTEM:").strip()
        tools: list[dict[str, Any]] = []
        if "{" in instruction:
            instruction, _, definitions = instruction.partition("{")
            functions = _functions("{" + definitions)
            if functions is None:
                return UNREADABLE_FUNCTIONS
            # The dash led over to the functions that are no longer part of the text.
            instruction = instruction.rstrip(" \n[-")
            tools = [{"type": "function", "function": function} for function in functions]
        turns = _turns(chat)
        if turns is None:
            return Skip("chat does not start with a turn mark")
        system = [Message(role="system", content=instruction)] if instruction else []
        return Conversation(system + turns, tools)


def _functions(definitions: str) -> list[dict[str, Any]] | None:
    """The functions of concatenated JSON objects, commas and brackets or not; None if anything else is there."""
    found = []
    while rest := definitions.lstrip(" \n\r\t,]"):
        try:
            function, end = json.JSONDecoder().raw_decode(rest)
        except ValueError:
            return None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        found.append(function)
        definitions = rest[end:]
    return found


def _marks(chat: str) -> list[re.Match[str]]:
    """Where turns start.

    An answer ends with the end mark, so what looks like a turn before that is text of the answer (a dialogue that it
    tells), and so is a second USER: before any answer. But the first ASSISTANT: at a paragraph ends a question, even if it
    may be part of one: no answer gets into a prompt.
    """
    found: list[re.Match[str]] = []
    for mark in TURN.finditer(chat):
        if found:
            last = found[-1]
            ended = END in chat[last.end() : mark.end()] or END not in chat[mark.end() :]
            if (last[1] == "ASSISTANT" and not ended) or last[1] == mark[1] == "USER":
                continue
        found.append(mark)
    return found


def _turns(chat: str) -> list[Message] | None:
    marks = _marks(chat)
    if not marks:
        return None if chat.strip() else []
    if marks[0].start() > 0:
        return None
    turns: list[Message] = []
    call: dict[str, Any] = {}
    for speaker, said in _said(chat, marks):
        content = said.replace(END, "").strip()
        if speaker == "USER":
            turns.append(Message(role="user", content=content))
        elif speaker == "ASSISTANT":
            turns.append(_assistant(content, f"call_{len(turns)}"))
            call = next(iter(turns[-1].tool_calls or []), {})
        else:
            name = call["function"]["name"] if call else None
            turns.append(Message(role="tool", content=content, name=name, tool_call_id=call.get("id")))
    return turns


def _said(chat: str, marks: list[re.Match[str]]) -> Iterator[tuple[str, str]]:
    """Who speaks, and the text with its end mark; an answer that runs on from a question or a result is apart."""
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        said = chat[mark.end() : following.start(1) if following else None]
        merged = None if mark[1] == "ASSISTANT" else MERGED.search(said)
        yield mark[1], said[: merged.start()] if merged else said
        if merged:
            yield "ASSISTANT", said[merged.end() :]


def _assistant(content: str, identity: str) -> Message:
    before, mark, written = content.partition(CALL)
    function = _call(written) if mark else None
    if function is None:
        return Message(role="assistant", content=content)
    # Two turns run together: "ASSISTANT: Let me see. ASSISTANT: <functioncall> ...".
    before = before.strip().removesuffix("ASSISTANT:").rstrip()
    call = {"id": identity, "type": "function", "function": function}
    return Message(role="assistant", content=before, tool_calls=[call])


def _call(written: str) -> dict[str, str] | None:
    """Name and arguments (as JSON text, OpenAI's way) of a function call; None if it cannot be read."""
    try:
        if quoted := QUOTED_CALL.match(written):
            name = json.loads(quoted["name"])
            # Only the escaped quotes are undone: a bare apostrophe inside is a character of the JSON text.
            unquoted = quoted["arguments"].strip().replace("\\'", "'")
            arguments, end = json.JSONDecoder().raw_decode(unquoted)
            if unquoted[end:].strip(" \n}"):
                return None
        else:
            whole = written.lstrip()
            value, end = json.JSONDecoder().raw_decode(whole)
            if whole[end:].strip(" \n}"):
                return None
            name, arguments = value["name"], value.get("arguments", {})
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        return None
    return {
        "name": name,
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
    }


@hookimpl
def register_sources(register: Register) -> None:
    register(Glaive)
