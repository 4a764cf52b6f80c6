"""Conversations for TorchSpec, which renders them by its own code and keeps the reasoning of the last answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from eyas.exporters.conversation import ConversationExporter, called, without_reasoning
from eyas.plugins import Reading, Register, Told, hookimpl


class TorchSpec(ConversationExporter):
    """JSON lines of id and conversations, reasoning inline in the last answer, as TorchSpec reads them."""

    # Source: TorchSpec's template kimi-k25-vlm: the header of an answer, its content, the end token; the mask leaves the end out.
    # Of earlier answers it keeps no reasoning, so they have the empty block that the model's own template writes there.
    name: ClassVar[str] = "torchspec"
    suffix: ClassVar[str] = "jsonl"
    learns = "the last if last_turn_loss_only is set, else every one"

    @property
    def supervises_end(self) -> bool:
        return False

    def check(self) -> None:
        self.target.answer_end()  # of a finished conversation, which a template may refuse

    def unfit(self, row: Told) -> str | None:
        return "the format has no tool definitions" if row.tools else super().unfit(row)

    def line(self, told: Told) -> dict[str, Any]:
        messages = without_reasoning(told.messages)
        for message in messages:
            if message["role"] == "assistant":
                message["content"] = self.target.before_earlier + message["content"]
            if message.get("tool_calls"):
                message["tool_calls"] = called(message["tool_calls"])
        return {"id": told.row.id, "conversations": [*messages, self.inline(told)]}

    def read(self, path: Path) -> Iterator[Reading]:
        target, end = self.target, self.target.answer_end()
        for line in self.lines(path):
            *before, answer = line["conversations"]
            for message in before:
                if message["role"] == "assistant":
                    message["content"] = message["content"].removeprefix(target.before_earlier)
            header = target.render(before, to_answer=True)
            if target.open and header.rstrip().endswith(target.open):
                header = header[: header.rindex(target.open)]
            text = f"{header}{answer['content']}{end}"
            yield Reading(ids=target.encode(text), text=text)


@hookimpl
def register_exporters(register: Register) -> None:
    register(TorchSpec)
