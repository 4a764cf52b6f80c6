"""Prompts of open-thoughts/OpenThoughts-114k (README of commit 3ca7518) and OpenThoughts3-1.2M."""

from __future__ import annotations

from typing import Any

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.sources.turns import messages


class OpenThoughts(Source):
    """Mathematics, code and science of OpenThoughts-114k and OpenThoughts3-1.2M.

    The `system` column of 114k is left out: it demands `<|begin_of_thought|>` marks, and the target would
    imitate that reasoning format in place of its own. OpenThoughts3 repeats every question sixteen times; the
    repeats stay distinct.
    """

    name = "openthoughts"

    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        found = messages(row["conversations"], "conversations", "from", "value")
        return found if isinstance(found, Skip) else Conversation(found)


@hookimpl
def register_sources(register: Register) -> None:
    register(OpenThoughts)
