"""Reasoning between two delimiters, such as `<think>` … `</think>`. Most open reasoning models are a matter of options."""

from __future__ import annotations

from bisect import bisect_left
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from eyas.plugins import Reasoning, Register, Split, hookimpl

Delimiter = Annotated[str, Meta(min_length=1)]


class TagsOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The delimiters of one model and who writes them."""

    open: Annotated[Delimiter, Meta(description="Text that opens reasoning.")] = "<think>"
    close: Annotated[Delimiter, Meta(description="Text that closes reasoning.")] = "</think>"
    opened_by_prompt: Annotated[
        bool,
        Meta(description="The prompt ends inside reasoning, so the output starts there and holds no `open`."),
    ] = False
    prefill: Annotated[
        str,
        Meta(
            description="Text appended to the prompt, such as `<think>\\n`, where the chat template does not open reasoning itself."
        ),
    ] = ""
    implicit_closers: Annotated[
        list[Delimiter],
        Meta(
            description="Texts that end reasoning without `close`, such as `<tool_call>`; they belong to the answer."
        ),
    ] = field(default_factory=list)
    single_token: Annotated[
        bool,
        Meta(
            description="The tokenizer has each delimiter as one token (Kimi, DeepSeek, Qwen3), so a delimiter spelt out in several tokens is ordinary text that talks about delimiters."
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.open in self.close or self.close in self.open:
            raise ValueError(f"`open` {self.open!r} and `close` {self.close!r} must not contain each other")
        inside = self.prefill.rfind(self.open) > self.prefill.rfind(self.close)
        if inside and not self.opened_by_prompt:
            raise ValueError(
                f"`prefill` {self.prefill!r} opens reasoning, so `opened_by_prompt` must be true"
            )


class Tags(Reasoning):
    """Reasoning between an opening and a closing delimiter, found in the text and mapped to token offsets.

    The output starts inside reasoning if the prompt opened it, else with an `open` before anything but white space;
    an `open` further on is the answer talking about one. Reasoning ends with the first `close`, its last token
    included, or before the first token of an implicit closer, whichever comes first. The first state that fits:

    none: never opened; everything is answer.
    truncated_in_reasoning: never ended, and the output is cut at the limit; everything is reasoning.
    unclosed: never ended, though the model stopped by itself; everything is reasoning.
    stray_open: an `open` inside reasoning.
    reopened: an `open` after reasoning ended.
    double_close: a `close` after the first `close`.
    empty: reasoning ended with nothing but white space inside.
    closed_by_tool: an implicit closer ended it; a `close` after that is part of the call's arguments.
    closed: a `close` ended it.
    """

    name = "tags"
    Options = TagsOptions
    options: TagsOptions

    @property
    def prefill(self) -> str:
        return self.options.prefill

    def split(self, response: Any) -> Split:
        text: str = response.text
        ends: list[int] = response.text_ends
        options = self.options
        everything = len(response.output_ids)

        start = 0
        if not options.opened_by_prompt:
            at = len(text) - len(text.lstrip())
            if not text.startswith(options.open, at) or self._find(options.open, text, ends, at) != at:
                return Split("none", 0)
            start = at + len(options.open)

        close = self._find(options.close, text, ends, start)
        tools = [self._find(closer, text, ends, start) for closer in options.implicit_closers]
        tool = min((at for at in tools if at >= 0), default=-1)
        if close < 0 and tool < 0:
            return Split(
                "truncated_in_reasoning" if response.finish.type == "length" else "unclosed", everything
            )

        by_tool = close < 0 or 0 <= tool < close
        if by_tool:
            end = after = tool
            tokens = _first_token(tool, ends)
        else:
            end, after = close, close + len(options.close)
            tokens = min(bisect_left(ends, after) + 1, everything)

        if 0 <= self._find(options.open, text, ends, start) < end:
            return Split("stray_open", tokens)
        if self._find(options.open, text, ends, after) >= 0:
            return Split("reopened", tokens)
        if not by_tool and self._find(options.close, text, ends, after) >= 0:
            return Split("double_close", tokens)
        if not text[start:end].strip():
            return Split("empty", tokens)
        return Split("closed_by_tool" if by_tool else "closed", tokens)

    def _find(self, delimiter: str, text: str, ends: list[int], start: int) -> int:
        """Where `delimiter` stands in `text` from `start` on, or -1."""
        at = text.find(delimiter, start)
        while self.options.single_token and at >= 0 and not _is_token(at, at + len(delimiter), ends):
            at = text.find(delimiter, at + 1)
        return at


def _is_token(start: int, end: int, ends: list[int]) -> bool:
    """Whether one token is exactly the characters from `start` to `end`."""
    token = bisect_left(ends, end)
    return token < len(ends) and ends[token] == end and (ends[token - 1] if token else 0) == start


def _first_token(at: int, ends: list[int]) -> int:
    """The first token that holds a part of the character at `at`, be it only some of its bytes."""
    if at == 0:
        return 0
    before = bisect_left(ends, at)
    return before if before == len(ends) or ends[before] > at else before + 1


@hookimpl
def register_reasoning(register: Register) -> None:
    register(Tags)
