"""Parquet files of records, streamed both ways in flat memory; equal rows give equal bytes.

Pages have checksums, the footer has none, and pyarrow takes a changed one for other values or aborts the process. So
files are sealed: between the last page and the footer, where no reader looks, stand eight bytes and the SHA-256 of all
that follows. Other tools read them as usual; readers here demand the seal.

Importing this loads pyarrow, so plugin modules, and what the Snakefile reads, import it inside functions.
"""

from __future__ import annotations

import array
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from eyas.errors import EyasError
from eyas.recordfile import atomic

# A row group ends at so many rows or ids. Each takes 15 kB of memory of whoever opens the file, so a million short rows
# must not make a thousand of them.
GROUP_ROWS = 8_192
GROUP_IDS = 1 << 20
READ_ROWS = 128  # rows that are Python objects at one time; an id takes 36 bytes as such
LEVEL = 3
SEAL = b"EyasSeal"
ENDING = struct.Struct("<I4s")  # how a Parquet file ends: length of the footer, magic

T = TypeVar("T", bound=Struct)


@contextmanager
def new_parquet(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A Parquet file in the one way Eyas writes them: zstd, page checksums, dictionaries where values repeat, a seal."""
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=LEVEL,
        write_page_checksum=True,
        use_dictionary=[path for field in schema for path in _repeating(field)],
    ) as writer:
        yield writer
    with path.open("r+b") as file:
        tail = _tail(file, 0)
        file.seek(-len(tail), os.SEEK_END)
        file.write(_seal(tail) + tail)


@contextmanager
def open_parquet(path: str | Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file in the one way Eyas reads them: its seal and every page checked.

    Raises EyasError naming the file and the remedy for one that is missing or damaged, also for what is found while
    the block reads.
    """
    try:
        with Path(path).open("rb") as file:
            tail = _tail(file, SEAL_SIZE)
        if tail[:SEAL_SIZE] != _seal(tail[SEAL_SIZE:]):
            raise damaged(path, "its footer does not fit its seal")
        # Buffered beforehand, which is pyarrow's default, a file stays in memory as far as it has been read.
        with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as parquet:
            yield parquet
    except FileNotFoundError:
        raise EyasError(f"{path}: missing; run `snakemake` to build it") from None
    except (pa.ArrowException, KeyError, OSError, UnicodeDecodeError) as error:
        raise damaged(path, str(error)) from None


def damaged(path: str | Path, cause: str) -> EyasError:
    """The error for a table that is not as it was written."""
    # pyarrow tells some causes over several lines.
    return EyasError(f"{path}: damaged ({' '.join(cause.split())}); delete it and run again to rebuild it")


def _tail(file: BinaryIO, before: int) -> bytes:
    """The end of a Parquet file, from `before` bytes before its footer on; as much as there is."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - ENDING.size, 0))
    ending = file.read()
    footer = ENDING.unpack(ending)[0] if len(ending) == ENDING.size else 0
    file.seek(max(size - ENDING.size - footer - before, 0))
    return file.read()


def _seal(tail: bytes) -> bytes:
    return SEAL + hashlib.sha256(tail).digest()


SEAL_SIZE = len(_seal(b""))


def _repeating(field: pa.Field, prefix: str = "") -> Iterator[str]:
    """Parquet's paths of the columns in `field`, token ids left out.

    Ids outgrow a dictionary, and Parquet then gives it up half-way: 9 % more bytes and 30 MB more memory.
    """
    path = prefix + field.name
    if pa.types.is_struct(field.type):
        for child in field.type:
            yield from _repeating(child, f"{path}.")
    elif not pa.types.is_list(field.type):
        yield path
    elif field.type.value_type != pa.int32():
        yield f"{path}.list.element"


class TableWriter(Generic[T]):
    """Writes records to a Parquet file; use as a context manager. The file appears when the block succeeds.

    schema: the record's fields by name; a nested record is a pa.struct. group_rows: rows per row group, fewer where
    those hold GROUP_IDS ids.
    """

    def __init__(self, path: str | Path, schema: pa.Schema, group_rows: int = GROUP_ROWS) -> None:
        self.rows = self._waiting = 0
        self._path, self._schema, self._group_rows = path, schema, group_rows
        self._records = _Records(pa.struct(list(schema)))

    def __enter__(self) -> TableWriter[T]:
        with ExitStack() as stack:
            temporary = stack.enter_context(atomic(self._path))
            self._file = stack.enter_context(new_parquet(temporary, self._schema))
            self._stack = stack.pop_all()
        return self

    def write(self, record: T) -> None:
        """Adds one row. Raises EyasError naming row and field for an integer that does not fit its column."""
        try:
            self._records.add(record)
        except _Misfit as misfit:
            raise EyasError(f"{self._path}: row {self.rows + 1}: {misfit}") from None
        self.rows += 1
        self._waiting += 1
        if self._waiting == self._group_rows or self._records.ids >= GROUP_IDS:
            self._flush()

    def _flush(self) -> None:
        self._waiting = 0
        self._file.write_table(pa.Table.from_arrays(self._records.take().flatten(), schema=self._schema))

    def __exit__(self, *exception: Any) -> bool | None:
        if exception[0] is not None:
            return self._stack.__exit__(*exception)
        with self._stack:
            if self._waiting:
                self._flush()
        return None


def write_table(path: str | Path, schema: pa.Schema, rows: Iterable[Struct], batch: int = GROUP_ROWS) -> int:
    """Writes all records to `path` in one atomic step and returns their number. batch: rows per row group."""
    with TableWriter[Any](path, schema, batch) as writer:
        for row in rows:
            writer.write(row)
    return writer.rows


def read_table(path: str | Path, record_type: type[T]) -> Iterator[T]:
    """Streams the records of a Parquet file.

    Raises EyasError naming file, row and field for a row that is not a `record_type`, and for a damaged file.
    """
    rows = 0
    try:
        with open_parquet(path) as file:
            # One thread: others gain nothing, for Python objects are the slow part, and each keeps a heap of its own.
            for batch in file.iter_batches(batch_size=READ_ROWS, use_threads=False):
                for values in _dicts(batch.to_struct_array()):
                    rows += 1
                    yield msgspec.convert(values, record_type)
            expected = file.metadata.num_rows
    except msgspec.ValidationError as error:
        raise EyasError(f"{path}: row {rows}: {error}; delete the file and run again to rebuild it") from None
    # pyarrow ends in silence at a page whose kind it does not know.
    if rows != expected:
        raise damaged(path, f"{rows} rows, its footer says {expected}")


# --- Python to Arrow ---------------------------------------------------------------------------------------------


class _Misfit(Exception):
    """A value that its column cannot hold."""


class _Column(Protocol):
    def add(self, value: Any) -> None: ...

    def take(self) -> pa.Array:
        """What was added since the last call."""


def _column(field: pa.Field) -> _Column:
    if pa.types.is_struct(field.type):
        return _Records(field.type)
    if pa.types.is_list(field.type) and pa.types.is_signed_integer(field.type.value_type):
        return _IntegerLists(field)
    return _Values(field.type)


class _Values:
    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        self._values: list[Any] = []
        self.add = self._values.append

    def take(self) -> pa.Array:
        taken = _array(self._values, self._kind)
        self._values.clear()
        return taken


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """As pa.array, which first imports pandas to look for its types: half of what a small job costs."""
    count = len(values)
    if None in values:
        return pa.array(values, kind)
    if pa.types.is_list(kind):
        items = _array([item for value in values for item in value], kind.value_type)
        return pa.Array.from_buffers(kind, count, [None, _offsets(map(len, values))], children=[items])
    if pa.types.is_string(kind):
        texts = [value.encode() for value in values]
        return pa.Array.from_buffers(
            kind, count, [None, _offsets(map(len, texts)), pa.py_buffer(b"".join(texts))]
        )
    if pa.types.is_boolean(kind):
        return pa.Array.from_buffers(
            kind, count, [None, pa.py_buffer(np.packbits(np.array(values, np.bool_), bitorder="little"))]
        )
    if kind in _CODES:
        return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(array.array(_CODES[kind], values))])
    return pa.array(values, kind)


def _offsets(lengths: Iterable[int]) -> pa.Buffer:
    return pa.py_buffer(array.array("i", accumulate(lengths, initial=0)))


# Types of array and struct.
_CODES = {pa.int8(): "b", pa.int16(): "h", pa.int32(): "i", pa.int64(): "q", pa.float64(): "d"}


class _IntegerLists:
    """Packs each list at once: three times as fast as pa.array, and no Python integer is kept."""

    def __init__(self, field: pa.Field) -> None:
        self._field = field
        self._code = _CODES[field.type.value_type]
        self._width = struct.calcsize(f"={self._code}")
        self._clear()

    @property
    def ids(self) -> int:
        """How many wait."""
        return len(self._buffer) // self._width

    def _clear(self) -> None:
        self._buffer, self._lengths = bytearray(), array.array("i")

    def add(self, values: list[int]) -> None:
        try:
            self._buffer += struct.pack(f"={len(values)}{self._code}", *values)
        except struct.error:
            limit = 1 << (self._field.type.value_type.bit_width - 1)
            bad = next(v for v in values if type(v) is not int or not -limit <= v < limit)
            raise _Misfit(f"{self._field.name}: {bad!r} does not fit {self._field.type.value_type}") from None
        self._lengths.append(len(values))

    def take(self) -> pa.Array:
        # No copies: the arrays keep these buffers.
        items = pa.Array.from_buffers(
            self._field.type.value_type, sum(self._lengths), [None, pa.py_buffer(self._buffer)]
        )
        lists = pa.Array.from_buffers(
            self._field.type, len(self._lengths), [None, _offsets(self._lengths)], children=[items]
        )
        self._clear()
        return lists


class _Records:
    def __init__(self, kind: pa.StructType) -> None:
        self._fields = [kind.field(index) for index in range(kind.num_fields)]
        self._columns = [_column(field) for field in self._fields]
        self._lists = [column for column in self._columns if isinstance(column, _IntegerLists)]
        self._parts = [
            (attrgetter(field.name), column.add)
            for field, column in zip(self._fields, self._columns, strict=True)
        ]

    @property
    def ids(self) -> int:
        """How many ids wait, in the column that has most."""
        return max((column.ids for column in self._lists), default=0)

    def add(self, record: Struct) -> None:
        for get, add in self._parts:
            add(get(record))

    def take(self) -> pa.StructArray:
        return pa.StructArray.from_arrays([column.take() for column in self._columns], fields=self._fields)


# --- Arrow to Python ---------------------------------------------------------------------------------------------


def _dicts(array: pa.StructArray) -> Iterator[dict[str, Any]]:
    names = [field.name for field in array.type]
    columns = [_values(column) for column in array.flatten()]
    return (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))


def _values(column: pa.Array) -> list[Any]:
    if column.null_count == 0 and pa.types.is_struct(column.type):
        return list(_dicts(column))
    if (
        column.null_count == 0
        and pa.types.is_list(column.type)
        and pa.types.is_integer(column.type.value_type)
    ):
        items = column.flatten()
        if items.null_count == 0:
            # Ten times as fast as to_pylist, which makes an Arrow scalar of every item.
            flat = np.from_dlpack(items).tolist()
            offsets = np.from_dlpack(column.offsets)
            return [flat[start:end] for start, end in pairwise((offsets - offsets[0]).tolist())]
    values: list[Any] = column.to_pylist()
    return values
