"""Answers whose bytes are no text."""

from __future__ import annotations

from collections.abc import Iterable

from eyas.plugins import Check, Register, Split, hookimpl
from eyas.records import Response

REPLACEMENT = "\ufffd"


class Unicode(Check):
    """Finds answers whose bytes are not UTF-8, as a broken server or a drifting model writes them.

    An answer cut at the limit may end inside a character. A U+FFFD that the model wrote on purpose looks the same in
    the text as an undecodable byte and is reported too.
    """

    name = "unicode"

    def faults(self, response: Response, split: Split) -> Iterable[str]:
        text = response.text
        if response.finish.type == "length":
            text = text.removesuffix(REPLACEMENT)
        return ["undecodable bytes in the answer"] if REPLACEMENT in text else []


@hookimpl
def register_checks(register: Register) -> None:
    register(Unicode)
