"""A record file is whole or an error, never a shorter dataset."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from helpers import prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas import recordfile
from eyas.errors import EyasError
from eyas.recordfile import SEAL_MAGIC, Writer, atomic, read_records, read_seal, scratch, write_records
from eyas.records import Finish, Prompt


def finishes(count: int) -> list[Finish]:
    return [Finish(type="stop", matched=n) for n in range(count)]


def read(path: Path) -> list[Finish]:
    return list(read_records(path, Finish))


def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordfile, "FRAME_BYTES", 64)  # three of these records


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=20))
def test_every_text_comes_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("records") / "prompts.jsonl.zst"
    prompts = [prompt(str(n), text) for n, text in enumerate(texts)]
    assert write_records(path, prompts) == len(texts) == read_seal(path).rows
    assert list(read_records(path, Prompt)) == prompts


@pytest.mark.parametrize("text", ["a\u2028b", "a\u2029b", "a\x85b", "a\x0bb\x0cc\x1cd\x1ee", "a\r\nb\n"])
def test_a_line_separator_inside_a_text_ends_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.jsonl.zst"
    write_records(path, [prompt("k", text), prompt("l", "after")])
    assert [p.messages[0].content for p in read_records(path, Prompt)] == [text, "after"]


def test_a_record_longer_than_any_read_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl.zst"
    long = "".join(map(chr, range(0x4E00, 0x9FFF))) * 40
    write_records(path, [prompt("k", long), prompt("l", "after")])
    assert [p.messages[0].content for p in read_records(path, Prompt)] == [long, "after"]


def test_any_zstd_tool_sees_plain_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_frames(monkeypatch)
    path = tmp_path / "x.jsonl.zst"
    write_records(path, finishes(20))
    with path.open("rb") as file:
        text = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    assert [json.loads(line)["matched"] for line in text.splitlines()] == list(range(20))


def test_equal_records_give_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        write_records(tmp_path / name, finishes(1000))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_of_no_records_is_whole(tmp_path: Path) -> None:
    assert write_records(tmp_path / "x", []) == 0
    assert read(tmp_path / "x") == [] and read_seal(tmp_path / "x").rows == 0


@pytest.mark.parametrize("rows", [0, 1, 12])
def test_a_file_cut_at_any_byte_is_an_error(
    tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_frames(monkeypatch)
    path = tmp_path / "x.jsonl.zst"
    write_records(path, finishes(rows))
    whole = path.read_bytes()
    assert whole.count(struct.pack("<I", zstandard.MAGIC_NUMBER)) == (rows + 2) // 3  # frames
    for kept in range(len(whole)):
        path.write_bytes(whole[:kept])
        with pytest.raises(EyasError, match=r"x\.jsonl\.zst: .*; delete it and run again to rebuild it"):
            read(path)
        with pytest.raises(EyasError, match="cut short"):
            read_seal(path)


def test_a_flipped_bit_anywhere_is_an_error_or_changes_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_frames(monkeypatch)
    path = tmp_path / "x.jsonl.zst"
    write_records(path, finishes(6))
    whole, unnoticed = path.read_bytes(), 0
    for at in range(len(whole)):
        for bit in (1, 0x10, 0x80):
            damaged = bytearray(whole)
            damaged[at] ^= bit
            path.write_bytes(damaged)
            try:
                assert read(path) == finishes(6)
            except EyasError as error:
                assert "x.jsonl.zst: " in str(error) and "run again to rebuild it" in str(error)
            else:
                unnoticed += 1
    assert unnoticed == 2  # the unused bit of each frame's descriptor (RFC 8878, 3.1.1.1.1.3)


def seal(text: bytes) -> bytes:
    return struct.pack("<II", SEAL_MAGIC, len(text)) + text


@pytest.mark.parametrize(
    "tail",
    [
        b"\0",
        b"\n",
        b'{"type":"stop","matched":9}\n',
        seal(b""),
        seal(b"{}"),
        seal(b'{"rows":1}'),
        zstandard.ZstdCompressor().compress(b'{"type":"stop","matched":9}\n'),
    ],
)
def test_bytes_after_the_seal_are_an_error(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "x"
    write_records(path, finishes(3))
    path.write_bytes(path.read_bytes() + tail)
    with pytest.raises(EyasError, match="no seal at its end"):
        read(path)


def test_two_files_run_together_are_an_error(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 2)):
        write_records(tmp_path / name, finishes(count))
    (tmp_path / "c").write_bytes((tmp_path / "a").read_bytes() + (tmp_path / "b").read_bytes())
    with pytest.raises(EyasError, match="holds 5 rows, its seal says 2"):
        read(tmp_path / "c")


def test_a_frame_left_out_or_moved_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_frames(monkeypatch)
    path = tmp_path / "x"
    write_records(path, finishes(9))
    magic = struct.pack("<I", zstandard.MAGIC_NUMBER)
    first, second, third = path.read_bytes().split(magic)[1:]
    for frames in ((second, third), (first, third), (second, first, third)):
        path.write_bytes(b"".join(magic + frame for frame in frames))
        with pytest.raises(EyasError, match="its seal says 9"):
            read(path)


def test_a_row_that_does_not_fit_is_named_by_file_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_records(path, [{"type": "stop", "matched": 1}, {"type": "abort", "matched": None}])
    with pytest.raises(EyasError, match=r"/x: line 2: Invalid enum value 'abort' - at `\$\.type`; delete"):
        read(path)
    write_records(path, [{"type": "stop", "surprise": 1}])
    with pytest.raises(EyasError, match=r"/x: line 1: .*unknown field `surprise`"):
        read(path)


def test_nothing_appears_on_an_error_and_the_old_file_stays(tmp_path: Path) -> None:
    def failing() -> Iterator[Finish]:
        yield from finishes(5)
        raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        write_records(tmp_path / "x", failing())
    assert list(tmp_path.iterdir()) == []
    write_records(tmp_path / "x", finishes(2))
    with pytest.raises(RuntimeError, match="halfway"):
        write_records(tmp_path / "x", failing())
    assert read(tmp_path / "x") == finishes(2) and len(list(tmp_path.iterdir())) == 1


def test_nothing_appears_when_the_last_write_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_self: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Writer, "_flush", full)
    with pytest.raises(OSError, match="No space left"):
        write_records(tmp_path / "x", finishes(2))
    assert list(tmp_path.iterdir()) == []


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_records(path, finishes(1))
    with Writer[Finish](path) as writer:
        for finish in finishes(3):
            writer.write(finish)
        assert read(path) == finishes(1)
    assert read(path) == finishes(3)


def test_temporary_files_and_folders_lie_beside_the_target_and_go(tmp_path: Path) -> None:
    with atomic(tmp_path / "new" / "x") as file, scratch(tmp_path / "new" / "x") as folder:
        file.write_text("done")
        (folder / "part").touch()
        assert file.parent == folder.parent == tmp_path / "new"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x"]
