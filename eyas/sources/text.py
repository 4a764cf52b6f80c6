"""Prompts of your own: a column of text, or one prompt a line."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.records import Message
from eyas.sources.turns import NO_TEXT, identity, system_message, text


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """Where things are in a row."""

    column: Annotated[
        str,
        Meta(description="Column of the prompt. Each line of a .txt file is a row with the column `text`."),
    ] = "text"
    system: Annotated[str | None, Meta(description="Column of a system prompt; null is none.")] = None
    id: Annotated[
        str | None, Meta(description="Column of the row's own id; null makes keys of the rows' content.")
    ] = None


class Text(Source):
    """Prompts of your own: one column of text in any kind of file, or one prompt a line in a .txt file."""

    name = "text"
    Options = Options

    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        options: Options = self.options
        if row[options.column] is None:
            return NO_TEXT
        asked = Message(role="user", content=text(row, options.column))
        return Conversation([*system_message(row, options.system), asked], id=identity(row, options.id))


@hookimpl
def register_sources(register: Register) -> None:
    register(Text)
