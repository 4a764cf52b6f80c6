"""verdicts.parquet: one Verdict a row, in the order of responses.jsonl.zst."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from eyas.records import Verdict
from eyas.tables import read_table, write_table

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("turn", pa.int32()),
        ("sample", pa.int32()),
        ("accepted", pa.bool_()),
        ("reasons", pa.list_(pa.string())),
        ("marks", pa.list_(pa.string())),
        ("truncated", pa.bool_()),
        ("constrained", pa.bool_()),
        ("reasoning_state", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("reasoning_tokens", pa.int32()),
        ("answer_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
    ]
)
GROUP_ROWS = 8_192  # rows per row group, about 1 MB in memory


def write_verdicts(path: Path, verdicts: Iterable[Verdict]) -> int:
    """Writes all verdicts in one atomic step and returns their number."""
    return write_table(path, SCHEMA, verdicts, GROUP_ROWS)


def read_verdicts(path: Path) -> Iterator[Verdict]:
    """Streams the verdicts; raises EyasError for a damaged file or a row that is no Verdict."""
    return read_table(path, Verdict)
