"""The one splitter for models that mark reasoning between delimiters in their output. A format is data for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from eyas.errors import EyasError
from eyas.plugins import Reasoning, Said, Split, Tokenizer
from eyas.records import ReasoningState
from eyas.tool_calls import NOTATIONS, Tools

if TYPE_CHECKING:
    from eyas.lengths import Array

History = Literal["dropped", "kept_for_tools"]


@dataclass(frozen=True)
class Mark:
    """A delimiter: its text, and the tokens of the tokenizer's own in it, each with where it ends in that text."""

    text: str
    tokens: tuple[tuple[str, int], ...]


class Parts(NamedTuple):
    """Where reasoning stands in a reply: tokens up to its end, and in the text its begin, its end, the answer's begin."""

    state: ReasoningState
    tokens: int
    begin: int = 0
    end: int = 0
    answer: int = 0


class Delimited(Reasoning):
    """Reasoning between an opening and a closing delimiter.

    A delimiter is a text. It is searched for in the decoded text, and counts only where each token of the tokenizer's
    own in it stands as that id; so a delimiter that a model spells out in ordinary tokens is ordinary text, and one
    that is ordinary text to the tokenizer is found wherever its characters are, however they are tokenized.

    The output starts inside reasoning if the prompt opened it, else with `open` before anything but white space; an
    `open` further on is the answer talking about one. Reasoning ends with the first `close`, its last token
    included. An implicit closer ends it before its own first token, if no `close` follows: then it was a draft of a call,
    as SGLang and vLLM have it. If the prompt has ended reasoning, all is answer. The first state that fits:

    none: never opened; everything is answer.
    truncated_in_reasoning: never ended, and the output is cut at the limit; everything is reasoning.
    unclosed: never ended, though the model stopped by itself; everything is reasoning.
    stray_open: an `open` inside reasoning.
    reopened: an `open` after reasoning ended.
    double_close: a `close` after the first `close`.
    empty: reasoning ended with nothing but white space inside.
    closed_by_tool: an implicit closer ended it.
    closed: a `close` ended it.

    Data of a format:

    open, close: the delimiters.
    tokens: which parts of the delimiters, and of what is forbidden, the tokenizer has as tokens of its own.
    implicit_closers: what ends reasoning without `close`, such as the begin of a tool call; part of the answer.
    drafts: whether calls may be drafted inside reasoning; if not, an implicit closer ends it even if a `close` follows.
    continues: what may stand before an `open` inside reasoning, where a format opens each message of it anew.
    prompt_ends: how prompts end, white space aside; with `open` where the chat template opens reasoning.
    stops: the tokens that end a turn. All must be known as end tokens, or every answer runs to the limit.
    markers: further tokens that may stand in an answer, such as those of tool calls, even if they are control tokens.
    forbidden: what belongs to prompts only; in an answer it means that the model plays the other side. One without any
        of `tokens` in it is a token itself.
    history: what the chat template does with the reasoning of earlier answers: `dropped`, or `kept_for_tools` until
        the model no longer calls tools.
    """

    open: str
    close: str
    tokens: tuple[str, ...]
    implicit_closers: tuple[str, ...] = ()
    drafts: bool = True
    continues: str = ""
    prompt_ends: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    history: History = "dropped"

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._open, self._close, self._continues = map(self._mark, (self.open, self.close, self.continues))
        self._closers = [*map(self._mark, self.implicit_closers)]
        self._forbidden = [*map(self._mark, self.forbidden)]
        self._allowed = frozenset({*self.tokens, *self.markers})
        # If no prompt may end before `open`, then one that does asks for no reasoning.
        self._model_opens = not all(end.endswith(self.open) for end in self.prompt_ends)

    def _mark(self, text: str) -> Mark:
        own = [*self.tokens, *self.forbidden]
        found = re.finditer("|".join(map(re.escape, own)), text) if own else ()
        return Mark(text, tuple((match[0], match.end()) for match in found))

    # --- splitting ------------------------------------------------------------------------------------------------

    def split(self, response: Any) -> Split:
        asked, parts = self._parts(response)
        added = response.added_tokens
        return Split(
            parts.state,
            parts.tokens,
            asked,
            markers=frozenset(added[text] for text in added.keys() & self._allowed),
            foreign=any(self._find(mark, response) >= 0 for mark in self._forbidden),
        )

    def said(self, response: Any, tools: Tools) -> Said:
        _, parts = self._parts(response)
        text = response.text[parts.answer :]
        self._check_markers(text, response.output_ids[parts.tokens :], response.added_tokens)
        content, calls = NOTATIONS[self.notation](text, tools)
        return Said(content, text, response.text[parts.begin : parts.end], calls)

    def _check_markers(self, text: str, ids: list[int], added: dict[str, int]) -> None:
        """Raises ValueError if the answer spells a marker in ordinary tokens: then its calls cannot be told from text."""
        for marker in {*self.tokens, *self.markers}:
            if marker in text and text.count(marker) != ids.count(added.get(marker, -1)):
                raise ValueError(f"{marker} is spelt in ordinary tokens")

    def _parts(self, response: Any) -> tuple[bool, Parts]:
        """Whether the answer was to reason, and where it does."""
        prompt = self._prompt(response)
        if prompt == "opened" or (prompt == "plain" and self._model_opens):
            return True, self._split(response, prompt == "opened")
        return False, self._unasked(response)

    def _prompt(self, response: Any) -> Literal["opened", "ended", "plain"]:
        """What the prompt has done about reasoning: the last token of the tokenizer's own in it tells."""
        added = response.added_tokens
        own = set(added.values())
        last = next((token for token in reversed(response.prompt_ids) if token in own), None)
        if last is not None and last == added.get(self.open):
            return "opened"
        return "ended" if last is not None and last == added.get(self.close) else "plain"

    def _unasked(self, response: Any) -> Parts:
        if self._find(self._open, response) >= 0:
            return Parts("reopened", 0)
        return Parts("double_close" if self._find(self._close, response) >= 0 else "none", 0)

    def _split(self, response: Any, opened: bool) -> Parts:
        text: str = response.text
        ends: Array = response.text_ends
        everything = len(response.output_ids)

        start = 0
        if not opened:
            at = len(text) - len(text.lstrip())
            if not self._stands(self._open, response, at):
                return Parts("none", 0)
            start = at + len(self.open)

        close = self._find(self._close, response, start)
        tool = -1
        if close < 0 or not self.drafts:
            tools = [self._find(closer, response, start) for closer in self._closers]
            tool = min((at for at in tools if at >= 0), default=-1)
        if close < 0 and tool < 0:
            state: ReasoningState = (
                "truncated_in_reasoning" if response.finish.type == "length" else "unclosed"
            )
            return Parts(state, everything, start, len(text), len(text))

        by_tool = close < 0 or 0 <= tool < close
        if by_tool:
            end = after = tool
            tokens = _first_token(tool, ends)
        else:
            end, after = close, close + len(self.close)
            tokens = min(int(ends.searchsorted(after)) + 1, everything)

        opens = self._find(self._open, response, start)
        while 0 <= opens < end and self._goes_on(response, opens):
            opens = self._find(self._open, response, opens + 1)
        return Parts(self._state(response, opens, start, end, after, by_tool), tokens, start, end, after)

    def _state(
        self, response: Any, opens: int, start: int, end: int, after: int, by_tool: bool
    ) -> ReasoningState:
        """opens: where the first `open` stands that does not go on with reasoning, -1 for none."""
        if 0 <= opens < end:
            return "stray_open"
        if opens >= 0:
            return "reopened"
        if not by_tool and self._find(self._close, response, after) >= 0:
            return "double_close"
        if not response.text[start:end].strip():
            return "empty"
        return "closed_by_tool" if by_tool else "closed"

    def _goes_on(self, response: Any, at: int) -> bool:
        """Whether the `open` at `at` goes on with reasoning."""
        return bool(self.continues) and self._stands(self._continues, response, at - len(self.continues))

    def _find(self, mark: Mark, response: Any, start: int = 0) -> int:
        """Where `mark` stands in the text from `start` on, or -1."""
        for token, _ in mark.tokens:
            if token not in response.added_tokens:
                return -1  # without a search: most answers hold few of a format's marks
        text: str = response.text
        at = text.find(mark.text, start)
        while at >= 0 and not self._is_own(mark, response, at):
            at = text.find(mark.text, at + 1)
        return at

    def _stands(self, mark: Mark, response: Any, at: int) -> bool:
        return at >= 0 and response.text.startswith(mark.text, at) and self._is_own(mark, response, at)

    def _is_own(self, mark: Mark, response: Any, at: int) -> bool:
        """Whether each token of the tokenizer's own in the text of `mark` at `at` stands there as its id."""
        ids, ends, added = response.output_ids, response.text_ends, response.added_tokens
        return all(ids[ends.searchsorted(at + end)] == added.get(token) for token, end in mark.tokens)

    # --- does it fit the model? -----------------------------------------------------------------------------------

    def self_test(self, tokenizer: Tokenizer, prompt_tail: str | None) -> None:
        for token, _ in (*self._open.tokens, *self._close.tokens):
            self._check_token(token, tokenizer)
        for token in self.stops:
            self._check_token(token, tokenizer)
            if tokenizer.added_tokens[token] not in tokenizer.stop_ids:
                raise EyasError(
                    f"model.tokenizer: {token!r} ends a turn in the reasoning format {self.name!r}, but the tokenizer's "
                    f"files do not name it as an end token; add its id to eos_token_id in generation_config.json"
                )
        if prompt_tail is not None:
            self._check_prompt(prompt_tail.rstrip())

    def _check_token(self, token: str, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode(token, control=True)
        if ids != [tokenizer.added_tokens.get(token)]:
            raise EyasError(
                f"model.reasoning: the format {self.name!r} needs {token!r} as one token, but the tokenizer of "
                f"this model reads it as {ids}; choose the format of your model, or correct its tokenizer"
            )

    def _check_prompt(self, tail: str) -> None:
        if not tail.endswith(self.prompt_ends):
            expected = " or ".join(map(repr, self.prompt_ends))
            raise EyasError(
                f"model.reasoning: the format {self.name!r} expects prompts that end in {expected}, but with this chat "
                f"template they end in {tail[-40:]!r}; correct model.reasoning or model.template_options"
            )


def _first_token(at: int, ends: Array) -> int:
    """The first token that holds a part of the character at `at`, be it only some of its bytes."""
    if at == 0:
        return 0
    before = int(ends.searchsorted(at))
    return before if before == len(ends) or ends[before] > at else before + 1
