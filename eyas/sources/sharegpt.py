"""Prompts of ShareGPT: anon8231489123/ShareGPT_Vicuna_unfiltered and its variants (one JSON array per file)."""

from __future__ import annotations

from typing import Any

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.sources.turns import identity, messages

# How ChatGPT's page wrapped an answer. In a user turn it is a page that was saved, not something that was asked;
# RyokoAI/ShareGPT52K and the HTML parts of the Vicuna set are full of it.
PAGE = '<div class="markdown prose'


class ShareGPT(Source):
    """Shared chats of ShareGPT; pieces of split chats that start with an answer have no prompt and are skipped."""

    name = "sharegpt"

    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        found = messages(row["conversations"], "conversations", "from", "value")
        if isinstance(found, Skip):
            return found
        if any(message.role == "user" and PAGE in message.content for message in found):
            return Skip("a user turn is a saved page (HTML)")
        return Conversation(found, id=identity(row, "id"))


@hookimpl
def register_sources(register: Register) -> None:
    register(ShareGPT)
