"""For models, or modes of models, that do not reason."""

from __future__ import annotations

from typing import Any

from eyas.plugins import Reasoning, Register, Split, hookimpl


class NoReasoning(Reasoning):
    """No reasoning: the whole output is the answer."""

    name = "none"

    def split(self, response: Any) -> Split:
        return Split("none", 0, asked=False)


@hookimpl
def register_reasoning(register: Register) -> None:
    register(NoReasoning)
