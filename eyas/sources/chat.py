"""Conversations of your own: a column of messages, under the names that you give."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from eyas.plugins import Conversation, Register, Skip, Source, hookimpl
from eyas.sources.turns import ROLES, Role, decoded, identity, messages, system_message, tools

# Column, field of the role, field of the text: the shapes of OpenAI and of ShareGPT.
SHAPES = (("messages", "role", "content"), ("conversations", "from", "value"))


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """Where things are in a row."""

    column: Annotated[
        str | None,
        Meta(
            description="Column of the turns, a list or its JSON text; null is `messages` or else `conversations`."
        ),
    ] = None
    role: Annotated[
        str | None, Meta(description="Field of a turn's role; null is `role` or else `from`.")
    ] = None
    content: Annotated[
        str | None, Meta(description="Field of a turn's text; null is `content` or else `value`.")
    ] = None
    system: Annotated[
        str | None, Meta(description="Column of a system prompt that is put before the turns; null is none.")
    ] = None
    tools: Annotated[
        str,
        Meta(
            description="Column of the tools, in the OpenAI shape, a list or its JSON text; rows need not have it."
        ),
    ] = "tools"
    id: Annotated[
        str | None, Meta(description="Column of the row's own id; null makes keys of the rows' content.")
    ] = None
    roles: Annotated[
        dict[str, Role],
        Meta(
            description="Names of roles besides the usual ones (user, human, assistant, gpt, system, tool, …)."
        ),
    ] = {}


class Chat(Source):
    """Conversations of your own, as `messages` (role, content) or `conversations` (from, value)."""

    name = "chat"
    Options = Options

    def parse(self, row: dict[str, Any]) -> Conversation | Skip:
        options: Options = self.options
        column = options.column or next((column for column, _, _ in SHAPES if column in row), SHAPES[0][0])
        turns = decoded(row[column], column)
        role, content = _fields(turns)
        found = messages(
            turns, column, options.role or role, options.content or content, roles={**ROLES, **options.roles}
        )
        if isinstance(found, Skip):
            return found
        found = [*system_message(row, options.system), *found]
        return Conversation(found, tools(row, options.tools), identity(row, options.id))


def _fields(turns: Any) -> tuple[str, str]:
    """The names of role and text in the first turn; the usual ones if there is none."""
    first = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], dict) else {}
    return next(((role, text) for _, role, text in SHAPES if first.get(role) is not None), SHAPES[0][1:])


@hookimpl
def register_sources(register: Register) -> None:
    register(Chat)
