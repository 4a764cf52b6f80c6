"""Answers cut at the token limit."""

from __future__ import annotations

from collections.abc import Iterable

from eyas.plugins import Check, Register, Split, hookimpl
from eyas.records import CUT, Response


class Length(Check):
    """Finds answers cut at the token limit.

    Marked, not rejected, by default: each token of a cut answer is still the target's own, and dropping cut answers
    would drop the longest ones.
    """

    name = "length"
    default_policy = "mark"

    def faults(self, response: Response, split: Split) -> Iterable[str]:
        return [CUT] if response.finish.type == "length" else []


@hookimpl
def register_checks(register: Register) -> None:
    register(Length)
