"""Reads dataset files row by row: JSON Lines, a JSON array, Parquet, CSV or lines of text; plain, gzipped or as zstd.

What a file is, is decided by its first bytes, for public files are often named wrongly; only CSV (.csv, .tsv) and lines
of text (.txt), which have none of their own, by name. NaN and Infinity, which pandas writes into JSON, are accepted
everywhere, as Parquet has them too.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import itertools
import json
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import zstandard

from eyas.errors import EyasError

READ_BYTES = 1 << 16
ZSTD_BYTES = 1 << 13  # a compressed chunk is decompressed as a whole, and may hold a thousand times as much
BATCH_ROWS = 256  # Parquet rows in memory at once; rows with long reasoning take 100 kB each
# RFC 8878, 3.1: a frame, and the sixteen magics of skippable frames, which parallel compressors put first.
ZSTD_MAGICS = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16)))
CSV_DELIMITERS = {".csv": ",", ".tsv": "\t"}
CSV_FIELD = 1 << 24  # characters; a quote that is never closed takes the rest of the file for one field
SPACE = " \t\r\n"  # JSON's white space (RFC 8259, 2); str.isspace knows more

PARQUET_MAGIC = b"PAR1"
PACKED = (".gz", ".zst", ".zstd")

Row = tuple[int, dict[str, Any]]


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of `path` with their numbers, counted from 1: line numbers for JSON Lines, else positions.

    Memory is that of a few rows, for Parquet of a few pages (some public files are one row group). Raises EyasError naming the file and the row for
    what is damaged, not JSON, or not an object.
    """
    if not path.is_file():
        raise EyasError(f"{path}: no such file; correct `files:` of the dataset or fetch the file")
    number = 0
    try:
        for number, row in _rows(path):
            yield number, row
    except _Damaged as error:
        raise EyasError(
            f"{path}: behind row {number}: cut short or damaged ({error}); fetch it again"
        ) from None


class _Damaged(Exception):
    """Compressed bytes that cannot be unpacked."""


def _rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == PARQUET_MAGIC:
        yield from _parquet(path, path)
        return
    chunks = _chunks(path, magic)
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head.strip()) > len(codecs.BOM_UTF8):
            break
    if head.startswith(PARQUET_MAGIC):
        yield from _packed_parquet(itertools.chain([head], chunks), path)
        return
    kind = next((suffix for suffix in reversed(path.suffixes) if suffix not in PACKED), "")
    if kind == ".parquet":
        raise EyasError(
            f"{path}: is not Parquet inside; fetch it again (a Git LFS pointer is a short text, not the data)"
        )
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise EyasError(f"{path}: is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
    head = head.removeprefix(codecs.BOM_UTF8)
    chunks = itertools.chain([head], chunks)
    if kind in CSV_DELIMITERS:
        yield from csv_rows(chunks, path, CSV_DELIMITERS[kind])
    elif kind == ".txt":
        yield from text_lines(chunks, path)
    else:
        yield from (json_array if head.lstrip().startswith(b"[") else json_lines)(chunks, path)


def text_lines(chunks: Iterable[bytes], path: Path) -> Iterator[Row]:
    """Each line as a row of one column, `text`. Only b"\\n" or b"\\r\\n" ends a line; a blank line is no row but has a number."""
    for number, line in enumerate(_lines(chunks), start=1):
        text = _utf8(line, path, number).removesuffix("\r")
        if text.strip():
            yield number, {"text": text}


def csv_rows(chunks: Iterable[bytes], path: Path, delimiter: str) -> Iterator[Row]:
    """Rows of CSV (RFC 4180), numbered from 1 behind the header; every value is text. A blank line is no row.

    Errors name the line where the row ends: a quoted field may hold lines of its own.
    """
    csv.field_size_limit(CSV_FIELD)
    lines = (f"{_utf8(line, path, number)}\n" for number, line in enumerate(_lines(chunks), start=1))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    remedy = "correct the line (quotes in a field are doubled, and the field quoted), or write JSON Lines"
    try:
        header = next(filter(None, reader), None)
        if header is None:
            return
        for column in header:
            if header.count(column) > 1:
                raise EyasError(f"{path}: line 1: two columns are called {column!r}; rename one")
        number = 0
        for fields in reader:
            if not fields:
                continue
            number += 1
            if len(fields) != len(header):
                raise EyasError(
                    f"{path}: line {reader.line_num}: row {number} has {len(fields)} fields where the header has"
                    f" {len(header)}; {remedy}"
                )
            yield number, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise EyasError(f"{path}: line {reader.line_num}: malformed CSV ({error}); {remedy}") from None


def _utf8(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise EyasError(
            f"{path}: line {number}: not UTF-8 ({error.reason} at byte {error.start + 1} of the line); convert the file"
            " with iconv, or correct the line"
        ) from None


def json_lines(chunks: Iterable[bytes], path: Path) -> Iterator[Row]:
    """Rows of JSON Lines. Only b"\\n" ends a line; a blank line is no row but has a number."""
    for number, line in enumerate(_lines(chunks), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            # json calls each line its line 1.
            what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise EyasError(
                f"{path}: line {number}: not valid JSON ({what}); correct the line, or fetch the file again"
                " (Eyas reads JSON Lines, a JSON array of objects, Parquet, and CSV named .csv)"
            ) from None
        if not isinstance(row, dict):
            raise EyasError(
                f"{path}: line {number}: is {type(row).__name__}, not an object; correct or remove the line"
            )
        yield number, row


def json_array(chunks: Iterable[bytes], path: Path) -> Iterator[Row]:
    """Rows of one JSON array, in the memory of the longest row and in linear time."""
    text = _Text(chunks, path)
    text.at = 1 + text.skip_space()
    if text.peek() == "]":
        text.at += 1
    else:
        delimiter = ","
        while delimiter == ",":
            text.number += 1
            yield text.number, text.take_object()
            delimiter = text.peek()
            if delimiter not in ("]", ","):
                raise text.error(
                    f"expected `,` or `]` after the row, found {delimiter!r}"
                    if delimiter
                    else "the array ends here without `]`"
                )
            text.at += 1
    if rest := text.peek():
        raise text.error(f"{rest!r} follows the end of the array")


class _Text:
    """The undecoded rest of a JSON array: a buffer that grows only as far as the row at hand needs."""

    def __init__(self, chunks: Iterable[bytes], path: Path) -> None:
        self.at = 0
        self.number = 0
        self._path = path
        self._chunks = iter(chunks)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._buffer = ""
        self._ended = False

    def error(self, what: str) -> EyasError:
        return EyasError(f"{self._path}: row {self.number}: {what}; correct the file, or fetch it again")

    def skip_space(self) -> int:
        """Moves to the next character that is no white space; returns where that is."""
        while True:
            while self.at < len(self._buffer) and self._buffer[self.at] in SPACE:
                self.at += 1
            if self.at < len(self._buffer) or not self._grow():
                return self.at

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        at = self.skip_space()
        return self._buffer[at : at + 1]

    def take_object(self) -> dict[str, Any]:
        if (first := self.peek()) != "{":
            raise self.error(
                f"is not an object with columns (it starts with {first!r})"
                if first
                else "the array ends here without `]`"
            )
        while True:
            try:
                row, self.at = json.JSONDecoder().raw_decode(self._buffer, self.at)
            except json.JSONDecodeError as error:
                # An object that is merely cut fails in an open string or within a few characters of the end (the
                # longest token that fails where it starts is an escaped surrogate pair). Anything else is malformed,
                # and reading on would only fill memory.
                cut = error.msg.startswith("Unterminated string") or error.pos > len(self._buffer) - 16
                if not (cut and self._grow()):
                    raise self.error(f"not valid JSON ({error.msg})") from None
            except (ValueError, RecursionError) as error:
                raise self.error(f"not valid JSON ({error})") from None
            else:
                assert isinstance(row, dict)
                return row

    def _grow(self) -> bool:
        """Reads on until the rest of the buffer has doubled, so that trying again costs linear time in all."""
        parts = [self._buffer[self.at :]]
        wanted, grown = max(1, len(parts[0])), 0
        while grown < wanted and not self._ended:
            chunk = next(self._chunks, None)
            self._ended = chunk is None
            try:
                parts.append(self._decoder.decode(chunk or b"", final=self._ended))
            except UnicodeDecodeError as error:
                raise self.error(
                    f"here or in a row soon after, the text is not UTF-8 ({error.reason})"
                ) from None
            grown += len(parts[-1])
        self._buffer, self.at = "".join(parts), 0
        return grown > 0


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []
    for chunk in chunks:
        # Not splitlines, which also cuts at "\r"; and never on decoded text, where it cuts at U+2028.
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join([*parts, end])
            parts = []
        parts.append(rest)
    yield b"".join(parts)


def _chunks(path: Path, magic: bytes) -> Iterator[bytes]:
    """The file's bytes, decompressed."""
    try:
        if magic in ZSTD_MAGICS:
            yield from _unzstd(path)
        elif magic.startswith(b"\x1f\x8b"):
            with gzip.open(path) as unzipped:
                while chunk := unzipped.read(READ_BYTES):
                    yield chunk
        else:
            with path.open("rb") as file:
                while chunk := file.read(READ_BYTES):
                    yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise _Damaged(error) from None


def _unzstd(path: Path) -> Iterator[bytes]:
    # Frame by frame, because python-zstandard's stream readers take a cut last frame for the end of the file.
    # Public dumps are often compressed with --long, hence the largest window.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    with path.open("rb") as file:
        while chunk := file.read(ZSTD_BYTES):
            while chunk:
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame = None
    if frame:
        raise EOFError("the last zstd frame is not whole")


def _packed_parquet(chunks: Iterable[bytes], path: Path) -> Iterator[Row]:
    """Parquet is read from its end, so one that is compressed as a whole is unpacked into a temporary file."""
    with tempfile.TemporaryFile() as unpacked:
        for chunk in chunks:
            unpacked.write(chunk)
        yield from _parquet(unpacked, path)


def _parquet(file: Path | IO[bytes], path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    # Arrow's own allocator keeps what it has freed: 50 MB for a file that needs 6.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    number = 0
    try:
        # Buffered beforehand, or without a buffer, a column of a row group is in memory as a whole.
        with pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=READ_BYTES) as table:
            names = table.schema_arrow.names
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise EyasError(f"{path}: two columns are called {twice!r}; rename one")
            for group in range(table.num_row_groups):
                for batch in table.iter_batches(BATCH_ROWS, [group], use_threads=False):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        cause = " ".join(str(error).split())  # pyarrow tells some causes over several lines
        raise EyasError(f"{path}: row {number + 1}: damaged Parquet ({cause}); fetch it again") from None
    except OverflowError as error:
        raise EyasError(
            f"{path}: behind row {number}: a date or time that Python cannot hold ({error}); correct the row, or write the file without that column"
        ) from None
