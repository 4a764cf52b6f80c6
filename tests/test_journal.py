"""The journal loses no finished response, whatever is done to it."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from helpers import answered, digest, journal_entries, lengths_of
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.journal import (
    LABEL,
    Answered,
    AnyEntry,
    Journal,
    JournalWriter,
    Rendered,
    Segment,
    ServerSeen,
    Unanswered,
)
from eyas.records import Finish


def write(folder: Path, *names: str) -> None:
    with JournalWriter(folder) as writer:
        for name in names:
            writer.append(answered(name))


def segment(folder: Path, number: int = 1) -> Path:
    return folder / f"{number:06d}.jsonl.zst"


def parts(data: bytes) -> list[tuple[bytes, bytes, int, int]]:
    """(kind, hash, start, end) of the entries and marks of an undamaged segment; read without Eyas' own reader."""
    found, at = [], 0
    while at < len(data):
        _, _, kind, name, length = LABEL.unpack_from(data, at)
        found.append((kind, name, at, at + LABEL.size + length))
        at = found[-1][-1]
    return found


def claims(data: bytes) -> list[int]:
    """What the marks of a segment say is on disk."""
    return [int.from_bytes(name[:8], "big") for kind, name, _, _ in parts(data) if kind == b"m"]


def without_marks(data: bytes) -> bytes:
    """A segment as versions without marks wrote it."""
    return b"".join(data[start:end] for kind, _, start, end in parts(data) if kind != b"m")


def lines(data: bytes) -> list[bytes]:
    return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read().splitlines()


def test_every_kind_of_entry_comes_back_as_it_was_written(tmp_path: Path) -> None:
    entries = [
        answered("a", output_ids=[163606, 0], text="\u2028é😀"),
        Unanswered(request=digest("b"), status="refused", reason="prompt too long"),
        Rendered(render=digest("c"), ids=[1, 2], refusal=None),
        ServerSeen(id=digest("d"), manifest={"engine": "x", "slots": 4}),
    ]
    with JournalWriter(tmp_path) as writer:
        for entry in entries:
            writer.append(entry)
    with Journal(tmp_path) as journal:
        assert journal.answered(digest("a")) == entries[0]
        assert journal.unanswered(digest("b")) == entries[1]
        assert journal.rendered(digest("c")) == entries[2]
        assert journal.server(digest("d")) == {"engine": "x", "slots": 4}
        assert journal.answered(digest("b")) is None
        assert not journal.has_answer(digest("c"))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)  # a lone surrogate fits no UTF-8 file
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
ENTRIES = st.one_of(
    st.builds(
        lambda text, prompt, output, end: answered(
            prompt_ids=prompt,
            output_ids=output,
            text=text,
            text_lengths=lengths_of([len(text)] * len(output)),
            finish=end,
        ),
        TEXTS,
        IDS,
        IDS,
        st.builds(
            lambda kind, matched: Finish(type=kind, matched=None if kind == "length" else matched),
            st.sampled_from(["stop", "length"]),
            st.none() | st.integers(0, 2**31 - 1) | TEXTS,
        ),
    ),
    st.builds(
        Unanswered, request=st.just(digest("b")), status=st.sampled_from(["refused", "failed"]), reason=TEXTS
    ),
    st.builds(Rendered, render=st.just(digest("c")), ids=st.none() | IDS, refusal=st.none() | TEXTS),
    st.builds(
        ServerSeen,
        id=st.just(digest("d")),
        manifest=st.dictionaries(
            TEXTS, TEXTS | st.integers(-(2**53), 2**53) | st.lists(st.booleans()), max_size=3
        ),
    ),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ENTRIES, max_size=6))
def test_whatever_an_entry_holds_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, entries: list[AnyEntry]
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    with JournalWriter(folder) as writer:
        for entry in entries:
            writer.append(entry)
    first: dict[type, AnyEntry] = {}
    for entry in entries:
        first.setdefault(type(entry), entry)
    with Journal(folder) as journal:
        assert journal.answered(digest("a")) == first.get(Answered)
        assert journal.unanswered(digest("b")) == first.get(Unanswered)
        assert journal.rendered(digest("c")) == first.get(Rendered)
        seen = first.get(ServerSeen)
        assert journal.server(digest("d")) == (seen.manifest if isinstance(seen, ServerSeen) else None)
    written = b"".join(path.read_bytes() for path in sorted(folder.glob("*.zst")))
    assert list(journal_entries(written)) == entries, "to any reader"


def test_what_is_not_urgent_is_written_with_the_next_entry_or_at_the_end(tmp_path: Path) -> None:
    rendered = [Rendered(render=digest(str(n)), ids=[n], refusal=None) for n in range(40)]
    with JournalWriter(tmp_path) as writer:
        writer.append(rendered[0], soon=False)
        assert Journal(tmp_path).rendered(rendered[0].render) is None
        writer.append(answered("a"))
        assert Journal(tmp_path).rendered(rendered[0].render) == rendered[0]
        for entry in rendered[1:39]:
            writer.append(entry, soon=False)
        found = [Journal(tmp_path).rendered(entry.render) is not None for entry in rendered]
        assert found == [True] * 33 + [False] * 7  # so many are never held back
        writer.flush()
        assert Journal(tmp_path).rendered(rendered[38].render) == rendered[38]
        writer.append(rendered[39], soon=False)
    assert [Journal(tmp_path).rendered(entry.render) for entry in rendered] == rendered


def test_a_full_disk_at_the_end_is_told_unless_something_else_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for other in (None, RuntimeError("another end")):
        with (
            pytest.raises(RuntimeError if other else EyasError, match="another end" if other else "No space"),
            JournalWriter(tmp_path) as writer,
        ):
            writer.append(answered("a"))
            writer.append(Rendered(render=digest("r"), ids=[1], refusal=None), soon=False)
            monkeypatch.setattr(os, "write", full)
            if other:
                raise other
        monkeypatch.undo()
        assert Journal(tmp_path).answered(digest("a")) is not None


def test_a_segment_is_plain_json_lines_to_any_zstd_tool(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c")
    with segment(tmp_path).open("rb") as file:
        text = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    assert [line[:20] for line in text.split(b"\n")] == [b'{"kind":"answered","'] * 3 + [b""]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2**31 - 1)), max_size=5), max_size=4))
def test_segments_merge_and_the_first_entry_of_a_request_wins(
    tmp_path_factory: pytest.TempPathFactory, runs: list[list[tuple[int, int]]]
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    first: dict[int, int] = {}
    for run in runs:
        with JournalWriter(folder) as writer:
            for name, token in run:
                first.setdefault(name, token)
                writer.append(answered(str(name), output_ids=[token]))
    with Journal(folder) as journal:
        assert len(journal) == sum(map(len, runs))
        for name in range(7):
            entry = journal.answered(digest(str(name)))
            assert (entry.reply.output_ids if entry else None) == ([first[name]] if name in first else None)


@pytest.mark.parametrize("kept_bytes", [1, 7, LABEL.size - 1, LABEL.size, LABEL.size + 3, -1])
def test_a_torn_tail_is_ignored_by_readers_and_cut_by_the_next_writer(
    tmp_path: Path, kept_bytes: int
) -> None:
    write(tmp_path, "a", "b")
    whole = segment(tmp_path).stat().st_size
    write(tmp_path, "c")
    torn = without_marks(segment(tmp_path, 2).read_bytes())[:kept_bytes]
    segment(tmp_path, 2).unlink()
    with segment(tmp_path).open("ab") as file:
        file.write(torn)
    with Journal(tmp_path) as journal:
        assert len(journal) == 2
    write(tmp_path, "d")
    assert segment(tmp_path).stat().st_size == whole
    with Journal(tmp_path) as journal:
        assert [bool(journal.answered(digest(name))) for name in "abcd"] == [True, True, False, True]


def test_zeros_left_by_a_power_cut_are_a_torn_tail(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    data = segment(tmp_path).read_bytes()
    last = data.rfind(LABEL.pack(0x184D2A50, LABEL.size - 8, b"a", bytes.fromhex(digest("b")), 0)[:25])
    segment(tmp_path).write_bytes(data[: last + LABEL.size] + bytes(len(data) - last - LABEL.size))
    write(tmp_path, "c")
    assert segment(tmp_path).stat().st_size == last + LABEL.size, "what is whole, and a mark"
    with Journal(tmp_path) as journal:
        assert [journal.has_answer(digest(name)) for name in "abc"] == [True, False, True]


def test_a_failed_sync_of_the_last_entries_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reports a write-back error once: the fsync at the end may succeed although pages are lost."""
    real, failed = os.fsync, threading.Event()

    def fsync(fd: int) -> None:
        if not failed.is_set() and str(Path(f"/proc/self/fd/{fd}").readlink()).endswith(".jsonl.zst"):
            failed.set()
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(EyasError, match="could not be synced"), JournalWriter(tmp_path) as writer:
        writer.append(answered("a"))
        assert failed.wait(10)
        time.sleep(0.1)
    assert claims(segment(tmp_path).read_bytes()) == [], "nobody may trust it"


def test_a_heartbeat_that_fails_does_not_end_the_syncing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def utime(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "utime", utime)
    with JournalWriter(tmp_path) as writer:
        writer.append(answered("a"))
        time.sleep(1.5)
        assert writer._thread.is_alive()


# --- power cuts --------------------------------------------------------------------------------------------------

PAGE = 4096


def noise(name: str, length: int) -> Answered:
    """An answer that does not compress to less than `length` bytes."""
    return answered(name, text=random.Random(name).randbytes(length).hex())


def unsynced(folder: Path, before: list[Answered], behind: list[Answered]) -> int:
    """A segment as it is before a power cut: what is `behind` the last mark is not synced. Returns where that begins."""
    with JournalWriter(folder / "elsewhere") as writer:
        for entry in behind:
            writer.append(entry)
    with JournalWriter(folder) as writer:
        for entry in before:
            writer.append(entry)
    start = segment(folder).stat().st_size if before else 0
    with segment(folder).open("ab") as file:
        file.write(without_marks(segment(folder / "elsewhere").read_bytes()))
    return start


def assert_whole_ones_survive(folder: Path, entries: list[Answered], before: bytes) -> list[Answered]:
    """Readers find exactly the whole entries and change nothing; the next writer makes that last. Returns them.

    before: the segment before it was damaged.
    """
    path = segment(folder)
    damaged = path.read_bytes()
    wanted = {
        name: damaged[start:end] == before[start:end]
        for kind, name, start, end in parts(before)
        if kind != b"m"
    }
    whole = [entry for entry in entries if wanted[bytes.fromhex(entry.reply.request)]]

    def assert_read() -> None:
        with Journal(folder) as journal:
            assert len(journal) == len(whole)
            for entry in entries:
                assert journal.answered(entry.reply.request) == (entry if entry in whole else None)

    assert_read()
    assert path.read_bytes() == damaged
    with JournalWriter(folder):
        assert_read()
    repaired = path.read_bytes()
    assert [line for line in lines(repaired) if line] == [
        line for line, is_whole in zip(lines(before), wanted.values(), strict=True) if is_whole
    ]
    with JournalWriter(folder):
        assert_read()
    assert path.read_bytes() == repaired, "repaired once and for all"
    return whole


def zeroed(start: int, end: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:start] + bytes(len(data[start:end])) + data[end:]


def inside(start: int) -> int:
    """Where the first whole page behind `start` begins."""
    return (start // PAGE + 1) * PAGE


@pytest.mark.parametrize(
    ("spoil", "lost"),
    [
        pytest.param(
            lambda at: zeroed(inside(at[1]), inside(at[1]) + PAGE), "b", id="a page inside an entry"
        ),
        pytest.param(lambda at: zeroed(at[1], at[2]), "b", id="an entry"),
        pytest.param(lambda at: zeroed(at[0], at[2]), "ab", id="the first entries"),
        pytest.param(lambda at: zeroed(at[1], at[1] + LABEL.size), "b", id="a label"),
        pytest.param(lambda at: zeroed(at[1], at[1] + 5), "b", id="the start of a label"),
        pytest.param(lambda at: zeroed(at[1] + 12, at[1] + 900), "b", id="the end of a label"),
        pytest.param(lambda at: zeroed(at[2] - 1, at[2] + 1), "bc", id="a border"),
        pytest.param(lambda at: zeroed(at[3], at[4]), "d", id="the last entry"),
        pytest.param(lambda at: zeroed(at[0] - 20, at[0]), "", id="the end of a mark"),
        pytest.param(
            lambda at: lambda data: data[: at[0] - 4] + b"\1" + data[at[0] - 3 :], "", id="a mark's length"
        ),
        pytest.param(lambda at: zeroed(at[2] + 40, at[4]), "cd", id="all behind"),
        pytest.param(lambda at: lambda data: data[: at[2] + 50], "cd", id="cut"),
        pytest.param(lambda at: lambda data: data[: at[3]] + bytes(3 * PAGE), "d", id="zeros at the end"),
        pytest.param(
            lambda at: lambda data: zeroed(at[1], at[1] + 50)(data)[: at[3] + 9], "bd", id="zeroed and cut"
        ),
    ],
)
def test_a_power_cut_costs_only_the_entries_that_it_hit(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[..., Callable[[bytes], bytes]],
    lost: str,
) -> None:
    behind = [noise(name, 10_000) for name in "abcd"]
    start = unsynced(tmp_path, [answered("before")], behind)
    data = segment(tmp_path).read_bytes()
    borders = [at for *_, at in parts(data) if at >= start]
    segment(tmp_path).write_bytes(spoil(borders)(data))
    whole = assert_whole_ones_survive(tmp_path, [answered("before"), *behind], data)
    assert {entry.reply.request for entry in behind if entry not in whole} == {digest(name) for name in lost}
    assert f"{segment(tmp_path)}: " in caplog.text and "are not whole" in caplog.text
    caplog.clear()
    with JournalWriter(tmp_path), Journal(tmp_path):
        assert not caplog.records, "told once"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 6000), max_size=3),
    st.lists(st.integers(0, 6000), min_size=1, max_size=12),
    st.sets(st.integers(0, 30)),
    st.integers(0, 3 * PAGE),
    st.sampled_from([40, 1 << 18]),
)
def test_whatever_pages_a_power_cut_takes_all_others_are_kept(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[int],
    behind: list[int],
    pages: set[int],
    cut: int,
    scan_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    entries = [noise(str(n), length) for n, length in enumerate([*before, *behind])]
    start = unsynced(folder, entries[: len(before)], entries[len(before) :])
    data = spoilt = segment(folder).read_bytes()
    synced = max(start - LABEL.size, 0)  # the mark itself need not be on disk
    for page in pages:
        spoilt = zeroed(max(page * PAGE, synced), max((page + 1) * PAGE, synced))(spoilt)
    segment(folder).write_bytes(spoilt[: max(len(data) - cut, synced)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyas.journal.SCAN_BYTES", scan_bytes)
        whole = assert_whole_ones_survive(folder, entries, data)
    assert whole[: len(before)] == entries[: len(before)]


def test_entries_and_marks_are_found_wherever_a_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = unsynced(tmp_path, [answered("a")], [noise("b", 300), answered("c")])
    data = segment(tmp_path).read_bytes()
    _, _, _, end = parts(data)[2]
    segment(tmp_path).write_bytes(zeroed(start, end)(data))
    for block in range(LABEL.size, 4 * LABEL.size):
        monkeypatch.setattr("eyas.journal.SCAN_BYTES", block)
        found = Segment(segment(tmp_path))
        with segment(tmp_path).open("rb") as file:
            assert [name.hex() for _, name, _, _ in found.entries(file)] == [digest("a"), digest("c")]
        assert (found.synced, found.damage) == (start - LABEL.size, [(start, end)])


def test_a_mark_never_claims_more_than_a_finished_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_sync, real_write = os.fsync, os.write
    synced, claimed = [0], []

    def fsync(fd: int) -> None:
        size = os.fstat(fd).st_size
        real_sync(fd)
        synced.append(size)

    def write(fd: int, data: bytes) -> int:
        if data[8:9] == b"m":
            claimed.append(int.from_bytes(data[9:17], "big"))
            assert claimed[-1] <= max(synced)
        return real_write(fd, data)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "write", write)
    with JournalWriter(tmp_path) as writer:
        n = 0
        while len(claimed) < 3:
            writer.append(answered(str(n)))
            n += 1
    data = segment(tmp_path).read_bytes()
    assert claims(data) == claimed == sorted(set(claimed))
    assert claimed[-1] == len(data) - LABEL.size, "a closed segment ends with its mark"
    with Journal(tmp_path) as journal:
        assert len(journal) == n


@pytest.mark.parametrize("place", [0, 40, -1], ids=["label", "frame", "hop"])
def test_damage_before_the_last_mark_is_an_error_and_nothing_is_cut(tmp_path: Path, place: int) -> None:
    unsynced(tmp_path, [noise(name, 3000) for name in "abc"], [noise("d", 3000)])
    data = bytearray(segment(tmp_path).read_bytes())
    _, _, start, end = parts(bytes(data))[1]
    if place == 0:
        data[start : start + 4] = bytes(4)
    elif place == 40:
        data[start : end + 40] = bytes(end + 40 - start)
    else:
        length = len(data) - 1000 - start  # the entry seems to end behind the mark
        data[start + LABEL.size - 4 : start + LABEL.size] = length.to_bytes(4, "little")
    segment(tmp_path).write_bytes(data)
    message = rf"000001\.jsonl\.zst: damaged at byte {start:,}, which had been synced .*; restore the file .* or move it"
    with pytest.raises(EyasError, match=message):
        Journal(tmp_path)
    with pytest.raises(EyasError, match=message), JournalWriter(tmp_path):
        pass
    assert segment(tmp_path).read_bytes() == data


def test_a_segment_without_marks_is_checked_as_a_whole_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries = [noise(name, 3000) for name in "abcd"]
    unsynced(tmp_path, [], entries)
    data = without_marks(segment(tmp_path).read_bytes())
    _, _, start, end = parts(data)[1]
    segment(tmp_path).write_bytes(zeroed(start, end)(data))
    assert len(assert_whole_ones_survive(tmp_path, entries, data)) == 3
    repaired = bytearray(segment(tmp_path).read_bytes())
    repaired[LABEL.size + 100] ^= 1
    segment(tmp_path).write_bytes(repaired)
    caplog.clear()
    with JournalWriter(tmp_path), Journal(tmp_path) as journal:
        assert not caplog.records, "nobody looks at frames before the mark until they are wanted"
        with pytest.raises(EyasError, match="entry at byte 29 is damaged"):
            journal.answered(digest("a"))


def test_what_is_whole_stays_before_what_came_later(tmp_path: Path) -> None:
    """The first answer to a request wins, so an answer behind damage must not move behind a later segment."""
    first, later = answered("x", output_ids=[1]), answered("x", output_ids=[2])
    unsynced(tmp_path, [], [noise("a", 3000), first])
    with JournalWriter(tmp_path) as writer:
        writer.append(later)
    data = without_marks(segment(tmp_path).read_bytes())
    segment(tmp_path).write_bytes(zeroed(10, 2000)(data))
    for _ in range(2):
        with Journal(tmp_path) as journal:
            assert journal.answered(digest("x")) == first
        write(tmp_path)


def test_a_flipped_bit_inside_an_entry_is_found_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    data = bytearray(segment(tmp_path).read_bytes())
    data[LABEL.size + 40] ^= 1
    segment(tmp_path).write_bytes(data)
    with Journal(tmp_path) as journal:
        assert journal.answered(digest("b")) is not None
        with pytest.raises(EyasError, match=r"000001\.jsonl\.zst: the entry at byte 29 is damaged"):
            journal.answered(digest("a"))


@pytest.mark.parametrize("part", [slice(8, 9), slice(9, 25)], ids=["kind", "hash"])
def test_a_label_that_is_not_its_entrys_is_found_when_it_is_read(tmp_path: Path, part: slice) -> None:
    with JournalWriter(tmp_path) as writer:
        writer.append(answered("a"))
        writer.append(Unanswered(request=digest("b"), status="rejected", reason=""))
    data = bytearray(segment(tmp_path).read_bytes())
    _, _, start, _ = parts(bytes(data))[1]
    data[part] = data[start:][part]
    segment(tmp_path).write_bytes(data)
    with Journal(tmp_path) as journal, pytest.raises(EyasError, match=r"byte 29 is damaged \(its label"):
        journal.unanswered(digest("a")) if part.start == 8 else journal.answered(digest("b"))


def test_a_segment_that_shrinks_under_its_reader_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    with Journal(tmp_path) as journal:
        os.truncate(segment(tmp_path), 100)
        for name in "ab":
            with pytest.raises(EyasError, match=r"000001\.jsonl\.zst: the entry at byte \d+ is damaged"):
                journal.answered(digest(name))


def test_a_second_writer_is_told_who_holds_the_journal(tmp_path: Path) -> None:
    with JournalWriter(tmp_path), pytest.raises(EyasError, match=rf"another run is writing .*{os.getpid()}"):
        JournalWriter(tmp_path).__enter__()
    write(tmp_path, "a")


def test_a_live_writer_on_another_host_is_respected_where_locks_do_not_reach(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text('{"host": "elsewhere", "pid": 1, "since": 0}')
    with pytest.raises(EyasError, match="another host is writing"):
        JournalWriter(tmp_path).__enter__()
    long_ago = time.time() - 3600
    os.utime(tmp_path / "lock", (long_ago, long_ago))
    write(tmp_path, "a")


WRITER = """
import sys; sys.path[:0] = {paths!r}
from pathlib import Path
from helpers import answered
from eyas.journal import JournalWriter
with JournalWriter(Path({folder!r})) as writer:
    for n in range(100000):
        writer.append(answered(str(n), text="x" * 3000))
        print(n, flush=True)
"""


def killed(folder: Path) -> int:
    """Kills a writer with SIGKILL once it has marked a sync; returns the number of the last entry appended for sure."""
    code = textwrap.dedent(WRITER.format(paths=sys.path, folder=str(folder)))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    mark = LABEL.pack(0x184D2A50, LABEL.size - 8, b"m", bytes(16), 0)[:9]
    last = 0
    while last < 200 or mark not in segment(folder).read_bytes():
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    rest = [int(line) for line in process.stdout.read().splitlines() if line.isdigit()]
    process.wait()
    return max([last, *rest[:-1]])


@pytest.mark.fault
def test_kill_minus_nine_loses_no_appended_response(tmp_path: Path) -> None:
    last = killed(tmp_path)
    with JournalWriter(tmp_path), Journal(tmp_path) as journal:
        for n in range(last + 1):
            assert journal.answered(digest(str(n)))


@pytest.mark.fault
@pytest.mark.parametrize("seed", range(3))
def test_a_power_cut_loses_nothing_that_a_running_writer_had_synced(tmp_path: Path, seed: int) -> None:
    killed(tmp_path)
    data = segment(tmp_path).read_bytes()
    synced = claims(data)[-1]
    page = random.Random(seed).randrange(synced // PAGE, len(data) // PAGE + 1)
    spoilt = zeroed(max(page * PAGE, synced), (page + 1) * PAGE)(data)
    segment(tmp_path).write_bytes(spoilt)
    with JournalWriter(tmp_path), Journal(tmp_path) as journal:
        for kind, name, start, end in parts(data):
            if kind == b"a":
                assert (journal.answered(name.hex()) is not None) == (spoilt[start:end] == data[start:end])


@pytest.mark.fault
def test_a_full_disk_ends_in_one_clear_line_and_keeps_every_response(tmp_path: Path) -> None:
    code = textwrap.dedent(WRITER.format(paths=sys.path, folder=str(tmp_path)))
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    appended = len(process.stdout.splitlines())
    assert process.returncode == 1 and appended > 10
    assert "an entry could not be written (File too large); free space" in process.stderr.splitlines()[-1]
    with Journal(tmp_path) as journal:
        assert len(journal) == appended
