"""What is on disk, one definition each. Unknown fields, missing fields and wrong types are errors.

Token ids are the truth everywhere; text is for people. Token counts are counts of ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from eyas.lengths import Array


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records: immutable, keyword-only, closed."""


class Message(Record, frozen=True, omit_defaults=True):
    """One message in the OpenAI shape. reasoning_content, thinking: of an assistant, as its model's template calls it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning_content: str | None = None
    thinking: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Origin(Record, frozen=True):
    """Where a prompt came from. `row` counts from 1 within `file`."""

    source: str
    revision: str | None
    file: str
    row: int


class Turn(Record, frozen=True):
    """What leads from one answer of a recorded conversation to the next.

    calls: the tool calls of the recorded answer before, in the OpenAI shape. messages: what follows that answer: results of
    these calls, what the user says next.
    """

    calls: list[dict[str, Any]]
    messages: list[Message]


class Prompt(Record, frozen=True):
    """One conversation, independent of any model: its opening, and what leads on from there.

    key: the source's own unique id, else `sha256(canonical row)[:16]-<n>` for the n-th identical row.
    occurrence: how many earlier prompts of this dataset have the same messages, outer white space aside, and tools, so
        that identical prompts are distinct requests.
    group: hash of the normalised prompt text; hold-out keeps a group on one side.
    messages: what the first turn answers. turns: the later turns that are asked for, none with `turns: first`.
    """

    key: str
    messages: list[Message]
    turns: list[Turn]
    tools: list[dict[str, Any]]
    origin: Origin
    occurrence: int
    group: str


class Finish(Record, frozen=True):
    """Why generation ended. `matched` is the stop token id or the stop string; null for `length`."""

    type: Literal["stop", "length"]
    matched: int | str | None = None


class Reply(Record, frozen=True, dict=True):
    """What the model said to one request: everything that training needs, nothing about how it travelled.

    request: hash of all that decides the distribution of the answer.
    output_ids: as generated, the end token included when there is one; a list, or while asking eyas.lengths.Ids.
    text: decoded `output_ids` without the end token; undecodable bytes become U+FFFD.
    text_lengths: per output token, how many characters of `text` it completes, one character each: "0" for none, "1" for one,
        ":" for ten, as in ASCII (eyas.lengths.spell). `text_ends` are their sums.
    stop_ids: the model's end tokens.
    added_tokens: the ids of the tokenizer's own tokens (control tokens, reasoning and tool-call markers) that occur in
        prompt or output, by their text; so a marker is told from text that spells it, whatever the reasoning format.
    control_ids: those of them that are control tokens.
    effective_max_new: the limit in force, in tokens; the server may hold less than was asked.
    constrained: a grammar shaped the answer, so it is off-policy.
    """

    request: str
    prompt_ids: list[int]
    output_ids: Sequence[int]
    finish: Finish
    text: str
    text_lengths: str
    stop_ids: list[int]
    added_tokens: dict[str, int]
    control_ids: list[int]
    effective_max_new: int
    constrained: bool

    @cached_property
    def output(self) -> Array:
        """`output_ids` for numpy, which looks for few ids among many."""
        from eyas.lengths import places

        return places(self.output_ids)

    @cached_property
    def text_ends(self) -> Array:
        """Per output token, how many characters of `text` are complete once it is known."""
        from eyas.lengths import ends_of

        return ends_of(self.text_lengths)


class Response(Reply, frozen=True):
    """A reply in its place: the answer to turn `turn`, sample `sample` of prompt `key`."""

    key: str
    turn: int
    sample: int

    @property
    def inner(self) -> Array:
        """`output` without what ended it."""
        ids = self.output_ids
        return self.output[: len(ids) - (bool(ids) and ids[-1] == self.finish.matched)]

    @cached_property
    def _own(self) -> tuple[frozenset[int], frozenset[int]]:
        """End tokens and tokens of the tokenizer's own, and those of them in the output before what ended it."""
        own = frozenset([*self.stop_ids, *self.added_tokens.values()])
        return own, self._among(own)

    def _among(self, tokens: frozenset[int]) -> frozenset[int]:
        # Some configs name -1 where a model has no such token.
        ids = [token for token in tokens if token >= 0]
        if not ids:
            return frozenset()
        inner = self.inner
        near = inner[(inner >= min(ids)) & (inner <= max(ids))]
        if len(near) > 64:  # the tokens lie far apart
            from numpy import isin

            near = near[isin(near, ids)]
        return tokens.intersection(near.tolist())

    def holds(self, tokens: Iterable[int]) -> bool:
        """Whether one of `tokens` stands in the output, before what ended it."""
        wanted = frozenset(tokens)
        if not wanted:
            return False
        own, found = self._own  # what checks look for: searched once for all of them
        return not wanted.isdisjoint(found if wanted <= own else self._among(wanted))


class Delivery(Record, frozen=True):
    """How a reply travelled. Kept beside the reply, never in it: two runs with equal answers differ only here.

    started, finished: Unix time in seconds. usage: counts as the server reported them.
    """

    attempt: int
    server: str
    started: float
    finished: float
    usage: dict[str, int]


Status = Literal["answered", "refused", "failed", "not_needed", "not_reached"]


class Outcome(Record, frozen=True):
    """What became of one planned (key, turn, sample).

    refused: the prompt itself cannot be asked, says the template, the context or the server. Not to be confused with a
    rejected response, which is an answer that a check found fault with (see Verdict).
    """

    key: str
    turn: int
    sample: int
    status: Status
    reason: str | None = None


ReasoningState = Literal[
    "closed",
    "closed_by_tool",
    "truncated_in_reasoning",
    "unclosed",
    "empty",
    "none",
    "double_close",
    "reopened",
    "stray_open",
]


CUT = "cut at the limit"  # what the check `length` says, as a reason or as a mark


class Verdict(Record, frozen=True):
    """Whether a response is fit for training, why not, and how many tokens it has of each sort.

    reasoning_tokens counts the tokens up to and including the closing delimiter; answer_tokens the rest of the
    output, the end token included; so the two sum to output_tokens.
    """

    key: str
    turn: int
    sample: int
    accepted: bool
    reasons: list[str]
    marks: list[str]
    truncated: bool
    constrained: bool
    reasoning_state: ReasoningState
    prompt_tokens: int
    reasoning_tokens: int
    answer_tokens: int
    output_tokens: int


class TrainMetadata(Record, frozen=True):
    """What travels with a training row for people and filters; trainers ignore it."""

    dataset: str
    group: str
    request: str
    finish: Literal["stop", "length"]
    truncated: bool
    constrained: bool
    reasoning_tokens: int
    answer_tokens: int


class TrainRow(Record, frozen=True):
    """One generation as a trainer reads it: `input_ids = prompt_ids + output_ids`, no shift.

    loss_mask: 1 exactly for the generated tokens, 0 for the prompt; same length as input_ids.
    """

    id: str
    primary_id: str
    input_ids: list[int]
    loss_mask: list[int]
    metadata: TrainMetadata


def unit_id(key: str, turn: int, sample: int) -> str:
    """The name of one generation within its dataset."""
    return f"{key}:{turn}:{sample}"


def unit_place(name: str) -> tuple[int, int]:
    """Turn and sample of a generation, from its name or a training row's id."""
    _, turn, sample = name.rsplit(":", 2)
    return int(turn), int(sample)
