"""The mix stage: all datasets as one shuffled training set, with a share of prompts held out.

A row's place is decided by hash(seed, id) and its side by hash(normalised prompt), so the result depends on the rows alone, not on the
order or number of jobs; duplicates, samples and turns of a prompt stay on one side. Rows are sorted through buckets on
disk, so memory stays flat, but for 17 bytes a row: its place, its side, its tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eyas.columns import read_columns
from eyas.config import MixSettings
from eyas.errors import EyasError
from eyas.fit import MixFit, mix_fit
from eyas.recordfile import atomic, scratch
from eyas.tables import GROUP_IDS, GROUP_ROWS, new_parquet, open_parquet
from eyas.train import SCHEMA

BUCKET_TOKENS = 8_000_000  # token slots per bucket, about 40 MB: what one sort holds in memory
BATCH_ROWS = 256
_COLUMNS = ["id", "metadata"]


class SideCounts(msgspec.Struct):
    """What one dataset gives to one side."""

    rows: int = 0
    supervised_tokens: int = 0


class MixReport(msgspec.Struct):
    """mix.json: rows and supervised tokens by side and dataset.

    dropped_by_weights: rows that given weights leave out, those of datasets without a weight included.
    fit: of train.parquet.
    """

    train: dict[str, SideCounts]
    eval: dict[str, SideCounts]
    dropped_by_weights: dict[str, SideCounts]
    fit: MixFit


@dataclass(frozen=True)
class _Counts:
    """As in MixReport."""

    train: dict[str, SideCounts]
    eval: dict[str, SideCounts]
    dropped_by_weights: dict[str, SideCounts]


@dataclass(frozen=True)
class RowsInBrief:
    """One dataset's rows in brief: order hash, side and supervised tokens, each of shape [rows]."""

    order: np.ndarray
    held_out: np.ndarray
    supervised: np.ndarray


def mix(settings: MixSettings, trains: list[Path], train: Path, evaluation: Path, report: Path) -> MixReport:
    """Writes both sides and the report. `trains` are the datasets' train.parquet in the order of settings.datasets."""
    brief = {
        name: rows_in_brief(path, settings) for name, path in zip(settings.datasets, trains, strict=True)
    }
    limits = _limits(settings, brief)
    counts = _Counts(*({name: SideCounts() for name in settings.datasets} for _ in range(3)))
    slots = sum(_slots(path) for path in trains)
    with scratch(train) as folder:
        buckets = _Buckets(folder, 1 + slots // BUCKET_TOKENS)
        with buckets:
            for name, path in zip(settings.datasets, trains, strict=True):
                _scatter(name, path, brief[name], limits.get(name), buckets, counts)
        for side, path in ((False, train), (True, evaluation)):
            with (
                atomic(path) as temporary,
                new_parquet(temporary, SCHEMA) as writer,
            ):
                for table in buckets.sorted(side):
                    writer.write_table(table, row_group_size=_group_rows(table))
    result = MixReport(counts.train, counts.eval, counts.dropped_by_weights, mix_fit(train))
    with atomic(report) as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    return result


def _group_rows(table: pa.Table) -> int:
    """Rows per row group, by their mean length; a function of the rows alone."""
    ids: int = pc.sum(pc.list_value_length(table["input_ids"])).as_py() or 1
    rows: int = table.num_rows
    return max(1, min(GROUP_ROWS, rows * GROUP_IDS // ids))


def order_hash(seed: int, row_id: str) -> int:
    """A row's place in the shuffle, 64 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{row_id}".encode()).digest()[:8], "big")


def is_held_out(group: str, share: float) -> bool:
    """Whether the prompts of a group belong to the evaluation side."""
    return int.from_bytes(hashlib.sha256(f"hold-out:{group}".encode()).digest()[:8], "big") < share * 2**64


def rows_in_brief(path: Path, settings: MixSettings) -> RowsInBrief:
    """Reads one dataset's train.parquet, in 17 bytes a row."""
    order, held_out, supervised = array("Q"), array("B"), array("q")
    for batch in read_columns(path, _COLUMNS, BATCH_ROWS):
        metadata = batch.column("metadata")
        order.extend(order_hash(settings.seed, row_id) for row_id in batch.column("id").to_pylist())
        held_out.extend(
            is_held_out(group, settings.eval_share) for group in metadata.field("group").to_pylist()
        )
        tokens = metadata.field("reasoning_tokens").to_numpy() + metadata.field("answer_tokens").to_numpy()
        supervised.extend(tokens.tolist())
    return RowsInBrief(
        np.frombuffer(order, np.uint64),
        np.frombuffer(held_out, np.bool_),
        np.frombuffer(supervised, np.int64),
    )


def _limits(settings: MixSettings, brief: dict[str, RowsInBrief]) -> dict[str, int]:
    """Per dataset, the order hash from which training rows are left out; 2**64 takes all.

    With given weights every dataset supplies its share of supervised tokens without repeating a row, so the dataset that is scarcest
    for its weight decides the size. A dataset without a weight has no limit here: it gives nothing, to neither side.
    """
    if settings.weights is None:
        return dict.fromkeys(settings.datasets, 2**64)
    available = {name: int(rows.supervised[~rows.held_out].sum()) for name, rows in brief.items()}
    for name in settings.weights:
        if not available[name]:
            raise EyasError(
                f"mix.weights.{name}: the dataset has no training rows, so nothing can be mixed with it; leave it out of "
                f"mix.weights, or see results/{name}/stats.json for why its rows were rejected"
            )
    size = min(available[name] / weight for name, weight in settings.weights.items())
    limits = {}
    for name, weight in settings.weights.items():
        rows, wanted = brief[name], size * weight
        training = ~rows.held_out
        order = np.argsort(rows.order[training], kind="stable")
        reached = np.cumsum(rows.supervised[training][order])
        # Whole rows: the last one taken is the one that reaches the share.
        taken = int(np.searchsorted(reached, wanted - 0.5)) + 1
        limits[name] = int(rows.order[training][order][taken]) if taken < len(order) else 2**64
    return limits


def _slots(path: Path) -> int:
    """Token slots in a train.parquet, from its footer."""
    with open_parquet(path) as file:
        metadata = file.metadata
    names = [metadata.schema.column(n).path for n in range(metadata.num_columns)]
    column = next(n for n, name in enumerate(names) if name.startswith("input_ids"))
    return sum(metadata.row_group(g).column(column).num_values for g in range(metadata.num_row_groups))


class _Buckets:
    """Rows on disk by the top of their order hash, one Arrow stream per bucket and side."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count = folder, count
        self._schema = SCHEMA.append(pa.field("order", pa.uint64()))
        self._sinks: dict[tuple[bool, int], pa.RecordBatchStreamWriter] = {}

    def __enter__(self) -> _Buckets:
        return self

    def __exit__(self, *_exception: object) -> None:
        for sink in self._sinks.values():
            sink.close()

    def add(self, batch: pa.RecordBatch, order: np.ndarray, held_out: np.ndarray) -> None:
        buckets = ((order >> np.uint64(32)) * np.uint64(self._count) >> np.uint64(32)).astype(np.int64)
        rows = pa.RecordBatch.from_arrays([*batch.columns, pa.array(order)], schema=self._schema)
        for side in (False, True):
            for bucket in np.unique(buckets[held_out == side]):
                chosen = np.flatnonzero((buckets == bucket) & (held_out == side))
                self._sink(side, int(bucket)).write_batch(rows.take(pa.array(chosen)))

    def _sink(self, side: bool, bucket: int) -> pa.RecordBatchStreamWriter:
        if (side, bucket) not in self._sinks:
            self._sinks[side, bucket] = pa.ipc.new_stream(self._path(side, bucket), self._schema)
        return self._sinks[side, bucket]

    def _path(self, side: bool, bucket: int) -> str:
        return str(self._folder / f"{'eval' if side else 'train'}-{bucket}.arrows")

    def sorted(self, side: bool) -> Iterator[pa.Table]:
        """One side's rows in order, a bucket at a time."""
        for key in sorted(self._sinks):
            if key[0] == side:
                with pa.ipc.open_stream(self._path(*key)) as reader:
                    table = reader.read_all()
                yield table.sort_by([("order", "ascending"), ("id", "ascending")]).drop_columns(["order"])


def _scatter(
    name: str, path: Path, rows: RowsInBrief, limit: int | None, buckets: _Buckets, counts: _Counts
) -> None:
    """Sorts one dataset's rows into the buckets. limit: as in _limits, None for a dataset that gives nothing."""
    start = 0
    for batch in read_columns(path, SCHEMA.names, BATCH_ROWS):
        end = start + batch.num_rows
        order, held_out = rows.order[start:end], rows.held_out[start:end]
        supervised = rows.supervised[start:end]
        if limit is None:
            dropped = np.ones(len(order), np.bool_)
        elif limit < 2**64:
            dropped = ~held_out & (order >= np.uint64(limit))
        else:
            dropped = np.zeros(len(order), np.bool_)
        for side, chosen in (
            (counts.train, ~held_out & ~dropped),
            (counts.eval, held_out & ~dropped),
            (counts.dropped_by_weights, dropped),
        ):
            side[name].rows += int(chosen.sum())
            side[name].supervised_tokens += int(supervised[chosen].sum())
        kept = np.flatnonzero(~dropped)
        if len(kept):
            buckets.add(batch.take(pa.array(kept)), order[kept], held_out[kept])
        start = end
