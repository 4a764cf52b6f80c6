"""Responses that reason, or not even that, and then say nothing."""

from __future__ import annotations

from collections.abc import Iterable

from eyas.plugins import Check, Register, Split, hookimpl
from eyas.records import Response

# Without an end of reasoning there is no answer part that could be empty; a tool call is the answer.
NO_ANSWER_PART = ("truncated_in_reasoning", "unclosed", "closed_by_tool")


class EmptyAnswer(Check):
    """Finds responses that stopped by themselves with nothing but white space after the reasoning."""

    name = "empty_answer"

    def faults(self, response: Response, split: Split) -> Iterable[str]:
        if response.finish.type != "stop" or split.state in NO_ANSWER_PART:
            return []
        reasoning = response.text_ends[split.reasoning_tokens - 1] if split.reasoning_tokens else 0
        answer = response.text[reasoning:]
        return [] if answer and not answer.isspace() else ["empty answer"]


@hookimpl
def register_checks(register: Register) -> None:
    register(EmptyAnswer)
