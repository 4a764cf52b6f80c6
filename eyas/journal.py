"""The journal: finished responses, appended and never rewritten. The expensive part of a run.

A journal is a folder of segments, one per writer. An entry is a label and a zstd frame, appended by one write, alone or with
others:

    label   a zstd skippable frame (RFC 8878, 3.1.2): kind, hash, length of the frame that follows
    frame   one JSON line, checksummed

so a segment can be indexed by hopping from label to label, and any zstd tool reads it as JSON lines. A killed process
loses nothing that it had appended but what was not to be written soon; a power cut loses a second, or some 256 entries.
Readers merge the segments in order and the first entry of a hash wins.

The first write after a sync begins with a mark, a label without a frame that says how far the segment was on disk; a
segment that is closed or repaired ends with one. Damage before the last mark is an error. Behind it a power cut may leave
any page as zeros, so each entry there is checked, and what is not whole is passed over and reported. The next writer
makes that last: it cuts a damaged end, turns damage before whole entries into a gap (a skippable frame), and marks the
end. A segment without marks, as older versions wrote them, is checked as a whole, once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import socket
import struct
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import zstandard
from msgspec import Struct

from eyas.errors import EyasError
from eyas.lengths import Ids
from eyas.records import Delivery, Reply

# Stored as good as plainly. zstd's level 1 makes less than half of it, and takes longer than all else that journalling does.
LEVEL = -1000
LABEL = struct.Struct("<II1s16sI")  # skippable magic, its size, kind, hash, length of the frame
GAP = struct.Struct("<II")  # skippable magic, its size
LABEL_MAGIC, GAP_MAGIC = 0x184D2A50, 0x184D2A51
LABEL_SIZE = LABEL.size - 8
LABEL_START = struct.pack("<II", LABEL_MAGIC, LABEL_SIZE)
HASH_SIZE, PLACE_SIZE = 16, 8
SCAN_BYTES = 1 << 18  # read at a time where labels are searched
SYNC_SECONDS, SYNC_ENTRIES = 1.0, 256
MOST_WAITING = 32  # entries that are not urgent, written together
HEARTBEAT_STALE = 30.0  # seconds; only matters on file systems whose locks do not reach other hosts

log = logging.getLogger(__name__)


class Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of what a journal holds."""


class Answered(Entry, frozen=True, tag="answered"):
    """A finished answer."""

    reply: Reply
    delivery: Delivery


class Unanswered(Entry, frozen=True, tag="unanswered"):
    """A request settled without an answer: refused by the server, or failed within the accepted share.

    request: its hash; that of the rendering for a prompt that the server could not encode, since it has no request.
    """

    request: str
    status: Literal["refused", "failed"]
    reason: str


class Rendered(Entry, frozen=True, tag="rendered"):
    """Prompt ids of a conversation, or the reason why it cannot be rendered."""

    render: str
    ids: list[int] | None
    refusal: str | None


class ServerSeen(Entry, frozen=True, tag="server"):
    """The manifest of a server that answered, without secrets."""

    id: str
    manifest: dict[str, Any]


AnyEntry = Answered | Unanswered | Rendered | ServerSeen
E = TypeVar("E", bound=Entry)
_KINDS: dict[type[Entry], bytes] = {Answered: b"a", Unanswered: b"u", Rendered: b"r", ServerSeen: b"s"}
_MARK, _GAP = b"m", b""  # what is no entry


def _told(ids: Any) -> msgspec.Raw:
    """Token ids in the JSON that they came in."""
    if isinstance(ids, Ids):
        return msgspec.Raw(ids.json)
    raise TypeError(f"{type(ids).__name__} has no JSON")


def _hash_of(entry: Entry) -> str:
    if isinstance(entry, Answered):
        return entry.reply.request
    if isinstance(entry, Unanswered):
        return entry.request
    if isinstance(entry, Rendered):
        return entry.render
    assert isinstance(entry, ServerSeen)
    return entry.id


def _mark(synced: int) -> bytes:
    """Says that the bytes of its segment before `synced` were on disk when it was written."""
    place = synced.to_bytes(8, "big")
    check = hashlib.blake2b(place, digest_size=HASH_SIZE - len(place)).digest()
    return LABEL.pack(LABEL_MAGIC, LABEL_SIZE, _MARK, place + check, 0)


def _marked_by(label: bytes) -> int | None:
    """What a mark says, or None if it is not whole."""
    at = len(LABEL_START) + len(_MARK)
    synced = int.from_bytes(label[at : at + 8], "big")
    return synced if label == _mark(synced) else None


class Segment:
    """One append-only file, in the size that it has now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self.synced = 0  # where what the last mark vouches for ends
        self.damage: list[tuple[int, int]] = []  # where what is not whole begins and ends
        self._decompressor = zstandard.ZstdDecompressor()

    def entries(self, file: Any) -> Iterator[tuple[bytes, bytes, int, int]]:
        """(kind, hash, frame offset, frame length) of every whole entry; sets `synced` and `damage`.

        Frames before the last mark are not looked at. Raises EyasError where no entry follows another there.
        """
        self.synced, self.damage = self._last_mark(file), []
        at = 0
        while at < self.size:
            part = self._part(file, at)
            if part is not None:
                kind, _, offset, length = part
                if kind not in (_MARK, _GAP):
                    yield part
                at = offset + length
            elif at < self.synced:
                raise EyasError(
                    f"{self.path}: damaged at byte {at:,}, which had been synced to disk; restore the file from a backup, or "
                    f"move it away to have its responses asked again"
                )
            else:
                end = self._next_part(file, at + GAP.size)
                log.warning(
                    "%s: %d bytes from byte %d on are not whole (a writer was killed, or the power failed); what they held "
                    "will be asked again",
                    self.path,
                    end - at,
                    at,
                )
                self.damage.append((at, end))
                at = end

    def _part(self, file: Any, at: int) -> tuple[bytes, bytes, int, int] | None:
        """The entry, mark or gap at byte `at`; None where none begins, or where it is not vouched for and not whole."""
        file.seek(at)
        label = file.read(LABEL.size)
        if len(label) < LABEL.size:
            return None
        magic, size, kind, digest, length = LABEL.unpack(label)
        part = kind, digest, at + LABEL.size, length
        if magic == GAP_MAGIC:
            part = _GAP, b"", at + GAP.size, size
        elif not label.startswith(LABEL_START):
            return None
        kind, _, offset, length = part
        if at < self.synced:
            return part if offset + length <= self.synced else None
        if offset + length > self.size:
            return None
        if kind == _MARK:
            return part if _marked_by(label) is not None else None
        if kind != _GAP:
            try:
                self._decompressor.decompress(file.read(length))
            except zstandard.ZstdError:
                return None
        return part

    def _next_part(self, file: Any, start: int) -> int:
        """Where the first whole entry, mark or gap from byte `start` on begins; the end of the file without one."""
        while start < self.size:
            file.seek(start)
            chunk: bytes = file.read(SCAN_BYTES)
            at = -1
            while (at := chunk.find(LABEL_START, at + 1)) >= 0:
                if self._part(file, start + at) is not None:
                    return start + at
            start += max(len(chunk) - len(LABEL_START) + 1, 1)  # a label may lie across two chunks
        return self.size

    def _last_mark(self, file: Any) -> int:
        """What the last whole mark says, searched from the end of the file."""
        end = self.size
        while end > 0:
            start = max(end - SCAN_BYTES, 0)
            file.seek(start)
            chunk = file.read(end - start + LABEL.size)
            at = len(chunk)
            while (at := chunk.rfind(LABEL_START + _MARK, 0, at)) >= 0:
                synced = _marked_by(chunk[at : at + LABEL.size])
                if synced is not None:
                    return synced
            end = start
        return 0


class _Index:
    """Hashes of one kind with their places, 24 bytes an entry, sorted where they lie: memory stays nearly flat."""

    def __init__(self) -> None:
        self._entries = bytearray()  # hash, place, hash, place, …

    def add(self, digest: bytes, segment: int, offset: int) -> None:
        self._entries += digest + (segment << 40 | offset).to_bytes(PLACE_SIZE, "big")

    def seal(self) -> None:
        # As bytes, so equal hashes stand in the order of their places.
        np.frombuffer(self._entries, f"S{HASH_SIZE + PLACE_SIZE}").sort()

    def find(self, digest: bytes) -> tuple[int, int] | None:
        """(segment, offset) of the first entry with this hash."""
        entries, size = self._entries, HASH_SIZE + PLACE_SIZE
        at = size * bisect_left(
            range(len(self)), bytearray(digest), key=lambda n: entries[n * size : n * size + HASH_SIZE]
        )
        if entries[at : at + HASH_SIZE] != digest:
            return None
        place = int.from_bytes(entries[at + HASH_SIZE : at + size], "big")
        return place >> 40, place & ((1 << 40) - 1)

    def __len__(self) -> int:
        return len(self._entries) // (HASH_SIZE + PLACE_SIZE)


class Journal:
    """Reads a journal folder as it is now; entries appended later need a new Journal."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._decoder = msgspec.json.Decoder(AnyEntry)
        self._decompressor = zstandard.ZstdDecompressor()
        self._index = {kind: _Index() for kind in _KINDS.values()}
        self.segments = [Segment(path) for path in _segment_paths(self.folder)]
        self._files: list[Any] = []
        for number, segment in enumerate(self.segments):
            file = segment.path.open("rb")
            self._files.append(file)
            for kind, digest, offset, _length in segment.entries(file):
                if kind not in self._index:
                    raise EyasError(
                        f"{segment.path}: entry of unknown kind {kind!r}; it was written by a newer Eyas"
                    )
                self._index[kind].add(digest, number, offset)
        for index in self._index.values():
            index.seal()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_exception: Any) -> None:
        for file in self._files:
            file.close()

    def answered(self, request: str) -> Answered | None:
        """The first finished answer to `request`."""
        return self._get(b"a", request, Answered)

    def has_answer(self, request: str) -> bool:
        """Whether `answered` would find something, without reading it."""
        return self._index[b"a"].find(bytes.fromhex(request)) is not None

    def unanswered(self, request: str) -> Unanswered | None:
        """How `request` was settled without an answer."""
        return self._get(b"u", request, Unanswered)

    def rendered(self, render: str) -> Rendered | None:
        """The cached rendering `render`."""
        return self._get(b"r", render, Rendered)

    def server(self, manifest_id: str) -> dict[str, Any] | None:
        """The server manifest `manifest_id`."""
        entry = self._get(b"s", manifest_id, ServerSeen)
        return entry.manifest if entry is not None else None

    def __len__(self) -> int:
        """How many answers there are, repeats included."""
        return len(self._index[b"a"])

    def _get(self, kind: bytes, digest: str, entry_type: type[E]) -> E | None:
        place = self._index[kind].find(bytes.fromhex(digest))
        if place is None:
            return None
        segment, offset = place
        try:
            entry = self._read(self._files[segment].fileno(), offset)
        except (zstandard.ZstdError, msgspec.MsgspecError, struct.error, OSError) as error:
            raise self._damaged(segment, offset, str(error)) from None
        if not isinstance(entry, entry_type) or _hash_of(entry) != digest:
            raise self._damaged(segment, offset, "its label is another one's")
        return entry

    def _damaged(self, segment: int, offset: int, cause: str) -> EyasError:
        return EyasError(
            f"{self.segments[segment].path}: the entry at byte {offset:,} is damaged ({cause}); restore the file from a "
            f"backup, or move it away to have its responses asked again"
        )

    def _read(self, fd: int, offset: int) -> Any:
        *_, length = LABEL.unpack(os.pread(fd, LABEL.size, offset - LABEL.size))
        return self._decoder.decode(self._decompressor.decompress(os.pread(fd, length, offset)))


def _segment_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.jsonl.zst"))


class JournalWriter:
    """Appends to a segment of its own. One writer per journal: a second one gets an error that names the first."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._encoder = msgspec.json.Encoder(enc_hook=_told)
        self._compressor = zstandard.ZstdCompressor(LEVEL, write_checksum=True)
        self._fd: int | None = None
        self._end = self._synced = self._marked = 0  # bytes written, on disk, and told so by a mark
        self._unsynced = 0  # entries
        self._line = bytearray()  # an entry in JSON, in memory that is used again and stays in the caches
        self._waiting: list[bytes] = []  # labels and frames that are written with the next
        self._trouble: OSError | None = None
        self._wake, self._closing = threading.Event(), False

    def __enter__(self) -> JournalWriter:
        with self._writing("the journal's folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("a+")
        self._take_lock()
        try:
            self._repair()
        except BaseException:
            self._lock.close()
            raise
        self._thread = threading.Thread(target=self._sync_often, name="journal-sync", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: Any) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join()
        try:
            failure = None
            if self._waiting and self._trouble is None:
                try:
                    self._append_waiting()
                except EyasError as error:
                    failure = error
            if self._fd is not None:
                with self._writing("the last entries"):
                    os.fsync(self._fd)
                    # Without this mark the last entries are checked once more, and that is all.
                    with contextlib.suppress(OSError):
                        if self._trouble is None:
                            self._write(_mark(self._end))
                    os.close(self._fd)
                if (
                    self._trouble is not None
                ):  # a write-back error is reported once, so this fsync may not repeat it
                    raise self._error("entries could not be synced", self._trouble)
            if failure is not None and kind is None:  # else what ended the run says more
                raise failure
        finally:
            self._lock.truncate(0)
            self._lock.close()

    def append(self, entry: AnyEntry, *, soon: bool = True) -> None:
        """Appends one entry whole; after an error the file ends where it ended before, and what waited is dropped. Always called
        from one thread.

        soon: at once. If not, together with a later one, or at the end: for what is quick to make again.
        """
        if self._trouble is not None:
            raise self._error("entries could not be synced", self._trouble)
        self._encoder.encode_into(entry, self._line)
        self._line += b"\n"
        frame = self._compressor.compress(self._line)
        label = LABEL.pack(
            LABEL_MAGIC, LABEL_SIZE, _KINDS[type(entry)], bytes.fromhex(_hash_of(entry)), len(frame)
        )
        self._waiting += [label, frame]
        if soon or len(self._waiting) >= 2 * MOST_WAITING:
            self._append_waiting()

    def flush(self) -> None:
        """Writes what waits. Raises EyasError if it cannot."""
        if self._waiting:
            self._append_waiting()

    def _append_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []  # even if they cannot be written
        entries, synced = len(waiting) // 2, self._synced
        if synced > self._marked:
            waiting.insert(0, _mark(synced))
        with self._writing("an entry"):
            if self._fd is None:
                self._open_segment()
            self._write(b"".join(waiting))
        self._marked = synced
        self._unsynced += entries
        if self._unsynced >= SYNC_ENTRIES:
            self._wake.set()

    def _write(self, data: bytes) -> None:
        assert self._fd is not None
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)

    def _open_segment(self) -> None:
        paths = _segment_paths(self.folder)
        number = int(paths[-1].name.split(".")[0]) + 1 if paths else 1
        path = self.folder / f"{number:06d}.jsonl.zst"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        folder = os.open(self.folder, os.O_RDONLY)
        os.fsync(folder)  # so that the new name survives a power cut too
        os.close(folder)

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._error(f"{what} could not be written", error) from error

    def _error(self, what: str, error: OSError) -> EyasError:
        return EyasError(
            f"{self.folder}: {what} ({error.strerror or error}); free space or raise the limit, then run the same command "
            f"again: every finished response is kept"
        )

    def _sync_often(self) -> None:
        while not self._closing:
            self._wake.wait(SYNC_SECONDS)
            self._wake.clear()
            with contextlib.suppress(OSError):  # a missed heartbeat must not end the syncing
                os.utime(self._lock.fileno())
            if self._unsynced and self._fd is not None and self._trouble is None:
                self._unsynced, end = 0, self._end
                try:
                    os.fsync(self._fd)
                except OSError as error:
                    self._trouble = error
                else:
                    self._synced = end

    def _take_lock(self) -> None:
        self._lock.seek(0)
        owner = self._lock.read()
        age = time.time() - os.fstat(self._lock.fileno()).st_mtime
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EyasError(
                f"{self.folder}: another run is writing this journal ({owner.strip() or 'starting now'}); wait for it, or stop it and run again"
            ) from None
        # flock does not reach other hosts on every shared file system; there the heartbeat speaks.
        if owner.strip() and age < HEARTBEAT_STALE and json.loads(owner)["host"] != socket.gethostname():
            self._lock.close()
            raise EyasError(
                f"{self.folder}: another host is writing this journal ({owner.strip()}, {age:.0f} s ago); wait for it, or stop it and run again"
            )
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(
            json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": int(time.time())})
        )
        self._lock.flush()

    def _repair(self) -> None:
        """Cuts or covers what is not whole, and marks the end; safe because other writers are dead while the lock is held."""
        for path in _segment_paths(self.folder):
            segment = Segment(path)
            with self._writing(f"the repaired {path.name}"), path.open("r+b") as file:
                for _entry in segment.entries(file):
                    pass
                for start, end in segment.damage:
                    if end == segment.size:
                        file.truncate(start)
                    else:
                        file.seek(start)
                        file.write(GAP.pack(GAP_MAGIC, end - start - GAP.size))
                end = file.seek(0, os.SEEK_END)
                if end != segment.synced + LABEL.size:  # it does not end with its mark
                    file.flush()
                    os.fsync(file.fileno())
                    file.write(_mark(end))
