"""A check with an option."""

from typing import Annotated

from msgspec import Meta, Struct

from eyas import hookimpl
from eyas.plugins import Check


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    most: Annotated[int, Meta(ge=0, description="Most exclamation marks in an answer. Three is a party.")] = 3


class Excited(Check):
    """Finds answers with too many exclamation marks."""

    name = "excited"
    default_policy = "mark"
    Options = Options

    def faults(self, response, split):
        if response.text.count("!") > self.options.most:
            yield "too many exclamation marks"


@hookimpl
def register_checks(register):
    register(Excited)
