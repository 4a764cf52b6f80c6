"""How a training table fits a trainer: what a maximum length cuts off, and what a draft vocabulary covers.

Trainers cut a row at their `max_length` (SpecForge, speculators) or drop it whole (EAGLE), both without a word. An EAGLE-3 drafter
predicts only the ids that are frequent in its data: a supervised token outside them teaches it nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from eyas.columns import read_columns

MAX_LENGTHS = (2_048, 4_096, 8_192, 16_384)  # tokens, prompt included
DRAFT_VOCABULARIES = (16_000, 32_000)  # ids; 32,000 is what SpecForge's shipped EAGLE-3 configs have
BATCH_ROWS = 256

Counts = np.ndarray[tuple[int], np.dtype[np.int64]]


class Cut(Struct, frozen=True, kw_only=True):
    """What a maximum length costs.

    rows_cut: rows that are longer; a trainer that drops these loses `tokens_of_cut` supervised tokens. A trainer that cuts
    them loses reasoning_lost + answer_lost, and the whole of rows_lost, of which nothing supervised is left.
    """

    max_length: int
    rows_cut: int
    tokens_of_cut: int
    rows_lost: int
    reasoning_lost: int
    answer_lost: int


class Fit(Struct, frozen=True, kw_only=True):
    """One training table. reasoning_tokens and answer_tokens sum to its supervised tokens.

    ids: how many different ids are supervised. coverage: by size of the draft vocabulary, the share of supervised tokens
    that its most frequent ids make up; null for a table without any.
    """

    rows: int
    reasoning_tokens: int
    answer_tokens: int
    cuts: list[Cut]
    ids: int
    coverage: dict[str, float | None]


class MixFit(Struct, frozen=True, kw_only=True):
    """The training set. coverage_of: the share of each dataset's tokens in the draft vocabulary of the whole."""

    total: Fit
    coverage_of: dict[str, dict[str, float | None]]


def fit_of(path: Path) -> Fit:
    """The fit of one train.parquet. Streams it; raises EyasError if it is missing or damaged."""
    return mix_fit(path).total


def mix_fit(path: Path) -> MixFit:
    """The fit of the training set, and of each dataset's part in it."""
    lengths = [_Lost(limit) for limit in MAX_LENGTHS]
    rows = reasoning = answer = 0
    counts: dict[str, Counts] = {}
    for batch in read_columns(path, ["input_ids", "loss_mask", "metadata"], BATCH_ROWS):
        metadata = batch["metadata"]
        thought, answered = (metadata.field(f"{kind}_tokens").to_numpy() for kind in ("reasoning", "answer"))
        length = pc.list_value_length(batch["input_ids"]).to_numpy()
        for lost in lengths:
            lost.add(length, thought, answered)
        rows += len(length)
        reasoning, answer = reasoning + int(thought.sum()), answer + int(answered.sum())
        for dataset, ids in _supervised(batch):
            counts[dataset] = sum_counts(counts.get(dataset, np.zeros(0, np.int64)), np.bincount(ids))
    whole = np.zeros(0, np.int64)
    for part in counts.values():
        whole = sum_counts(whole, part)
    order = np.argsort(-whole, kind="stable")  # of equally frequent ids the lower first
    drafts = {str(size): order[:size] for size in DRAFT_VOCABULARIES}
    total = Fit(
        rows=rows,
        reasoning_tokens=reasoning,
        answer_tokens=answer,
        cuts=[lost.cut() for lost in lengths],
        ids=int(np.count_nonzero(whole)),
        coverage={size: _share(whole, chosen) for size, chosen in drafts.items()},
    )
    return MixFit(
        total=total,
        coverage_of={
            dataset: {size: _share(counts[dataset], chosen) for size, chosen in drafts.items()}
            for dataset in sorted(counts)
        },
    )


def _supervised(batch: pa.RecordBatch) -> Iterator[tuple[str, Counts]]:
    """The supervised ids of each dataset in a batch."""
    ids, mask = (batch[name].flatten().to_numpy() for name in ("input_ids", "loss_mask"))
    names, codes = np.unique(
        batch["metadata"].field("dataset").to_numpy(zero_copy_only=False), return_inverse=True
    )
    of_token = np.repeat(codes, pc.list_value_length(batch["input_ids"]).to_numpy())
    for code, name in enumerate(names):
        yield str(name), ids[(of_token == code) & (mask == 1)]


def sum_counts(left: Counts, right: Counts) -> Counts:
    """How often each number occurs in both together; the i-th element counts the number i."""
    if len(left) < len(right):
        left, right = right, left
    total = left.copy()
    total[: len(right)] += right
    return total


def _share(counts: Counts, chosen: Counts) -> float | None:
    total = int(counts.sum())
    if not total:
        return None
    return round(int(counts[chosen[chosen < len(counts)]].sum()) / total, 6)


class _Lost:
    """Adds up what one maximum length cuts off."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows_cut = self._tokens = self._rows_lost = self._reasoning = self._answer = 0

    def add(self, length: Counts, reasoning: Counts, answer: Counts) -> None:
        """Arrays of shape [rows], in tokens: whole rows, and what is supervised in them, which stands at their end."""
        supervised = reasoning + answer
        kept = np.clip(self._limit - (length - supervised), 0, supervised)
        kept_reasoning = np.minimum(kept, reasoning)
        cut = length > self._limit
        self._rows_cut += int(cut.sum())
        self._tokens += int(supervised[cut].sum())
        self._rows_lost += int((cut & (kept == 0)).sum())
        self._reasoning += int((reasoning - kept_reasoning).sum())
        self._answer += int((answer - (kept - kept_reasoning)).sum())

    def cut(self) -> Cut:
        return Cut(
            max_length=self._limit,
            rows_cut=self._rows_cut,
            tokens_of_cut=self._tokens,
            rows_lost=self._rows_lost,
            reasoning_lost=self._reasoning,
            answer_lost=self._answer,
        )
