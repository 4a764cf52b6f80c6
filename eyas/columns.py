"""Parquet files by column: only the columns asked for, batch by batch, every page checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from eyas.tables import damaged, open_parquet

BATCH_ROWS = 1 << 16  # rows in memory at one time: small for numbers, too many for lists of ids


def read_columns(
    path: Path, columns: Sequence[str], batch_rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Streams `columns` of a Parquet file; at least one batch, so that an empty file has its types.

    Raises EyasError for a file that is missing, lacks a column, or is damaged.
    """
    rows = 0
    with open_parquet(path) as file:
        schema = pa.schema([file.schema_arrow.field(name) for name in columns])
        yield pa.RecordBatch.from_pylist([], schema=schema)
        # One group at a time and by one thread: else Arrow's allocator keeps what it has freed, more with every group.
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(batch_rows, [group], list(columns), use_threads=False):
                rows += batch.num_rows
                yield batch.select(list(columns))
        expected = file.metadata.num_rows
    # pyarrow ends in silence at a page whose kind it does not know.
    if rows != expected:
        raise damaged(path, f"{rows} rows, its footer says {expected}")
