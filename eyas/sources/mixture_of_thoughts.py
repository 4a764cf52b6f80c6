"""Prompts of open-r1/Mixture-of-Thoughts: code, mathematics, science (README of commit 7b58293)."""

from __future__ import annotations

from typing import Any

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.sources.turns import messages


class MixtureOfThoughts(Source):
    """Code, mathematics and science of open-r1/Mixture-of-Thoughts; its answers hold DeepSeek-R1's `<think>` text."""

    name = "mixture_of_thoughts"

    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        found = messages(row["messages"], "messages", "role", "content")
        return found if isinstance(found, Skip) else Conversation(found)


@hookimpl
def register_sources(register: Register) -> None:
    register(MixtureOfThoughts)
