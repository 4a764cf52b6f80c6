"""The stats stage: how long the answers of one dataset are, what became of them, and whether the books balance.

Deterministic: counts are exact, fractions are rounded to three decimals, keys are sorted, no times.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from eyas.columns import read_columns
from eyas.config import StatsSettings
from eyas.errors import EyasError
from eyas.fit import Fit, fit_of
from eyas.prompts import PromptsReport
from eyas.recordfile import atomic, read_records
from eyas.records import Outcome, unit_id

QUANTILES = (0.05, 0.10, 0.25, 0.75, 0.90, 0.95, 0.99)
STATUSES = ("answered", "refused", "failed", "not_needed", "not_reached")
KINDS = ("prompt", "reasoning", "answer", "output")
COLUMNS = [
    "accepted",
    "truncated",
    "constrained",
    "reasoning_state",
    "prompt_tokens",
    "reasoning_tokens",
    "answer_tokens",
    "output_tokens",
]
LISTS = ("reasons", "marks")

T = TypeVar("T")
Hashes = np.ndarray[tuple[int], np.dtype[np.uint64]]


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


class Names:
    """Different names, in 8 bytes each: their hashes."""

    def __init__(self) -> None:
        self._hashes = array("Q")

    def add(self, name: str) -> None:
        self._hashes.append(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))

    def different(self) -> Hashes:
        """Each once, in order; shape [names]."""
        return np.unique(np.array(self._hashes, np.uint64))

    def __len__(self) -> int:
        return len(self.different())


@dataclass
class Ledger:
    """What the outcomes say. keys, turns, answered: the prompts, their turns, and the units (key, turn, sample) that are answered."""

    rows: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    keys: Names = field(default_factory=Names)
    turns: Names = field(default_factory=Names)
    answered: Names = field(default_factory=Names)

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Ledger:
        ledger = cls()
        key, turn = None, None
        for outcome in outcomes:
            ledger.rows += 1
            ledger.statuses[outcome.status] += 1
            if outcome.reason is not None:
                ledger.reasons[outcome.status][outcome.reason] += 1
            if outcome.key != key:
                ledger.keys.add(outcome.key)
            if (outcome.key, outcome.turn) != (key, turn):
                ledger.turns.add(f"{outcome.key}:{outcome.turn}")
            key, turn = outcome.key, outcome.turn
            if outcome.status == "answered":
                ledger.answered.add(unit_id(outcome.key, outcome.turn, outcome.sample))
        return ledger

    def planned(self, samples: int) -> int:
        """Units that the prompts call for: each turn of each prompt, `samples` times."""
        return samples * len(self.turns)


@dataclass(frozen=True)
class Verdicts:
    """verdicts.parquet: one row per response in `frame`, without its key; the units it judges, as in Ledger; reasons and marks.

    decided: rows that are accepted with no reason against them, or rejected with one.
    """

    frame: pd.DataFrame
    units: Hashes
    decided: int
    tallies: dict[str, dict[str, Tally]]


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
    frame, answered = table.frame, ledger.answered.different()
    read = prompts.used + prompts.not_taken + sum(prompts.skipped.values())
    tokens = int((frame["reasoning_tokens"] + frame["answer_tokens"]).sum())
    equal: list[tuple[int, str, int, str, Path]] = [
        (prompts.rows_read, "source rows were read", read, "are used, not taken or skipped", prompts_report),
        (prompts.used, "prompts are in use", len(ledger.keys), "have outcomes", outcomes),
        (prompts.turns, "turns are in use", len(ledger.turns), "have outcomes", outcomes),
        (ledger.planned(settings.samples), "answers are planned", ledger.rows, "have an outcome", outcomes),
        (ledger.statuses["answered"], "outcomes are `answered`", len(frame), "have a verdict", verdicts),
        (
            len(answered),
            "answers are told apart",
            len(np.intersect1d(answered, table.units, assume_unique=True)),
            "are judged",
            verdicts,
        ),
        (len(frame), "verdicts exist", table.decided, "are accepted, or rejected for a reason", verdicts),
        (int(frame["output_tokens"].sum()), "output tokens", tokens, "are reasoning or answer", verdicts),
        (int(frame["accepted"].sum()), "answers are accepted", fit.rows, "are training rows", train),
    ]
    for left, says, right, instead, culprit in equal:
        if left != right:
            raise EyasError(
                f"{settings.dataset}: the books do not balance: {left:,} {says}, but {right:,} {instead}; "
                f"delete {culprit} and run again to rebuild it"
            )


# --- verdicts ----------------------------------------------------------------------------------------------------


def tabulate(path: Path) -> Verdicts:
    """Reads verdicts.parquet by column; the lists of reasons are counted batch by batch and not kept."""
    units = Names()
    decided = 0
    counts: dict[str, dict[str, list[int]]] = {name: {} for name in LISTS}
    parts = []
    for batch in read_columns(path, [*COLUMNS, "key", "turn", "sample", *LISTS]):
        for unit in zip(*(batch[name].to_pylist() for name in ("key", "turn", "sample")), strict=True):
            units.add(unit_id(*unit))
        blamed = pc.greater(pc.list_value_length(batch["reasons"]), 0)
        decided += pc.sum(pc.xor(batch["accepted"], blamed)).as_py() or 0
        accepted = batch.filter(batch["accepted"])
        for name, rows in (("reasons", batch), ("marks", accepted)):
            _count(rows[name], rows["output_tokens"], counts[name])
        parts.append(batch.select(COLUMNS))
    table = pa.Table.from_batches(parts)
    tallies = {
        name: {
            reason: Tally(rows=rows, tokens=tokens) for reason, (rows, tokens) in sorted(counts[name].items())
        }
        for name in LISTS
    }
    return Verdicts(frame=table.to_pandas(), units=units.different(), decided=decided, tallies=tallies)


def _count(lists: pa.Array, tokens: pa.Array, into: dict[str, list[int]]) -> None:
    """Adds, for each string in `lists`, one row and its output tokens."""
    owners = tokens.take(pc.list_parent_indices(lists))
    listed = pa.table({"reason": lists.flatten(), "tokens": owners})
    grouped = listed.group_by("reason").aggregate([("tokens", "count"), ("tokens", "sum")])
    for row in grouped.to_pylist():
        count = into.setdefault(row["reason"], [0, 0])
        count[0] += row["tokens_count"]
        count[1] += row["tokens_sum"]


# --- describing --------------------------------------------------------------------------------------------------


def describe(
    settings: StatsSettings, prompts: PromptsReport, ledger: Ledger, table: Verdicts, fit: Fit
) -> DatasetStats:
    """The statistics of one dataset whose books balance."""
    frame = table.frame
    accepted = frame[frame["accepted"]]
    truncated = int(frame["truncated"].sum())
    finish = frame["truncated"].map({True: "length", False: "stop"})
    return DatasetStats(
        dataset=settings.dataset,
        prompts=prompts,
        planned=ledger.planned(settings.samples),
        outcomes={status: ledger.statuses[status] for status in STATUSES},
        outcome_reasons={status: dict(reasons) for status, reasons in ledger.reasons.items()},
        accepted=_tally(accepted),
        rejected=_tally(frame[~frame["accepted"]]),
        rejected_for=table.tallies["reasons"],
        marked_for=table.tallies["marks"],
        finish={str(kind): _tally(rows) for kind, rows in frame.groupby(finish, observed=True)},
        truncated_share=round(truncated / len(frame), 6) if len(frame) else None,
        constrained=_tally(frame[frame["constrained"]]),
        reasoning_states={
            str(state): _tally(rows) for state, rows in frame.groupby("reasoning_state", observed=True)
        },
        tokens={
            kind: Lengths(all=spread(frame[f"{kind}_tokens"]), accepted=spread(accepted[f"{kind}_tokens"]))
            for kind in KINDS
        },
        fit=fit,
        by_length=bins(frame, parts=1),
        histogram=bins(frame, parts=4),
    )


def _tally(frame: pd.DataFrame) -> Tally:
    return Tally(rows=len(frame), tokens=int(frame["output_tokens"].sum()))


def spread(tokens: pd.Series[Any]) -> Spread:
    """The distribution of a column of token counts. Quantiles are interpolated linearly."""
    n, total = len(tokens), int(tokens.sum())
    # Rounded, so that the last bit of a machine's floating-point sum does not change the file.
    quantiles = tokens.quantile(list(QUANTILES)).round(3).tolist() if n else []
    return Spread(
        n=n,
        total=total,
        mean=round(total / n, 3) if n else None,
        sd=round(float(tokens.std()), 3) if n > 1 else None,
        min=int(tokens.min()) if n else None,
        median=round(float(tokens.median()), 3) if n else None,
        max=int(tokens.max()) if n else None,
        quantiles={f"p{share * 100:.0f}": value for share, value in zip(QUANTILES, quantiles, strict=False)},
    )


def bins(frame: pd.DataFrame, parts: int) -> list[Bin]:
    """Accepted and rejected responses by output tokens, from the first to the last bin that is not empty.

    Each octave [2^k, 2^(k+1)) is cut into `parts` equal pieces, so the edges are the same for every dataset.
    """
    lengths = frame["output_tokens"]
    if lengths.empty:
        return []
    edges = bin_edges(int(lengths.max()), parts)
    of_row = pd.cut(lengths, edges, right=False, labels=False)
    counts = pd.crosstab(of_row, frame["accepted"]).reindex(columns=[True, False], fill_value=0)
    counts = counts.reindex(range(int(of_row.min()), int(of_row.max()) + 1), fill_value=0)
    return [
        Bin(low=edges[at], high=edges[at + 1], accepted=int(good), rejected=int(bad))
        for at, good, bad in zip(counts.index, counts[True], counts[False], strict=True)
    ]


def bin_edges(highest: int, parts: int) -> list[int]:
    """0, 1, 2, … up to the first edge above `highest`; octaves too small for `parts` whole pieces have fewer."""
    edges, octave = [0], 1
    while edges[-1] <= highest:
        step = max(1, octave // parts)
        edges += range(octave, 2 * octave, step)
        octave *= 2
    return edges[: next(at for at, edge in enumerate(edges) if edge > highest) + 1]
