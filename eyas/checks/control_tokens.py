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
            description="Control ids that answers may hold, such as a model's own tool call markers. None by default: an answer of plain text needs only its end token."
        ),
    ] = field(default_factory=list)


class ControlTokens(Check):
    """Finds answers that hold a control token other than the end token: the model began another turn by itself."""

    name = "control_tokens"
    Options = ControlTokensOptions
    options: ControlTokensOptions

    def faults(self, response: Response, split: Split) -> Iterable[str]:
        ids = response.output_ids
        if ids and ids[-1] == response.finish.matched:
            ids = ids[:-1]
        control = set(response.control_ids).difference(self.options.allowed)
        return [] if control.isdisjoint(ids) else ["control token in the answer"]


@hookimpl
def register_checks(register: Register) -> None:
    register(ControlTokens)
