"""Conversations of from and value, as EAGLE's own training code reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from msgspec import Struct

from eyas.exporters.conversation import ConversationExporter, LossyOptions, without_reasoning
from eyas.exporters.reports import EVERY
from eyas.exporters.target import ANSWERED, THOUGHT
from eyas.plugins import Reading, Register, Told, hookimpl

NAMES = {"user": "human", "assistant": "gpt"}
ROLES = {name: role for role, name in NAMES.items()}


class ShareGpt(ConversationExporter):
    """JSON lines of id and conversations of from and value, human and gpt in turn, reasoning inline, as EAGLE reads them."""

    name: ClassVar[str] = "sharegpt"
    suffix: ClassVar[str] = "jsonl"
    Options: ClassVar[type[Struct]] = LossyOptions
    options: LossyOptions
    learns = EVERY

    def unfit(self, row: Told) -> str | None:
        roles = [message["role"] for message in row.messages]
        if row.tools or "tool" in roles:
            return "the format has no tools"
        if "system" in roles:
            return "the format has no system message"
        if any(role != ("user", "assistant")[at % 2] for at, role in enumerate(roles)):
            return "user and assistant do not alternate"
        return super().unfit(row)

    def check(self) -> None:
        target = self.target
        told = {"role": "assistant", "content": f"{target.open}{THOUGHT}{target.close}{ANSWERED}"}
        self.refuse_if_lossy(told, self.options.allow_lossy)

    def line(self, told: Told) -> dict[str, Any]:
        messages = [*without_reasoning(told.messages), self.inline(told)]
        return {
            "id": told.row.id,
            "conversations": [
                {"from": NAMES[message["role"]], "value": message["content"]} for message in messages
            ],
        }

    def read(self, path: Path) -> Iterator[Reading]:
        for line in self.lines(path):
            messages = [
                {"role": ROLES[turn["from"]], "content": turn["value"]} for turn in line["conversations"]
            ]
            text = self.target.render(messages)
            yield Reading(ids=self.target.encode(text), text=text)


@hookimpl
def register_exporters(register: Register) -> None:
    register(ShareGpt)
