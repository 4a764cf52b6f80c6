"""Prompts of open-thoughts/OpenThoughts-114k (README of commit 3ca7518) and OpenThoughts3-1.2M."""

from __future__ import annotations

from typing import Any

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.sources.turns import NO_TEXT, messages, question_and_answer, text


class OpenThoughts(Source):
    """Mathematics, code and science of OpenThoughts-114k and OpenThoughts3-1.2M.

    The `system` column of 114k is left out: it demands `<|begin_of_thought|>` marks, and the target would
    imitate that reasoning format in place of its own. Its config `metadata` has `problem`, and for some tasks the
    `starter_code` to complete, which follows it. OpenThoughts3 repeats every question sixteen times; the repeats stay distinct.
    """

    name = "openthoughts"

    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        if "conversations" in row:
            found = messages(row["conversations"], "conversations", "from", "value")
            return found if isinstance(found, Skip) else Conversation(found)
        if "problem" not in row:
            raise ValueError(
                "there is neither a column 'conversations' nor 'problem' (config `metadata` of 114k)"
            )
        if row["problem"] is None:
            return NO_TEXT
        asked, code = text(row, "problem"), row.get("starter_code")
        if isinstance(code, str) and code.strip():
            asked = f"{asked}\n\n{code}"
        answer = row.get("deepseek_solution")
        return Conversation(question_and_answer(asked, answer if isinstance(answer, str) else ""))


@hookimpl
def register_sources(register: Register) -> None:
    register(OpenThoughts)
