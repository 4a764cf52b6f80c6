"""Prompts of ShareGPT: anon8231489123/ShareGPT_Vicuna_unfiltered and its variants (one JSON array per file)."""

from __future__ import annotations

from typing import Any

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.sources.chat import messages, text


class ShareGPT(Source):
    """Shared chats of ShareGPT; pieces of split chats that start with an answer have no prompt and are skipped."""

    name = "sharegpt"

    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        found = messages(row["conversations"], "conversations", "from", "value")
        return found if isinstance(found, Skip) else Conversation(found, id=text(row, "id"))


@hookimpl
def register_sources(register: Register) -> None:
    register(ShareGPT)
