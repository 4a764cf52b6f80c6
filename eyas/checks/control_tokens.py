"""Control tokens inside an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct, field

from eyas.plugins import Check, Register, Split, hookimpl
from eyas.records import Response


class ControlTokensOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Exceptions."""

    allowed: Annotated[
        list[int],
        Meta(
            description="Control ids that answers may hold besides the markers of the reasoning format and its tool calls, which are always allowed."
        ),
    ] = field(default_factory=list)


class ControlTokens(Check):
    """Finds answers that hold a control token or a marker of prompts: the model began another turn by itself."""

    name = "control_tokens"
    Options = ControlTokensOptions
    options: ControlTokensOptions

    def faults(self, response: Response, split: Split) -> Iterable[str]:
        control = set(response.control_ids).difference(self.options.allowed, split.markers)
        found = split.foreign or response.holds(control)
        return ["control token in the answer"] if found else []


@hookimpl
def register_checks(register: Register) -> None:
    register(ControlTokens)
