"""Prompts of nvidia/OpenCodeInstruct: short programming tasks (dataset card, commit 8f3ba5b)."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.sources.turns import question_and_answer, text


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """Which tasks."""

    min_score: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(
            description="Least `average_test_score`, the share of tests that the old answer passes, compared as a number; null takes all.",
        ),
    ] = None


class OpenCodeInstruct(Source):
    """Programming tasks of nvidia/OpenCodeInstruct: `input` asks, `output` answers; every column is text."""

    name = "opencodeinstruct"
    Options = Options

    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        found = Conversation(question_and_answer(text(row, "input"), text(row, "output")), id=text(row, "id"))
        least = self.options.min_score
        if least is not None:
            try:
                score = float(text(row, "average_test_score"))
            except ValueError:
                return Skip("average_test_score is no number")
            if not score >= least:  # nan too
                return Skip("average_test_score is below min_score")
        return found


@hookimpl
def register_sources(register: Register) -> None:
    register(OpenCodeInstruct)
