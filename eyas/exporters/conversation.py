"""What exporters of conversations share: which answers a conversation can hold, and whether their reasoning survives."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from eyas.errors import EyasError
from eyas.exporters.lines import read_lines, write_lines
from eyas.exporters.target import ANSWERED, THOUGHT, Target
from eyas.plugins import Exporter, Told

Messages = list[dict[str, Any]]


class LossyOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What to do about a chat template that drops reasoning."""

    allow_lossy: Annotated[
        bool,
        Meta(
            description="Write conversations even if the model's chat template drops the reasoning of finished answers, so that the trainer never sees it."
        ),
    ] = False


class ConversationExporter(Exporter):
    """One conversation a row: what came before the answer, and the answer. Trainers render it by a chat template.

    A row stands for one generation, so a trainer that learns from every assistant turn must be told to take the last
    (`learns`).
    """

    takes: ClassVar[type] = Told
    target: Target

    def unfit(self, row: Told) -> str | None:
        if not row.proved:
            return "its messages do not give its prompt again"
        if row.row.metadata.finish == "length" and (row.open or self.supervises_end):
            return "cut at the limit: a template would end it"
        return None

    def write(self, rows: Iterable[Any], path: Path) -> int:
        return write_lines(path, map(self.line, rows))

    @abstractmethod
    def line(self, told: Told) -> dict[str, Any]:
        """The row as it is written."""

    def lines(self, path: Path) -> Iterator[dict[str, Any]]:
        return read_lines(path)

    def answer(self, told: Told) -> dict[str, Any]:
        """The answer as a message, its reasoning in a field of its own; texts as generated, nothing trimmed."""
        message = {"role": "assistant", "content": told.answer}
        return message if told.reasoning is None else {**message, "reasoning_content": told.reasoning}

    def inline(self, told: Told) -> dict[str, Any]:
        """The answer as a message, its reasoning in the content, with the delimiter that the prompt may have opened it by."""
        return {"role": "assistant", "content": self.target.opened_by_prompt(told) + told.output}

    def refuse_if_lossy(self, answer: Mapping[str, Any], allowed: bool) -> None:
        """Raises EyasError if the chat template drops the reasoning of `answer`, which holds THOUGHT, unless that is allowed.

        Also for a template that refuses a finished conversation.
        """
        kept = self.target.keeps(answer)
        if not (kept or allowed) and self.target.close:
            raise EyasError(
                f"exports.{self.name}: the chat template of {self.target.model.id} drops the reasoning of finished answers, so the "
                f"trainer would learn to answer without it; export `tokens` instead, or set allow_lossy if that is what you want"
            )


def apart() -> dict[str, Any]:
    """An answer with its reasoning in a field of its own, for refuse_if_lossy."""
    return {"role": "assistant", "content": ANSWERED, "reasoning_content": THOUGHT}


def called(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls as the OpenAI API has them: the arguments as JSON text."""
    return [
        {**call, "function": {**call["function"], "arguments": as_text(call["function"]["arguments"])}}
        for call in calls
    ]


def as_text(value: Any) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def without_reasoning(messages: Messages) -> Messages:
    """Messages whose earlier answers have lost their reasoning, as in formats that keep it in the last answer alone."""
    return [
        {key: value for key, value in message.items() if key not in ("reasoning_content", "thinking")}
        for message in messages
    ]
