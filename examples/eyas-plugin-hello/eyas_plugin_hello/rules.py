"""Rules: a section of the config, and the file that has them."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from eyas import hookimpl
from eyas.plugins import Rules


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    greeting: Annotated[str, Meta(min_length=1, description="First line of the list.")] = "Hello!"


class HelloRules(Rules):
    """Lists the training tables and their sizes in bytes, in results/hello/tables.txt."""

    name = "hello"
    Options = Options
    snakefile = Path(__file__).with_name("hello.smk")

    def targets(self, datasets):
        return ["results/hello/tables.txt"]


@hookimpl
def register_rules(register):
    register(HelloRules)
