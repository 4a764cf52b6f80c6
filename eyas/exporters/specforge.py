"""Conversations and rendered text for SpecForge, for runs that cannot take the token rows of `tokens`.

Source: SpecForge 0.2, specforge/data/preprocessing.py and parse.py. Every column besides id, conversations and tools is
handed to the chat template, so there are none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from eyas.exporters.conversation import ConversationExporter, LossyOptions, Messages, apart, as_text
from eyas.exporters.lines import with_nulls
from eyas.plugins import Reading, Register, Told, hookimpl

KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
ADDED = "the trainer puts a system message before it"
CUT = "the trainer cuts the conversation where roles do not follow each other"
LAST = "the last if train_only_last_turn is set, else every one"
# Before whom a tool and an assistant may speak; the first to speak is the user.
BEFORE = {"tool": ("assistant", "tool"), "assistant": ("user", "tool")}


class SpecForgeOptions(LossyOptions, frozen=True, forbid_unknown_fields=True):
    """How SpecForge will read the conversations."""

    system_prompt: Annotated[
        str,
        Meta(
            description="The system_prompt of the template that you name to SpecForge (specforge/data/template.py), which it puts before a conversation without a system message; empty for none. Used to tell how many rows that changes."
        ),
    ] = "You are a helpful assistant."


class SpecForge(ConversationExporter):
    """JSON lines of id, conversations and tools, for SpecForge with a template of parser_type thinking; set train_only_last_turn."""

    name: ClassVar[str] = "specforge"
    suffix: ClassVar[str] = "jsonl"
    Options: ClassVar[type[Struct]] = SpecForgeOptions
    options: SpecForgeOptions
    learns = LAST

    def check(self) -> None:
        self.refuse_if_lossy(apart(), self.options.allow_lossy)

    def write(self, rows: Iterable[Any], path: Path) -> int:
        self._default = self.target.default_system()
        return super().write(rows, path)

    def line(self, told: Told) -> dict[str, Any]:
        messages = [
            {key: value for key, value in message.items() if key in KEYS}
            for message in [*told.messages, self.answer(told)]
        ]
        for message in messages:
            if message["role"] == "assistant":
                # An empty text and not null: templates ask whether there is one, and some write "None".
                message["reasoning_content"] = message.get("reasoning_content") or ""
        if self._default is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._default})
        # As text: Arrow would give every tool the parameters of all others, as nulls.
        for message in messages:
            if message.get("tool_calls") is not None:
                message["tool_calls"] = as_text(message["tool_calls"])
        row = {"id": told.row.id, "conversations": messages}
        return {**row, "tools": as_text(told.tools)} if told.tools else row

    def read(self, path: Path) -> Iterator[Reading]:
        for line in self.lines(path):
            messages, note = self._parsed(with_nulls(line["conversations"], KEYS))
            text = self.target.render(messages, json.loads(line.get("tools") or "[]"))
            yield Reading(ids=self.target.encode(text), text=text, note=note)

    def _parsed(self, messages: Messages) -> tuple[Messages, str | None]:
        """What SpecForge hands to the chat template."""
        note = None
        own = messages[:1] if messages[0]["role"] == "system" else []
        kept = _in_turn(messages[len(own) :])
        if len(own) + len(kept) < len(messages):
            note = CUT
        if not own and self.options.system_prompt:
            own, note = [{"role": "system", "content": self.options.system_prompt}], ADDED
        for message in kept:
            if message.get("tool_calls"):
                message["tool_calls"] = [_call(call) for call in json.loads(message["tool_calls"])]
        return [*own, *kept], note


def _in_turn(messages: Messages) -> Messages:
    """From the first user's message up to the first that does not follow the one before it."""
    kept: Messages = []
    for message in messages:
        before = BEFORE.get(message["role"])
        if not kept and message["role"] != "user":
            continue
        if kept and before is not None and kept[-1]["role"] not in before:
            break
        kept.append(message)
    return kept


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {}
    named = {"name": function.get("name", ""), "arguments": arguments}
    return {"id": call.get("id", ""), "type": call.get("type", "function"), "function": named}


class SpecForgeText(ConversationExporter):
    """JSON lines of id and text, the exact tokens spelt out, for SpecForge with is_preformatted; set train_only_last_turn."""

    name: ClassVar[str] = "specforge_text"
    suffix: ClassVar[str] = "jsonl"
    learns = LAST

    def unfit(self, row: Told) -> str | None:
        return None  # no template ends it

    def line(self, told: Told) -> dict[str, Any]:
        return {"id": told.row.id, "text": told.text}

    def read(self, path: Path) -> Iterator[Reading]:
        for line in self.lines(path):
            yield Reading(ids=self.target.encode(line["text"]), text=line["text"])


@hookimpl
def register_exporters(register: Register) -> None:
    register(SpecForge)
    register(SpecForgeText)
