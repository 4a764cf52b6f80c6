"""Parquet files by column: only the columns asked for, batch by batch, every page checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.errors import EyasError

BATCH_ROWS = 1 << 16  # rows in memory at one time: small for numbers, too many for lists of ids


def read_columns(
    path: Path, columns: Sequence[str], batch_rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Streams `columns` of a Parquet file; at least one batch, so that an empty file has its types.

    Raises EyasError for a file that is missing, lacks a column, or is damaged.
    """
    rows = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = pa.schema([file.schema_arrow.field(name) for name in columns])
            yield pa.RecordBatch.from_pylist([], schema=schema)
            for batch in file.iter_batches(batch_rows, columns=list(columns)):
                rows += batch.num_rows
                yield batch.select(list(columns))
            expected = file.metadata.num_rows
    except FileNotFoundError:
        raise EyasError(f"{path}: missing; run `snakemake` to build it") from None
    except (pa.ArrowException, KeyError, OSError, UnicodeDecodeError) as error:
        cause = " ".join(str(error).split())  # pyarrow tells some over several lines
        raise EyasError(f"{path}: damaged ({cause}); delete it and run again to rebuild it") from None
    # pyarrow ends in silence at a page whose kind it does not know.
    if rows != expected:
        raise EyasError(
            f"{path}: damaged ({rows} rows, its footer says {expected}); delete it and run again to rebuild it"
        )
