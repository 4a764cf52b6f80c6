"""Prompts of Magicoder: ise-uiuc/Magicoder-OSS-Instruct-75K (tree 5f839b1) and -Evol-Instruct-110K (tree b0079be)."""

from __future__ import annotations

from typing import Any

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.sources.turns import question_and_answer, text


class Magicoder(Source):
    """Programming tasks of Magicoder: OSS-Instruct has `problem`, Evol-Instruct has `instruction`."""

    name = "magicoder"

    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        # `seed` of OSS-Instruct is the code that inspired the problem, not the prompt; `index` need not be unique.
        if "problem" in row:
            return Conversation(question_and_answer(text(row, "problem"), text(row, "solution")))
        if "instruction" in row:
            return Conversation(question_and_answer(text(row, "instruction"), text(row, "response")))
        raise ValueError(
            "there is neither a column 'problem' (OSS-Instruct) nor 'instruction' (Evol-Instruct)"
        )


@hookimpl
def register_sources(register: Register) -> None:
    register(Magicoder)
