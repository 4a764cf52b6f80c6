"""Files of records: JSON lines in zstd frames, closed by a seal, so that a cut file is an error and never a shorter dataset.

The seal is a zstd skippable frame (RFC 8878, 3.1.2) with the number of rows and the SHA-256 of the lines. Every
zstd tool skips it and sees plain JSON lines; readers here demand it. Python's zstandard and pandas otherwise accept a
truncated last frame in silence.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zstandard

from eyas.errors import EyasError

SEAL_MAGIC = 0x184D2A5E
FRAME_BYTES = (
    1 << 20
)  # uncompressed bytes per frame: small enough to keep memory flat, large enough to compress
READ_BYTES = 1 << 18
LEVEL = 3
ABANDONED = 24 * 3600.0  # s without a write after which a temporary file of another host is nobody's

T = TypeVar("T")


class Seal(msgspec.Struct, frozen=True):
    """What a finished file says of itself."""

    rows: int
    sha256: str


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it is synced to disk and renamed, on error removed."""
    target = Path(path)
    temporary = _temporary(target)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def scratch(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary folder beside `path`, removed in the end."""
    folder = _temporary(Path(path))
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; on success its files are synced to disk and it takes that name, on error it goes."""
    with scratch(path) as folder:
        yield folder
        for name in folder.iterdir():
            with name.open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(path, ignore_errors=True)
        folder.rename(path)


def _temporary(target: Path) -> Path:
    """A new name beside `target` that says whose it is; what killed jobs left under such names is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.*.*.tmp"):
        host, pid, _ = left.name.removeprefix(f".{target.name}.").removesuffix(".tmp").rsplit(".", 2)
        with contextlib.suppress(FileNotFoundError):
            if _abandoned(left, host, int(pid)):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def _abandoned(temporary: Path, host: str, pid: int) -> bool:
    if host != socket.gethostname():
        return time.time() - temporary.stat().st_mtime > ABANDONED
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


class Writer(Generic[T]):
    """Writes records to a sealed file; use as a context manager. The file appears when the block succeeds."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.rows = 0
        self._context = atomic(path)
        self._encoder = msgspec.json.Encoder()
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
        self._digest = hashlib.sha256()
        self._buffer = bytearray()

    def __enter__(self) -> Writer[T]:
        self._file = self._context.__enter__().open("wb")
        return self

    def write(self, record: T) -> None:
        self._buffer += self._encoder.encode(record)
        self._buffer += b"\n"
        self.rows += 1
        if len(self._buffer) >= FRAME_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._buffer:
            self._digest.update(self._buffer)
            self._file.write(self._compressor.compress(bytes(self._buffer)))
            self._buffer.clear()

    def __exit__(self, *exception: Any) -> None:
        with contextlib.ExitStack() as stack:
            stack.push(self._context)
            stack.push(self._file)
            if exception[0] is not None:
                raise exception[1]
            self._flush()
            seal = msgspec.json.encode(Seal(rows=self.rows, sha256=self._digest.hexdigest()))
            self._file.write(struct.pack("<II", SEAL_MAGIC, len(seal)) + seal)


def write_records(path: str | os.PathLike[str], records: Iterable[Any]) -> int:
    """Writes all records to `path` in one atomic step and returns their number."""
    with Writer[Any](path) as writer:
        for record in records:
            writer.write(record)
    return writer.rows


def read_seal(path: str | os.PathLike[str]) -> Seal:
    """The seal at the end of a record file, without reading the records."""
    with Path(path).open("rb") as file:
        tail_at = max(0, file.seek(0, os.SEEK_END) - 4096)
        file.seek(tail_at)
        tail = file.read()
    at = tail.rfind(struct.pack("<I", SEAL_MAGIC))
    if at >= 0 and len(tail) >= at + 8:
        (size,) = struct.unpack_from("<I", tail, at + 4)
        if at + 8 + size == len(tail):
            with contextlib.suppress(msgspec.MsgspecError):
                return msgspec.json.decode(tail[at + 8 :], type=Seal)
    raise EyasError(
        f"{path}: the file is cut short or damaged (no seal at its end); delete it and run again to rebuild it"
    )


def read_records(
    path: str | os.PathLike[str], record_type: type[T], remedy: str = "delete it and run again to rebuild it"
) -> Iterator[T]:
    """Streams the records of a sealed file in flat memory.

    Raises EyasError naming file, line, field and `remedy` for a record that does not fit, and for a file whose rows or
    bytes differ from its seal.
    """
    seal = read_seal(path)
    decode: Callable[[bytes], T] = msgspec.json.Decoder(record_type).decode
    digest, rows = hashlib.sha256(), 0
    for line in _lines(path, digest, remedy):
        rows += 1
        try:
            record = decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise EyasError(f"{path}: line {rows}: {error}; {remedy}") from None
        yield record
    if rows != seal.rows or digest.hexdigest() != seal.sha256:
        raise EyasError(f"{path}: holds {rows} rows, its seal says {seal.rows}, or bytes differ; {remedy}")


def _lines(path: str | os.PathLike[str], digest: Any, remedy: str) -> Iterator[bytes]:
    rest = b""
    with Path(path).open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(
            file, read_size=READ_BYTES, read_across_frames=True
        )
        while True:
            try:
                chunk = reader.read(READ_BYTES)
            except zstandard.ZstdError as error:
                raise EyasError(f"{path}: damaged ({error}); {remedy}") from None
            if not chunk:
                break
            digest.update(chunk)
            # Only b"\n" ends a record: str.splitlines would also cut at U+2028 inside a text.
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
    if rest:
        yield rest
