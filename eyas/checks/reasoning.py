"""Whether a response of a reasoning model reasons, in one well-formed block."""

from __future__ import annotations

from collections.abc import Iterable

from eyas.plugins import Check, Register, Split, hookimpl
from eyas.records import Response

FAULTS = {
    "none": "no reasoning",
    "empty": "empty reasoning",
    "unclosed": "reasoning never closed",
    "double_close": "reasoning closed twice",
    "reopened": "reasoning reopened",
    "stray_open": "reasoning opened twice",
}


class ReasoningBlock(Check):
    """Finds responses of a reasoning model without reasoning, or whose reasoning is malformed.

    Reasoning cut at the limit is no fault here; the check `length` has it. Nor is none where none was asked for.
    """

    name = "reasoning"

    def faults(self, response: Response, split: Split) -> Iterable[str]:
        if split.state == "none" and not split.asked:
            return []
        return [FAULTS[split.state]] if split.state in FAULTS else []


@hookimpl
def register_checks(register: Register) -> None:
    register(ReasoningBlock)
