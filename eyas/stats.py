"""The stats stage: how long the answers of one dataset are, what became of them, and whether the books balance.

Deterministic: counts are exact, fractions are rounded to three decimals, keys are sorted, no times. Of token counts, how often
each occurs is kept, and of prompts one digest over all keys: memory does not grow with the rows.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from eyas.columns import read_columns
from eyas.config import StatsSettings
from eyas.errors import EyasError
from eyas.fit import Counts, Fit, fit_of, sum_counts
from eyas.prompts import KeysDigest, PromptsReport
from eyas.recordfile import atomic, read_records
from eyas.records import Outcome, unit_id

PERCENTILES = (5, 10, 25, 75, 90, 95, 99)
STATUSES = ("answered", "refused", "failed", "not_needed", "not_reached")
KINDS = ("prompt", "reasoning", "answer", "output")
GROUPS = ("accepted", "truncated", "constrained", "reasoning_state")
LISTS = ("reasons", "marks")

T = TypeVar("T")


class Tally(Struct, frozen=True, kw_only=True):
    """Responses, and their output tokens."""

    rows: int
    tokens: int


class Spread(Struct, frozen=True, kw_only=True):
    """How token counts are distributed. sd: of a sample (n - 1). Null where there are too few rows to say."""

    n: int
    total: int
    mean: float | None
    sd: float | None
    min: int | None
    median: float | None
    max: int | None
    quantiles: dict[str, float]


class Lengths(Struct, frozen=True, kw_only=True):
    """Token counts of one kind over all responses and over the accepted ones."""

    all: Spread
    accepted: Spread


class Bin(Struct, frozen=True, kw_only=True):
    """Responses with `low` <= output tokens < `high`."""

    low: int
    high: int
    accepted: int
    rejected: int


class DatasetStats(Struct, frozen=True, kw_only=True):
    """stats.json.

    planned, outcomes, answered, accepted, rejected, failed count units (key, turn, sample). outcome_reasons: per
    status, how often each reason. rejected_for: of the rejected responses; marked_for: of the accepted ones, so what
    marks would cost as reasons to reject. A response with two reasons counts under both.
    fit: of the accepted responses, as training rows. by_length: in powers of two of output tokens. histogram: in quarters of them, without the empty ends.
    """

    dataset: str
    prompts: PromptsReport
    planned: int
    outcomes: dict[str, int]
    outcome_reasons: dict[str, dict[str, int]]
    accepted: Tally
    rejected: Tally
    rejected_for: dict[str, Tally]
    marked_for: dict[str, Tally]
    finish: dict[str, Tally]
    truncated_share: float | None
    constrained: Tally
    reasoning_states: dict[str, Tally]
    tokens: dict[str, Lengths]
    fit: Fit
    by_length: list[Bin]
    histogram: list[Bin]

    @property
    def answered(self) -> int:
        return self.outcomes["answered"]


def stats(
    settings: StatsSettings, prompts_report: Path, outcomes: Path, verdicts: Path, train: Path, out: Path
) -> DatasetStats:
    """Writes stats.json of one dataset to `out`.

    Raises EyasError if what was planned, answered and judged does not add up.
    """
    prompts = _read_json(prompts_report, PromptsReport)
    ledger = Ledger.of(read_records(outcomes, Outcome))
    table = tabulate(verdicts)
    fit = fit_of(train)
    balance(settings, ledger, table, prompts, fit, prompts_report, outcomes, verdicts, train)
    result = describe(settings, prompts, ledger, table, fit)
    with atomic(out) as temporary:
        temporary.write_bytes(
            msgspec.json.format(msgspec.json.encode(result, order="sorted"), indent=2) + b"\n"
        )
    return result


def read_stats(path: Path) -> DatasetStats:
    """stats.json, typed."""
    return _read_json(path, DatasetStats)


def _read_json(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise EyasError(f"{path}: missing; run `snakemake` to build it") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EyasError(f"{path}: {error}; delete it and run again to rebuild it") from None


# --- the books ---------------------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """What the outcomes say. A conversation's stand together, so only those of one are in memory.

    conversations: those that follow each other under one key; keys: their KeysDigest. turns: of all of them together.
    answered: digest of the units that are, in their order.
    """

    rows: int = 0
    conversations: int = 0
    keys: str = ""
    turns: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    answered: str = ""

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Ledger:
        ledger, keys, answered = cls(), KeysDigest(), hashlib.sha256()
        for key, conversation in groupby(outcomes, lambda outcome: outcome.key):
            turns = set()
            for outcome in conversation:
                ledger.rows += 1
                ledger.statuses[outcome.status] += 1
                if outcome.reason is not None:
                    ledger.reasons[outcome.status][outcome.reason] += 1
                turns.add(outcome.turn)
                if outcome.status == "answered":
                    answered.update(f"{unit_id(key, outcome.turn, outcome.sample)}\n".encode())
            ledger.conversations += 1
            keys.add(key)
            ledger.turns += len(turns)
        ledger.keys, ledger.answered = keys.hex(), answered.hexdigest()
        return ledger

    def planned(self, samples: int) -> int:
        """Units that the prompts call for: each turn of each prompt, `samples` times."""
        return samples * self.turns


@dataclass(frozen=True)
class Lengthwise:
    """How many accepted and how many rejected responses have 0, 1, 2, … tokens of one kind."""

    accepted: Counts
    rejected: Counts

    @property
    def all(self) -> Counts:
        return sum_counts(self.accepted, self.rejected)


@dataclass(frozen=True)
class Verdicts:
    """What verdicts.parquet says.

    decided: rows that are accepted with no reason against them, or rejected with one. units: digest of the units that are
    judged, in their order. tallies: by column and value; of marks those of accepted rows. lengths: by kind.
    """

    decided: int
    units: str
    tallies: dict[str, dict[str | bool, Tally]]
    lengths: dict[str, Lengthwise]

    def tally(self, column: str, value: str | bool) -> Tally:
        return self.tallies[column].get(value, Tally(rows=0, tokens=0))


def balance(
    settings: StatsSettings,
    ledger: Ledger,
    table: Verdicts,
    prompts: PromptsReport,
    fit: Fit,
    prompts_report: Path,
    outcomes: Path,
    verdicts: Path,
    train: Path,
) -> None:
    """Raises EyasError at the first pair of counts that should be equal and are not."""
    read = prompts.used + prompts.not_taken + sum(prompts.skipped.values())
    rows = int(table.lengths["output"].all.sum())
    output, *parts = (total(table.lengths[kind].all) for kind in ("output", "reasoning", "answer"))
    accepted = table.tally("accepted", True).rows
    equal: list[tuple[int, str, int, str, Path]] = [
        (prompts.rows_read, "source rows were read", read, "are used, not taken or skipped", prompts_report),
        (prompts.used, "prompts are in use", ledger.conversations, "have outcomes", outcomes),
        (prompts.turns, "turns are in use", ledger.turns, "have outcomes", outcomes),
        (ledger.planned(settings.samples), "answers are planned", ledger.rows, "have an outcome", outcomes),
        (ledger.statuses["answered"], "outcomes are `answered`", rows, "have a verdict", verdicts),
        (rows, "verdicts exist", table.decided, "are accepted, or rejected for a reason", verdicts),
        (output, "output tokens", sum(parts), "are reasoning or answer", verdicts),
        (accepted, "answers are accepted", fit.rows, "are training rows", train),
    ]
    wrong = next(
        (
            (f"{left:,} {says}, but {right:,} {instead}", culprit)
            for left, says, right, instead, culprit in equal
            if left != right
        ),
        None,
    )
    if wrong is None and ledger.keys != prompts.keys:
        wrong = (
            f"{prompts.used:,} prompts have outcomes, but not those of {prompts_report}, or in another order",
            outcomes,
        )
    if wrong is None and ledger.answered != table.units:
        wrong = f"{rows:,} answers are judged, but not those of {outcomes}, or in another order", verdicts
    if wrong is not None:
        what, culprit = wrong
        raise EyasError(
            f"{settings.dataset}: the books do not balance: {what}; delete {culprit} and run again to rebuild it"
        )


# --- verdicts ----------------------------------------------------------------------------------------------------


def tabulate(path: Path) -> Verdicts:
    """Reads verdicts.parquet by column and adds it up, batch by batch."""
    units = hashlib.sha256()
    decided = 0
    counts: dict[str, dict[str | bool, list[int]]] = {name: {} for name in (*GROUPS, *LISTS)}
    lengths = {(kind, fate): np.zeros(0, np.int64) for kind in KINDS for fate in (True, False)}
    columns = ["key", "turn", "sample", *GROUPS, *LISTS, *(f"{kind}_tokens" for kind in KINDS)]
    for batch in read_columns(path, columns):
        turn, sample = (batch[name].cast(pa.string()) for name in ("turn", "sample"))
        named = pc.binary_join_element_wise(batch["key"], turn, sample, ":")
        units.update("".join(f"{unit}\n" for unit in named.to_pylist()).encode())
        blamed = pc.greater(pc.list_value_length(batch["reasons"]), 0)
        decided += pc.sum(pc.xor(batch["accepted"], blamed)).as_py() or 0
        for name in GROUPS:
            _count(batch[name], batch["output_tokens"], counts[name])
        fates = {True: batch.filter(batch["accepted"]), False: batch.filter(pc.invert(batch["accepted"]))}
        for name, rows in (("reasons", batch), ("marks", fates[True])):
            owners = pc.list_parent_indices(rows[name])
            _count(rows[name].flatten(), rows["output_tokens"].take(owners), counts[name])
        for (kind, fate), so_far in lengths.items():
            tokens = np.from_dlpack(fates[fate][f"{kind}_tokens"])
            lengths[kind, fate] = sum_counts(so_far, np.bincount(tokens))
    return Verdicts(
        decided=decided,
        units=units.hexdigest(),
        tallies={
            name: {value: Tally(rows=rows, tokens=tokens) for value, (rows, tokens) in sorted(found.items())}
            for name, found in counts.items()
        },
        lengths={kind: Lengthwise(lengths[kind, True], lengths[kind, False]) for kind in KINDS},
    )


def _count(values: pa.Array, tokens: pa.Array, into: dict[str | bool, list[int]]) -> None:
    """Adds, for each of `values`, one row and its output tokens."""
    listed = pa.table({"value": values, "tokens": tokens})
    grouped = listed.group_by("value").aggregate([("tokens", "count"), ("tokens", "sum")])
    for row in grouped.to_pylist():
        count = into.setdefault(row["value"], [0, 0])
        count[0] += row["tokens_count"]
        count[1] += row["tokens_sum"]


# --- describing --------------------------------------------------------------------------------------------------


def describe(
    settings: StatsSettings, prompts: PromptsReport, ledger: Ledger, table: Verdicts, fit: Fit
) -> DatasetStats:
    """The statistics of one dataset whose books balance."""
    answered = ledger.statuses["answered"]
    truncated = table.tally("truncated", True)
    finish = {"length": truncated, "stop": table.tally("truncated", False)}
    output = table.lengths["output"]
    return DatasetStats(
        dataset=settings.dataset,
        prompts=prompts,
        planned=ledger.planned(settings.samples),
        outcomes={status: ledger.statuses[status] for status in STATUSES},
        outcome_reasons={status: dict(reasons) for status, reasons in ledger.reasons.items()},
        accepted=table.tally("accepted", True),
        rejected=table.tally("accepted", False),
        rejected_for=_named(table.tallies["reasons"]),
        marked_for=_named(table.tallies["marks"]),
        finish={kind: tally for kind, tally in finish.items() if tally.rows},
        truncated_share=round(truncated.rows / answered, 6) if answered else None,
        constrained=table.tally("constrained", True),
        reasoning_states=_named(table.tallies["reasoning_state"]),
        tokens={
            kind: Lengths(all=spread(counts.all), accepted=spread(counts.accepted))
            for kind, counts in table.lengths.items()
        },
        fit=fit,
        by_length=bins(output, parts=1),
        histogram=bins(output, parts=4),
    )


def _named(tallies: dict[str | bool, Tally]) -> dict[str, Tally]:
    return {str(name): tally for name, tally in tallies.items()}


def total(counts: Counts) -> int:
    """The sum of token counts of which the i-th occurs counts[i] times."""
    return int(counts @ np.arange(len(counts)))


def spread(counts: Counts) -> Spread:
    """The distribution of token counts of which the i-th occurs counts[i] times. Quantiles are interpolated linearly."""
    n, tokens = int(counts.sum()), total(counts)
    values = np.flatnonzero(counts)
    ranks = np.cumsum(counts[values])

    def percentile(percent: int) -> float:
        """Exact but for the last rounding, so that no machine's floating-point sums change the file."""
        whole, hundredths = divmod((n - 1) * percent, 100)
        low, high = (
            int(values[np.searchsorted(ranks, at, "right")]) for at in (whole, min(whole + 1, n - 1))
        )
        return round(low + (high - low) * hundredths / 100, 3)

    # n times the sum of squared deviations, in whole numbers.
    deviations = n * sum(int(counts[value]) * int(value) ** 2 for value in values) - tokens**2
    return Spread(
        n=n,
        total=tokens,
        mean=round(tokens / n, 3) if n else None,
        sd=round(math.sqrt(deviations / (n * (n - 1))), 3) if n > 1 else None,
        min=int(values[0]) if n else None,
        median=percentile(50) if n else None,
        max=int(values[-1]) if n else None,
        quantiles={f"p{percent}": percentile(percent) for percent in PERCENTILES} if n else {},
    )


def bins(lengths: Lengthwise, parts: int) -> list[Bin]:
    """Accepted and rejected responses by output tokens, from the first to the last bin that is not empty.

    Each octave [2^k, 2^(k+1)) is cut into `parts` equal pieces, so the edges are the same for every dataset.
    """
    found = np.flatnonzero(lengths.all)
    if not len(found):
        return []
    shortest, longest = int(found[0]), int(found[-1])
    edges = bin_edges(longest, parts)
    return [
        Bin(
            low=low,
            high=high,
            accepted=int(lengths.accepted[low:high].sum()),
            rejected=int(lengths.rejected[low:high].sum()),
        )
        for low, high in pairwise(edges)
        if high > shortest
    ]


def bin_edges(highest: int, parts: int) -> list[int]:
    """0, 1, 2, … up to the first edge above `highest`; octaves too small for `parts` whole pieces have fewer."""
    edges, octave = [0], 1
    while edges[-1] <= highest:
        step = max(1, octave // parts)
        edges += range(octave, 2 * octave, step)
        octave *= 2
    return edges[: next(at for at, edge in enumerate(edges) if edge > highest) + 1]
