"""Parquet files by column, for statistics: only the columns asked for, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.errors import EyasError


def read_columns(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Streams `columns` of a Parquet file; at least one batch, so that an empty file has its types.

    Raises EyasError for a file that is missing, lacks a column, or is damaged.
    """
    rows = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = pa.schema([file.schema_arrow.field(name) for name in columns])
            yield pa.RecordBatch.from_pylist([], schema=schema)
            for batch in file.iter_batches(columns=list(columns)):
                rows += batch.num_rows
                yield batch.select(list(columns))
            expected = file.metadata.num_rows
    except FileNotFoundError:
        raise EyasError(f"{path}: missing; run `snakemake` to build it") from None
    except (pa.ArrowException, KeyError, OSError) as error:
        raise EyasError(f"{path}: damaged ({error}); delete it and run again to rebuild it") from None
    # pyarrow ends in silence at a page whose kind it does not know.
    if rows != expected:
        raise EyasError(
            f"{path}: damaged ({rows} rows, its footer says {expected}); delete it and run again to rebuild it"
        )
