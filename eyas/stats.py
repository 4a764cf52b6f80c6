"""The stats stage: how long the answers of one dataset are, what became of them, and whether the books balance.

Deterministic: counts are exact, fractions are rounded to three decimals, keys are sorted, no times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
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
from eyas.records import Outcome

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
    """What the outcomes say. units: per prompt key, its (turn, sample) pairs. answered: units as (key, turn, sample)."""

    rows: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    units: dict[str, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    answered: set[tuple[str, int, int]] = field(default_factory=set)

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Ledger:
        ledger = cls()
        for outcome in outcomes:
            ledger.rows += 1
            ledger.statuses[outcome.status] += 1
            if outcome.reason is not None:
                ledger.reasons[outcome.status][outcome.reason] += 1
            ledger.units[outcome.key].add((outcome.turn, outcome.sample))
            if outcome.status == "answered":
                ledger.answered.add((outcome.key, outcome.turn, outcome.sample))
        return ledger

    @property
    def turns(self) -> int:
        """Of all conversations together."""
        return sum(len({turn for turn, _ in units}) for units in self.units.values())

    def planned(self, samples: int) -> int:
        """Units that the prompts call for: each turn of each prompt, `samples` times."""
        return samples * self.turns


@dataclass(frozen=True)
class Verdicts:
    """verdicts.parquet: one row per response in `frame`, without its key; the units it judges; reasons and marks.

    decided: rows that are accepted with no reason against them, or rejected with one.
    """

    frame: pd.DataFrame
    units: set[tuple[str, int, int]]
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
    frame = table.frame
    read = prompts.used + prompts.not_taken + sum(prompts.skipped.values())
    tokens = int((frame["reasoning_tokens"] + frame["answer_tokens"]).sum())
    equal: list[tuple[int, str, int, str, Path]] = [
        (prompts.rows_read, "source rows were read", read, "are used, not taken or skipped", prompts_report),
        (prompts.used, "prompts are in use", len(ledger.units), "have outcomes", outcomes),
        (prompts.turns, "turns are in use", ledger.turns, "have outcomes", outcomes),
        (ledger.planned(settings.samples), "answers are planned", ledger.rows, "have an outcome", outcomes),
        (ledger.statuses["answered"], "outcomes are `answered`", len(frame), "have a verdict", verdicts),
        (
            len(ledger.answered),
            "answers are told apart",
            len(ledger.answered & table.units),
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
    units: set[tuple[str, int, int]] = set()
    decided = 0
    counts: dict[str, dict[str, list[int]]] = {name: {} for name in LISTS}
    parts = []
    for batch in read_columns(path, [*COLUMNS, "key", "turn", "sample", *LISTS]):
        units.update(zip(*(batch[name].to_pylist() for name in ("key", "turn", "sample")), strict=True))
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
    return Verdicts(frame=table.to_pandas(), units=units, decided=decided, tallies=tallies)


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
