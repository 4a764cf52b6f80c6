"""Prompts of nvidia/OpenCodeInstruct: short programming tasks (dataset card, commit 8f3ba5b)."""

from __future__ import annotations

from typing import Any

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.sources.chat import question_and_answer, text


class OpenCodeInstruct(Source):
    """Programming tasks of nvidia/OpenCodeInstruct: `input` asks, `output` answers; every column is text."""

    name = "opencodeinstruct"

    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        return Conversation(question_and_answer(text(row, "input"), text(row, "output")), id=text(row, "id"))


@hookimpl
def register_sources(register: Register) -> None:
    register(OpenCodeInstruct)
