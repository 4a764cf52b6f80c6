"""The journal loses no finished response, whatever is done to it."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard
from helpers import answered, digest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.journal import LABEL, Journal, JournalWriter, Rendered, ServerSeen, Unanswered


def write(folder: Path, *names: str) -> None:
    with JournalWriter(folder) as writer:
        for name in names:
            writer.append(answered(name))


def segment(folder: Path, number: int = 1) -> Path:
    return folder / f"{number:06d}.jsonl.zst"


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
    torn = segment(tmp_path, 2).read_bytes()[:kept_bytes]
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
    assert segment(tmp_path).stat().st_size == last
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


def test_damage_before_whole_entries_is_an_error_and_nothing_is_cut(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", "c")
    data = bytearray(segment(tmp_path).read_bytes())
    data[0:4] = b"\0\0\0\0"
    segment(tmp_path).write_bytes(data)
    with pytest.raises(EyasError, match=r"000001\.jsonl\.zst: damaged at byte 0 .* restore the file"):
        Journal(tmp_path)
    with pytest.raises(EyasError, match="damaged"), JournalWriter(tmp_path):
        pass
    assert segment(tmp_path).read_bytes() == data


def test_a_flipped_bit_inside_an_entry_is_found_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    data = bytearray(segment(tmp_path).read_bytes())
    data[LABEL.size + 40] ^= 1
    segment(tmp_path).write_bytes(data)
    with Journal(tmp_path) as journal:
        assert journal.answered(digest("b")) is not None
        with pytest.raises(EyasError, match=r"000001\.jsonl\.zst: the entry at byte 29 is damaged"):
            journal.answered(digest("a"))


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


def test_two_threads_append_whole_entries_to_one_segment(tmp_path: Path) -> None:
    for trial in range(20):
        folder, start = tmp_path / str(trial), threading.Barrier(4)

        def work(part: int, writer: JournalWriter, start: threading.Barrier = start) -> None:
            start.wait()
            for n in range(50):
                writer.append(answered(f"{part} {n}", text="x" * 2000))

        with JournalWriter(folder) as writer, ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4), [writer] * 4))
        with Journal(folder) as journal:
            assert len(journal.segments) == 1
            assert all(journal.answered(digest(f"{part} {n}")) for part in range(4) for n in range(50))


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


@pytest.mark.fault
def test_kill_minus_nine_loses_no_appended_response(tmp_path: Path) -> None:
    code = textwrap.dedent(WRITER.format(paths=sys.path, folder=str(tmp_path)))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(200):
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    rest = [int(line) for line in process.stdout.read().splitlines() if line.isdigit()]
    process.wait()
    with JournalWriter(tmp_path), Journal(tmp_path) as journal:
        for n in range(max([last, *rest[:-1]]) + 1):
            assert journal.has_answer(digest(str(n)))


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
