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

from eyas.exporters.conversation import ConversationExporter, LossyOptions, Messages, apart
from eyas.exporters.lines import with_nulls
from eyas.plugins import Reading, Register, Told, hookimpl

KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
ADDED = "the trainer puts a system message before it"


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

    def write(self, rows: Iterable[Any], path: Path) -> int:
        self.refuse_if_lossy(apart(), self.options.allow_lossy)
        self._default = self.target.default_system()
        return super().write(rows, path)

    def line(self, told: Told) -> dict[str, Any]:
        # An empty text and not null: templates ask whether there is one, and some write "None".
        messages = [
            {**message, "reasoning_content": message.get("reasoning_content") or ""}
            if message["role"] == "assistant"
            else message
            for message in [*told.messages, self.answer(told)]
        ]
        if self._default is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._default})
        # As text: Arrow would give every tool the parameters of all others, as nulls.
        for message in messages:
            if message.get("tool_calls") is not None:
                message["tool_calls"] = _text(message["tool_calls"])
        row = {"id": told.row.id, "conversations": messages}
        return {**row, "tools": _text(told.tools)} if told.tools else row

    def read(self, path: Path) -> Iterator[Reading]:
        for line in self.lines(path):
            messages, note = self._parsed(with_nulls(line["conversations"], KEYS))
            text = self.target.render(messages, json.loads(line.get("tools") or "[]"))
            yield Reading(ids=self.target.encode(text), text=text, note=note)

    def _parsed(self, messages: Messages) -> tuple[Messages, str | None]:
        """What SpecForge hands to the chat template."""
        note = None
        if messages[0]["role"] != "system" and self.options.system_prompt:
            messages, note = [{"role": "system", "content": self.options.system_prompt}, *messages], ADDED
        for message in messages:
            if message.get("tool_calls"):
                message["tool_calls"] = [_call(call) for call in json.loads(message["tool_calls"])]
        return messages, note


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


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
