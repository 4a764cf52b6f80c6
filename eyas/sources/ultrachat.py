"""Prompts of HuggingFaceH4/ultrachat_200k: everyday dialogues (README of commit ca063fb)."""

from __future__ import annotations

from typing import Any

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.sources.turns import messages, text


class UltraChat(Source):
    """Dialogues of HuggingFaceH4/ultrachat_200k, any of its four splits; `prompt` repeats the first message."""

    name = "ultrachat"

    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        prompt, identity = text(row, "prompt"), text(row, "prompt_id")
        found = messages(row["messages"], "messages", "role", "content")
        if isinstance(found, Skip):
            return found
        if found and found[0].content != prompt:
            return Skip("prompt differs from the first message")
        return Conversation(found, id=identity)


@hookimpl
def register_sources(register: Register) -> None:
    register(UltraChat)
