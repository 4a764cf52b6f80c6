"""Dataset files and rows: what is read, what is skipped and why, and what is refused with which words."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.plugins import Conversation, Skip
from eyas.records import Message
from eyas.sources import files
from eyas.sources.chat import Chat
from eyas.sources.files import csv_rows, json_array, json_lines, read_rows
from eyas.sources.glaive import Glaive
from eyas.sources.magicoder import Magicoder
from eyas.sources.mixture_of_thoughts import MixtureOfThoughts
from eyas.sources.opencodeinstruct import OpenCodeInstruct
from eyas.sources.openthoughts import OpenThoughts
from eyas.sources.sharegpt import ShareGPT
from eyas.sources.swe_trajectories import SweTrajectories
from eyas.sources.text import Text
from eyas.sources.turns import NOT_TEXT, UNKNOWN_ROLE
from eyas.sources.ultrachat import UltraChat

ROWS = [{"id": str(n), "text": f"höhe {n}\u2028next"} for n in range(5)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS, indent=2).encode()
NUMBERED = list(enumerate(ROWS, start=1))


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def user(content: str) -> Message:
    return Message(role="user", content=content)


def assistant(content: str) -> Message:
    return Message(role="assistant", content=content)


def made(source: Any, **options: Any) -> Any:
    return source(source.Options(**options))


def conversation(source: Any, row: dict[str, Any]) -> Conversation:
    found = source(source.Options()).parse(row)
    assert isinstance(found, Conversation), found
    return found


def skip(source: Any, row: dict[str, Any]) -> Skip:
    found = source(source.Options()).parse(row)
    assert isinstance(found, Skip), found
    return found


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [LINES, ARRAY], ids=["lines", "array"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
def test_every_kind_is_told_by_its_bytes_and_read_whole(tmp_path, content, pack):
    assert list(read_rows(write(tmp_path, "rows.data", pack(content)))) == NUMBERED


def test_parquet_is_read_with_nested_columns(tmp_path):
    rows = [{"turns": [{"role": "user", "content": f"q{n}"}], "n": n} for n in range(1000)]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100)
    assert list(read_rows(path)) == list(enumerate(rows, start=1))


def test_frames_written_one_after_another_are_all_read(tmp_path):
    frames = b"".join(zstd(line + b"\n") for line in LINES.strip().split(b"\n"))
    assert list(read_rows(write(tmp_path, "rows.jsonl.zst", frames))) == NUMBERED
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    assert list(read_rows(write(tmp_path, "seal.jsonl.zst", skippable + frames + skippable))) == NUMBERED


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_a_cut_compressed_file_is_an_error_wherever_it_is_cut(tmp_path, pack):
    first, last = pack(LINES), pack(LINES)
    for cut in range(1, len(last)):
        path = write(tmp_path, "rows.jsonl.z", first + last[:cut])
        with pytest.raises(EyasError, match=r"rows\.jsonl\.z.*(cut short or damaged|line \d+)"):
            list(read_rows(path))


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.txt"])
def test_a_cut_file_is_told_with_the_last_row_that_was_whole(tmp_path, pack, name):
    # Incompressible, for several buffers' worth of it: what came before the cut has been read.
    texts = [random.Random(n).randbytes(5_000).hex() for n in range(30)]
    lines = "".join(f'{{"n": "{text}"}}\n' for text in ["header" * (name == "rows.csv"), *texts])
    path = write(tmp_path, name, pack(lines.encode())[:-3])
    seen = [0]
    with pytest.raises(EyasError) as caught:
        for number, _ in read_rows(path):
            seen.append(number)
    assert len(seen) > 10
    assert f"{name}: behind row {seen[-1]}: cut short or damaged" in str(caught.value)
    assert str(caught.value).endswith("; fetch it again")


def test_a_flipped_byte_in_a_zstd_file_is_an_error(tmp_path):
    content = bytearray(zstd(LINES))
    content[-1] ^= 1
    with pytest.raises(EyasError, match="fetch it again"):
        list(read_rows(write(tmp_path, "rows.jsonl.zst", bytes(content))))


def test_a_cut_parquet_file_is_an_error(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(EyasError, match="damaged Parquet"):
        list(read_rows(path))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (2**62, pyarrow.timestamp("us")),
        (2**30, pyarrow.date32()),
        (2**60, pyarrow.duration("s")),
    ],
    ids=["timestamp", "date", "duration"],
)
def test_a_time_that_python_cannot_hold_is_told_with_its_row(tmp_path, value, kind):
    path = tmp_path / "rows.parquet"
    times = pyarrow.array([1] * 300 + [value], kind)
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x"] * 301, "at": times}), path)
    rows = read_rows(path)
    with pytest.raises(
        EyasError, match=r"rows\.parquet: behind row 256: a date or time that Python cannot hold"
    ):
        list(rows)


def test_two_columns_of_one_name_in_parquet_are_an_error(tmp_path):
    path = tmp_path / "rows.parquet"
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"]), pyarrow.array(["y"])], names=["a", "a"])
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(EyasError, match=r"rows\.parquet: two columns are called 'a'; rename one"):
        list(read_rows(path))


def test_what_is_wrong_with_parquet_is_told_in_one_line(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x"] * 3}), path)
    content = path.read_bytes()
    path.write_bytes(content[:10] + b"\xff" * 20 + content[30:])
    with pytest.raises(EyasError, match="damaged Parquet") as error:
        list(read_rows(path))
    assert "\n" not in str(error.value)


def test_a_git_lfs_pointer_in_place_of_parquet_is_named(tmp_path):
    with pytest.raises(EyasError, match="Git LFS pointer"):
        list(read_rows(write(tmp_path, "rows.parquet", b"version https://git-lfs.github.com/spec/v1\n")))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(EyasError, match=r"gone\.jsonl: no such file; correct `files:`"):
        list(read_rows(tmp_path / "gone.jsonl"))


def test_only_a_newline_ends_a_line_and_blank_lines_keep_their_numbers(tmp_path):
    content = '\ufeff{"a": "x\u2028y\u0085z"}\r\n\n  \n{"a": 2}'.encode()
    assert list(read_rows(write(tmp_path, "rows.jsonl", content))) == [
        (1, {"a": "x\u2028y\u0085z"}),
        (4, {"a": 2}),
    ]


def test_a_byte_order_mark_before_an_array_is_no_part_of_it(tmp_path):
    assert list(read_rows(write(tmp_path, "rows.json", b"\xef\xbb\xbf" + ARRAY))) == NUMBERED


@pytest.mark.parametrize("content", [b"", b"\n\n", b"[]", b" [ ] \n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_has_no_rows(tmp_path, content):
    assert list(read_rows(write(tmp_path, "rows.json", content))) == []


@pytest.mark.parametrize("content", [b'{"a": NaN}', b'[{"a": NaN}]'], ids=["lines", "array"])
def test_nan_is_accepted_in_lines_and_arrays_alike(tmp_path, content):
    ((number, row),) = read_rows(write(tmp_path, "rows.json", content))
    assert number == 1 and row["a"] != row["a"]


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (b'{"a": 1', r"not valid JSON \(Expecting ',' delimiter, column 8\)"),
        (b'{"a": "\xff"}', "not valid JSON .*utf-8"),
        (b'"text"', "is str, not an object"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON .*recursion"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON .*integer"),
    ],
    ids=["cut", "not UTF-8", "not an object", "too deep", "too long a number"],
)
def test_a_malformed_line_37_is_named(tmp_path, bad, what):
    content = b'{"a": 0}\n' * 36 + bad + b"\n" + b'{"a": 0}\n' * 9
    with pytest.raises(EyasError, match=rf"rows\.jsonl: line 37: {what}"):
        list(read_rows(write(tmp_path, "rows.jsonl", content)))


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ('{"a": 1 "b": 2}', "not valid JSON"),
        ('{"a": tru}', "not valid JSON"),
        ('{"a": "\t"}', "not valid JSON"),
        ('{"a": 1} {"a": 2}', "expected `,` or `]` after the row"),
        ("12", "is not an object"),
        ("", "is not an object"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "not valid JSON"),
    ],
    ids=["no comma", "half a word", "control character", "two rows", "a number", "nothing", "too deep"],
)
def test_a_malformed_row_37_of_an_array_is_named(tmp_path, bad, what):
    content = "[" + ", ".join(['{"a": 0}'] * 36 + [bad] + ['{"a": 0}'] * 9) + "]"
    with pytest.raises(EyasError, match=rf"rows\.json: row 37: {what}"):
        list(read_rows(write(tmp_path, "rows.json", content.encode())))


def test_a_cut_array_is_an_error_wherever_it_is_cut(tmp_path):
    for cut in range(1, len(ARRAY)):
        with pytest.raises(EyasError, match=r"rows\.json: row \d"):
            list(json_array([ARRAY[:cut]], tmp_path / "rows.json"))


def test_text_after_the_end_of_an_array_is_an_error(tmp_path):
    with pytest.raises(EyasError, match="follows the end of the array"):
        list(json_array([b'[{"a": 1}]{"a": 2}'], tmp_path))


def test_an_array_that_is_not_utf8_is_an_error(tmp_path):
    with pytest.raises(EyasError, match=r"row 2: .*not UTF-8"):
        list(json_array([b'[{"a": 1},', b'{"a": "\xff"}]'], tmp_path))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), max_size=5)


def cut_up(content: bytes, sizes: list[int]) -> list[bytes]:
    chunks, at = [], 0
    for size in itertools.cycle(sizes):
        if at >= len(content):
            return chunks
        chunks.append(content[at : at + size])
        at += size
    return chunks


@settings(max_examples=60)
@given(OBJECTS, st.lists(st.integers(1, 40), min_size=1), st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_an_array_in_pieces_of_any_size_is_what_json_loads(rows, sizes, ascii_only, indent):
    content = json.dumps(rows, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "backslashreplace")
    try:
        expected = json.loads(content)
    except ValueError:
        return  # backslashreplace of a lone surrogate after a backslash
    assert list(json_array(cut_up(content, sizes), Path("rows.json"))) == list(enumerate(expected, start=1))


@given(OBJECTS, st.lists(st.integers(1, 40), min_size=1))
def test_lines_in_pieces_of_any_size_are_what_json_loads(rows, sizes):
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    assert list(json_lines(cut_up(content, sizes), Path("rows.jsonl"))) == list(enumerate(rows, start=1))


@pytest.mark.parametrize("kind", ["array", "lines"])
def test_a_large_file_is_read_in_the_memory_of_a_few_rows(kind):
    row = json.dumps({"text": "x" * 10_000}).encode()
    start, between, end = (b"[", b",", b"]") if kind == "array" else (b"", b"\n", b"")
    content = itertools.chain([start, row], itertools.repeat(between + row, 5_000), [end])
    tracemalloc.start()
    try:
        read = sum(1 for _ in (json_array if kind == "array" else json_lines)(content, Path("rows")))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read == 5_001
    assert peak < 1_000_000  # bytes, of 50 million


def test_a_malformed_row_early_in_a_large_array_is_found_without_reading_the_rest():
    taken = 0

    def content():
        nonlocal taken
        yield b'[{"a": oops},'
        for _ in range(10_000):
            taken += 1
            yield b'{"a": 1},' * 1000

    with pytest.raises(EyasError, match="row 1"):
        list(json_array(content(), Path("rows.json")))
    assert taken < 3


def test_one_enormous_row_takes_linear_time(monkeypatch):
    attempts = []
    decode = json.JSONDecoder.raw_decode

    def counted(self, text, at=0):
        attempts.append(len(text) - at)
        return decode(self, text, at)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted)
    content = json.dumps([{"text": "x" * 3_000_000}]).encode()
    list(json_array(cut_up(content, [files.READ_BYTES]), Path("rows.json")))
    assert sum(attempts) < 4 * len(content)


# --- CSV, lines of text, packed Parquet -----------------------------------------------------------------------------

TABLE = 'question,"side, note"\r\n"Why, ""dear""?\r\nSay.",a\u2028b\r\n\r\nplain,\r\n'.encode()
CELLS = [
    (1, {"question": 'Why, "dear"?\r\nSay.', "side, note": "a\u2028b"}),
    (2, {"question": "plain", "side, note": ""}),
]
PACKS = pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", zstd)], ids=["plain", "gzip", "zstd"]
)


@PACKS
def test_csv_is_read_by_the_rules_of_rfc_4180(tmp_path, suffix, pack):
    assert list(read_rows(write(tmp_path, "rows.csv" + suffix, pack(b"\xef\xbb\xbf" + TABLE)))) == CELLS
    assert list(read_rows(write(tmp_path, "rows.tsv" + suffix, pack(b"a\tb,c\n1\t2,3")))) == [
        (1, {"a": "1", "b,c": "2,3"})
    ]


@given(
    st.lists(st.lists(st.text(st.characters(codec="utf-8")), min_size=2, max_size=2), min_size=1),
    st.lists(st.integers(1, 40), min_size=1),
)
def test_csv_in_pieces_of_any_size_is_what_was_written(cells, sizes):
    cells = [
        [one.replace("\r", "").replace("\0", ""), other.replace("\r", "").replace("\0", "")]
        for one, other in cells
    ]
    buffer = io.StringIO()
    csv.writer(buffer, quoting=csv.QUOTE_ALL).writerows([["a", "b"], *cells])
    found = csv_rows(cut_up(buffer.getvalue().encode(), sizes), Path("rows.csv"), ",")
    assert [list(row.values()) for _, row in found] == cells


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (b"x,y,z", "line 37: row 36 has 3 fields where the header has 2; correct the line"),
        (b'x,"y"z', "line 37: malformed CSV .*correct the line"),
        (b"x,\xff", "line 37: not UTF-8 .*iconv"),
        (b'x,"never closed', "line 47: malformed CSV .*end of data"),
    ],
    ids=["a field too many", "text after a quote", "not UTF-8", "open quote"],
)
def test_a_malformed_line_of_csv_is_named_with_the_remedy(tmp_path, bad, what):
    content = b"a,b\n" + b"1,2\n" * 35 + bad + b"\n" + b"1,2\n" * 9
    with pytest.raises(EyasError, match=rf"rows\.csv: {what}"):
        list(read_rows(write(tmp_path, "rows.csv", content)))


def test_two_columns_of_one_name_are_refused(tmp_path):
    with pytest.raises(EyasError, match=r"rows\.csv: line 1: two columns are called 'a'; rename one"):
        list(read_rows(write(tmp_path, "rows.csv", b"a,b,a\n1,2,3\n")))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"a,b\n", b"\na,b\n\n"])
def test_csv_without_rows_has_no_rows(tmp_path, content):
    assert list(read_rows(write(tmp_path, "rows.csv", content))) == []


@PACKS
def test_lines_of_text_are_rows(tmp_path, suffix, pack):
    content = " Why?\r\n\n{not JSON\u2028so.\n".encode()
    assert list(read_rows(write(tmp_path, "rows.txt" + suffix, pack(content)))) == [
        (1, {"text": " Why?"}),
        (3, {"text": "{not JSON\u2028so."}),
    ]


@PACKS
def test_parquet_may_be_packed_as_a_whole(tmp_path, suffix, pack):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert list(read_rows(write(tmp_path, "packed.parquet" + suffix, pack(path.read_bytes())))) == NUMBERED
    if suffix:
        with pytest.raises(EyasError, match=r"cut\.parquet.*(cut short or )?damaged"):
            list(read_rows(write(tmp_path, "cut.parquet" + suffix, pack(path.read_bytes())[:-20])))


def test_utf16_is_named_with_the_remedy(tmp_path):
    for name in ("rows.csv", "rows.jsonl"):
        with pytest.raises(EyasError, match=rf"{name}: is UTF-16; convert it: iconv -f UTF-16 -t UTF-8"):
            list(read_rows(write(tmp_path, name, "a,b\n".encode("utf-16"))))


# --- glaive ------------------------------------------------------------------------------------------------------

WITH_FUNCTIONS = (
    "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
)
TIDE = {
    "name": "get_tide",
    "description": "Tide at a harbour",
    "parameters": {"type": "object", "properties": {}},
}
MOON = {"name": "moon_phase", "description": "Phase {of} the moon", "parameters": {}}
NO_FUNCTIONS = "SYSTEM: You are a helpful assistant, with no access to external functions.\n"


def glaive(chat: str, system: str = NO_FUNCTIONS) -> Conversation:
    return conversation(Glaive, {"system": system, "chat": chat})


def calls(written: str) -> list[dict[str, Any]] | None:
    """The function calls of an assistant turn that calls in the way that is written."""
    turns = glaive(f"USER: Hi\n\n\nASSISTANT: <functioncall> {written} <|endoftext|>\n\n\n").messages
    assert [turn.role for turn in turns] == ["system", "user", "assistant"]
    return turns[-1].tool_calls and [call["function"] for call in turns[-1].tool_calls]


@pytest.mark.parametrize("between", ["\n", "\n\n", ",\n"])
def test_glaive_concatenated_functions_become_tools_and_leave_the_system_message(between):
    definitions = between.join(json.dumps(function, indent=4) for function in (TIDE, MOON))
    for written in (definitions, f"[{definitions}]" if "," in between else definitions):
        found = glaive("USER: Hi\n\n\nASSISTANT: Ho <|endoftext|>\n\n\n", WITH_FUNCTIONS + written + "\n")
        assert found.tools == [{"type": "function", "function": TIDE}, {"type": "function", "function": MOON}]
        assert found.messages[0] == Message(
            role="system",
            content="You are a helpful assistant with access to the following functions. Use them if required",
        )


def test_glaive_without_functions_keeps_its_system_sentence_and_has_no_tools():
    found = glaive("USER: Hi\n\nASSISTANT: Ho <|endoftext|>\n\n")
    assert found.tools == []
    assert found.messages == [
        Message(role="system", content="You are a helpful assistant, with no access to external functions."),
        user("Hi"),
        assistant("Ho"),
    ]


@pytest.mark.parametrize(
    "definitions", ['{"name": "x"', "{'name': 'x'}", '{"description": "no name"}', '{"name": "x"} and']
)
def test_glaive_functions_that_cannot_be_read_skip_the_row(definitions):
    row = {"system": WITH_FUNCTIONS + definitions, "chat": "USER: Hi"}
    assert skip(Glaive, row) == Skip("function definitions are not JSON")


def test_glaive_whole_dialogue_with_call_and_response():
    found = glaive(
        "USER: What's the tide at St. Ives?\n\n\n"
        'ASSISTANT: <functioncall> {"name": "get_tide", "arguments": \'{"port": "St. Ives"}\'} <|endoftext|>\n\n\n'
        'FUNCTION RESPONSE: {"level_m": 3.2}\n\n\n'
        "ASSISTANT: It is 3.2 m. <|endoftext|>\n\n\nUSER: Thanks\n\n\nASSISTANT: Welcome <|endoftext|>\n\n\n"
    )
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_tide", "arguments": '{"port": "St. Ives"}'},
    }
    assert found.messages[1:] == [
        user("What's the tide at St. Ives?"),
        Message(role="assistant", content="", tool_calls=[call]),
        Message(role="tool", content='{"level_m": 3.2}', name="get_tide", tool_call_id="call_1"),
        assistant("It is 3.2 m."),
        user("Thanks"),
        assistant("Welcome"),
    ]


def test_glaive_escaped_and_bare_apostrophes_survive_in_arguments():
    expected = [{"name": "find", "arguments": json.dumps({"title": 'The Keeper\'s "Goat"\n'})}]
    assert calls(r"""{"name": "find", "arguments": '{"title": "The Keeper\'s \"Goat\"\n"}'}""") == expected
    assert calls(r"""{"name": "find", "arguments": '{"title": "The Keeper's \"Goat\"\n"}'}""") == expected


@pytest.mark.parametrize(
    "written", ["""'{"n": 7}'}}""", """'{"n": 7}}'}""", """'{"n": 7}'} }\n""", """{"n": 7}}}"""]
)
def test_glaive_stray_braces_do_not_spoil_a_call(written):
    assert calls('{"name": "scale", "arguments": ' + written) == [{"name": "scale", "arguments": '{"n": 7}'}]


def test_glaive_arguments_may_be_json_or_a_json_string():
    assert calls('{"name": "now"}') == [{"name": "now", "arguments": "{}"}]
    assert calls('{"name": "f", "arguments": "{\\"n\\": 1}"}') == [{"name": "f", "arguments": '{"n": 1}'}]


@pytest.mark.parametrize(
    "written", ["get_tide()", '{"name": "f", "arguments": \'{oops}\'}', '{"name": 3}', "[1]"]
)
def test_glaive_call_that_cannot_be_read_stays_text(written):
    assert calls(written) is None


def test_glaive_text_before_a_call_and_merged_turns_are_kept_apart():
    call = '<functioncall> {"name": "moon", "arguments": \'{}\'}'
    for merged in ("Let me see. ", "Let me see. ASSISTANT: ", "Let me see.\nASSISTANT: "):
        last = glaive(f"USER: Hi\n\n\nASSISTANT: {merged}{call} <|endoftext|>\n\n\n").messages[-1]
        assert last.content == "Let me see."
        assert last.tool_calls and last.tool_calls[0]["function"]["name"] == "moon"


def test_glaive_end_mark_alone_may_separate_turns():
    assert glaive("USER: a\n\nASSISTANT: b <|endoftext|> ASSISTANT: c <|endoftext|>").messages[1:] == [
        user("a"),
        assistant("b"),
        assistant("c"),
    ]


def test_glaive_marker_words_inside_a_text_do_not_split_it():
    text = 'Lines begin with "USER: " or\nASSISTANT: or FUNCTION RESPONSE: here.\n\nWhy, USER: or not?'
    assert glaive(f"USER: {text}\n\n\nASSISTANT: So USER: be it <|endoftext|>\n\n").messages[1:] == [
        user(text),
        assistant("So USER: be it"),
    ]


@pytest.mark.parametrize("gap", [" ", "\n"])
def test_glaive_answers_that_run_on_from_a_question_or_a_result_are_apart(gap):
    found = glaive(
        f"USER: a{gap}ASSISTANT: OLD <|endoftext|>\n\n\nFUNCTION RESPONSE: {{}}{gap}ASSISTANT: OLD <|endoftext|>\n\n\nUSER: b\n\n\nASSISTANT: OLD"
    )
    assert [(turn.role, turn.content) for turn in found.messages[1:]] == [
        ("user", "a"),
        ("assistant", "OLD"),
        ("tool", "{}"),
        ("assistant", "OLD"),
        ("user", "b"),
        ("assistant", "OLD"),
    ]


def test_glaive_end_mark_never_reaches_a_message():
    found = glaive(
        "USER: <|endoftext|>Hi<|endoftext|>\n\nASSISTANT: Ho<|endoftext|>", "SYSTEM: Be kind<|endoftext|>"
    )
    assert [turn.content for turn in found.messages] == ["Be kind", "Hi", "Ho"]


def test_glaive_function_response_need_not_be_json():
    found = glaive("USER: a\n\nFUNCTION RESPONSE: cloudy, {half\n\nASSISTANT: b")
    assert found.messages[2] == Message(role="tool", content="cloudy, {half")


def test_glaive_empty_user_turn_stays_an_empty_turn():
    assert glaive("USER: \n\n\nASSISTANT: Hello! <|endoftext|>\n\n").messages[1:] == [
        user(""),
        assistant("Hello!"),
    ]


def test_glaive_chat_without_marks_is_skipped_and_without_text_is_empty():
    assert skip(Glaive, {"system": "", "chat": "Hello"}) == Skip("chat does not start with a turn mark")
    assert skip(Glaive, {"system": "", "chat": "Hi\n\nUSER: x"}) == Skip(
        "chat does not start with a turn mark"
    )
    assert glaive("\n", "").messages == []


# --- flat prompt columns -----------------------------------------------------------------------------------------


def test_opencodeinstruct_asks_input_under_its_own_id():
    row = {"id": "0a1b", "input": " Write f.\n", "output": "def f(): ...", "average_test_score": "1"}
    expected = Conversation([user(" Write f.\n"), assistant("def f(): ...")], id="0a1b")
    assert conversation(OpenCodeInstruct, row) == expected


def test_magicoder_asks_problem_not_seed_and_evol_asks_instruction():
    oss = {"lang": "python", "index": 7, "seed": "def foo(a):\n", "problem": "Implement", "solution": "ok"}
    evol = {"instruction": "Rewrite", "response": "done"}
    assert conversation(Magicoder, oss) == Conversation([user("Implement"), assistant("ok")])
    assert conversation(Magicoder, evol) == Conversation([user("Rewrite"), assistant("done")])
    with pytest.raises(ValueError, match=r"'problem'.*'instruction'"):
        conversation(Magicoder, {"prompt": "x"})


# --- lists of turns ----------------------------------------------------------------------------------------------


def test_mixture_of_thoughts_reads_role_and_content():
    row = {
        "messages": [
            {"content": "2+2?", "role": "user"},
            {"content": "<think>\n</think>\n4", "role": "assistant"},
        ]
    }
    assert conversation(MixtureOfThoughts, row).messages == [user("2+2?"), assistant("<think>\n</think>\n4")]


def test_openthoughts_drops_the_system_prompt_that_demands_another_reasoning_format():
    row = {
        "system": "… <|begin_of_thought|> {thought} <|end_of_thought|> …",
        "conversations": [{"from": "user", "value": "2+2?"}, {"from": "assistant", "value": "4"}],
    }
    assert conversation(OpenThoughts, row).messages == [user("2+2?"), assistant("4")]


@pytest.mark.parametrize("answerer", ["gpt", "assistant"])
def test_openthoughts3_roles_are_read_whatever_the_source_called_them(answerer):
    row = {
        "difficulty": None,
        "conversations": [{"from": "human", "value": "q"}, {"from": answerer, "value": "a"}],
    }
    assert conversation(OpenThoughts, row).messages == [user("q"), assistant("a")]


def test_ultrachat_has_its_prompt_id_and_all_turns():
    turns = [
        {"content": "How?", "role": "user"},
        {"content": "So.", "role": "assistant"},
        {"content": "And?", "role": "user"},
    ]
    row = {"prompt": "How?", "prompt_id": "f0e3", "messages": turns}
    assert conversation(UltraChat, row) == Conversation(
        [user("How?"), assistant("So."), user("And?")], id="f0e3"
    )
    assert skip(UltraChat, row | {"prompt": "Why?"}) == Skip("prompt differs from the first message")


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"),
        ("user", "user"),
        ("gpt", "assistant"),
        ("chatgpt", "assistant"),
        ("bing", "assistant"),
        ("bard", "assistant"),
        ("function_call", "assistant"),
        ("system", "system"),
        ("tool", "tool"),
        ("observation", "tool"),
    ],
)
def test_sharegpt_role_names_are_all_known(name, role):
    row = {"id": "QWJhYvA_2", "conversations": [{"from": name, "value": "x", "markdown": None}]}
    assert conversation(ShareGPT, row) == Conversation([Message(role=role, content="x")], id="QWJhYvA_2")


def test_sharegpt_text_is_kept_as_it_is():
    value = "<div>a\u2028b</div>Copy code \n"
    row = {"id": "a_0", "conversations": [{"from": "human", "value": value}, {"from": "gpt", "value": ""}]}
    assert conversation(ShareGPT, row).messages == [user(value), assistant("")]


@pytest.mark.parametrize("source", [ShareGPT, OpenThoughts])
def test_unknown_role_skips_the_row(source):
    assert skip(source, {"id": "a", "conversations": [{"from": "narrator", "value": "x"}]}) == UNKNOWN_ROLE


def test_empty_conversation_is_an_empty_conversation():
    assert conversation(ShareGPT, {"id": "a", "conversations": []}).messages == []


# --- trajectories ------------------------------------------------------------------------------------------------


def test_swe_nebius_system_text_sits_in_system_prompt_and_ai_answers():
    row = {
        "instance_id": "acme__lib-12",
        "trajectory": [
            {
                "cutoff_date": "01.01.2023",
                "mask": False,
                "role": "system",
                "system_prompt": "SETTING",
                "text": None,
            },
            {"cutoff_date": None, "mask": False, "role": "user", "system_prompt": None, "text": "Issue"},
            {"cutoff_date": None, "mask": False, "role": "ai", "system_prompt": None, "text": "ls"},
        ],
    }
    expected = [Message(role="system", content="SETTING"), user("Issue"), assistant("ls")]
    assert conversation(SweTrajectories, row) == Conversation(expected)


def test_swe_smith_messages_are_json_in_a_string_and_content_may_be_parts():
    parts = [{"type": "text", "text": "Fix "}, {"type": "text", "text": "it"}]
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "ok"},
    ]
    row = {"messages": json.dumps(turns), "traj_id": "repeats", "resolved": True}
    expected = [Message(role="system", content="S"), user("Fix it"), assistant("ok")]
    assert conversation(SweTrajectories, row) == Conversation(expected)
    with pytest.raises(ValueError, match="'messages' is text but not JSON"):
        conversation(SweTrajectories, {"messages": "[oops"})


def test_swe_content_that_is_an_image_skips_the_row():
    row = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    assert skip(SweTrajectories, row) == NOT_TEXT


def test_swe_gym_nulls_that_parquet_put_in_are_left_out():
    tool = {
        "type": "function",
        "function": {"name": "bash", "parameters": {"properties": {"cmd": {"type": "string"}}}},
    }
    with_nulls = json.loads(json.dumps(tool))
    with_nulls["function"]["parameters"]["properties"] |= {
        "path": None,
        "cmd": {"type": "string", "enum": None},
    }
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    nulls = {"name": None, "tool_calls": None, "tool_call_id": None, "function_call": None}
    row = {
        "messages": [
            nulls | {"role": "user", "content": "Fix"},
            nulls | {"role": "assistant", "content": None, "tool_calls": [call | {"index": None}]},
            nulls | {"role": "tool", "content": "out", "name": "bash", "tool_call_id": "c1"},
        ],
        "tools": [with_nulls],
    }
    assert conversation(SweTrajectories, row) == Conversation(
        [
            user("Fix"),
            Message(role="assistant", content="", tool_calls=[call]),
            Message(role="tool", content="out", name="bash", tool_call_id="c1"),
        ],
        [tool],
    )
    assert conversation(SweTrajectories, row | {"tools": None}).tools == []


# --- rows of another schema --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "row", "error", "named"),
    [
        (Glaive, {"chat": "USER: x"}, KeyError, "system"),
        (Glaive, {"system": None, "chat": "USER: x"}, TypeError, "'system' holds NoneType, not text"),
        (OpenCodeInstruct, {"id": "1", "input": "x"}, KeyError, "output"),
        (OpenCodeInstruct, {"id": 1, "input": "x", "output": "y"}, TypeError, "'id' holds int, not text"),
        (Magicoder, {"problem": ["x"], "solution": "y"}, TypeError, "'problem' holds list, not text"),
        (MixtureOfThoughts, {"conversations": []}, KeyError, "messages"),
        (MixtureOfThoughts, {"messages": "[]"}, TypeError, "'messages' holds str, not a list of turns"),
        (OpenThoughts, {"question": "x"}, ValueError, "neither a column 'conversations' nor 'problem'"),
        (OpenThoughts, {"conversations": ["x"]}, TypeError, "'conversations', turn 1: is str, not an object"),
        (UltraChat, {"prompt": "x", "messages": []}, KeyError, "prompt_id"),
        (
            ShareGPT,
            {"id": "a", "conversations": [{"value": "x"}]},
            ValueError,
            "turn 1: has no text in 'from'",
        ),
        (
            ShareGPT,
            {"id": "a", "conversations": [{"from": "human"}]},
            ValueError,
            "turn 1: has no text in 'value'",
        ),
        (SweTrajectories, {"prompt": "x"}, ValueError, "'trajectory'.*'messages'"),
        (SweTrajectories, {"messages": [], "tools": "bash"}, ValueError, "'tools' is text but not JSON"),
        (
            SweTrajectories,
            {"messages": [], "tools": '{"a": 1}'},
            TypeError,
            "'tools' holds dict, not a list of tools",
        ),
        (SweTrajectories, {"messages": [], "tools": ["bash"]}, TypeError, "'tools' holds str in its list"),
        (ShareGPT, {"id": ["a"], "conversations": []}, TypeError, "'id' holds list, not an id"),
    ],
)
def test_a_row_of_another_schema_is_refused_with_the_column_named(source, row, error, named):
    with pytest.raises(error, match=named):
        source(source.Options()).parse(row)


# --- data of your own --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "row"),
    [
        ({}, {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}),
        ({}, {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
        ({}, {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}),
        ({}, {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'}),
        (
            {"column": "talk", "role": "who", "content": "said", "roles": {"me": "user", "it": "assistant"}},
            {"talk": [{"who": "me", "said": "q"}, {"who": "it", "said": "a"}], "messages": []},
        ),
    ],
    ids=["openai", "sharegpt", "mixed", "JSON in a column", "own names"],
)
def test_chat_reads_turns_under_the_usual_names_and_under_your_own(options, row):
    assert made(Chat, **options).parse(row) == Conversation([user("q"), assistant("a")])


def test_chat_takes_system_tools_and_id_from_columns():
    tool = {"type": "function", "function": {"name": "f"}}
    row = {
        "messages": [{"role": "user", "content": "q"}],
        "sys": "Be kind",
        "key": 7,
        "tools": json.dumps([tool]),
    }
    found = made(Chat, system="sys", id="key").parse(row)
    assert found == Conversation([Message(role="system", content="Be kind"), user("q")], [tool], "7")
    assert made(Chat, system="sys").parse(row | {"sys": None, "tools": ""}) == Conversation([user("q")])


def test_text_asks_a_column_with_system_and_id():
    assert made(Text).parse({"text": " Why?\n"}) == Conversation([user(" Why?\n")])
    found = made(Text, column="q", system="s", id="n").parse({"q": "Why?", "s": "Be kind", "n": "k1"})
    assert found == Conversation([Message(role="system", content="Be kind"), user("Why?")], id="k1")


@pytest.mark.parametrize(
    ("source", "options", "row", "error", "named"),
    [
        (Chat, {}, {"prompt": "x"}, KeyError, "messages"),
        (Chat, {"column": "talk"}, {"messages": []}, KeyError, "talk"),
        (Chat, {"system": "sys"}, {"messages": []}, KeyError, "sys"),
        (Chat, {}, {"messages": "[oops"}, ValueError, "'messages' is text but not JSON"),
        (Chat, {"content": "said"}, {"messages": [{"role": "user", "content": "q"}]}, ValueError, "'said'"),
        (Text, {}, {"prompt": "x"}, KeyError, "text"),
        (Text, {"column": "q"}, {"q": ["x"]}, TypeError, "'q' holds list, not text"),
        (Text, {"id": "n"}, {"text": "x", "n": 1.5}, TypeError, "'n' holds float, not an id"),
    ],
)
def test_a_row_without_what_the_options_name_is_refused_with_the_column(source, options, row, error, named):
    with pytest.raises(error, match=named):
        made(source, **options).parse(row)


def test_calls_in_older_shapes_become_tool_calls_that_their_results_answer():
    expected = [
        user("Tide?"),
        Message(
            role="assistant",
            content="",
            tool_calls=[
                {
                    "id": "call_2",
                    "type": "function",
                    "function": {"name": "tide", "arguments": '{"port": "X"}'},
                }
            ],
        ),
        Message(role="tool", content="3.2", tool_call_id="call_2"),
    ]
    call = {"name": "tide", "arguments": '{"port": "X"}'}
    openai = [
        {"role": "user", "content": "Tide?"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "content": "3.2"},
    ]
    assert made(Chat).parse({"messages": openai}) == Conversation(expected)
    sharegpt = [
        {"from": "human", "value": "Tide?"},
        {"from": "function_call", "value": '{"name": "tide", "arguments": {"port": "X"}}'},
        {"from": "observation", "value": "3.2"},
    ]
    assert made(Chat).parse({"conversations": sharegpt}) == Conversation(expected)


def test_text_of_null_is_skipped_and_a_system_prompt_of_null_is_none():
    source = Text(Text.Options(column="ask", system="s"))
    assert source.parse({"ask": None, "s": "Be brief"}) == Skip("a turn has no text")
    (asked,) = source.parse({"ask": "Why?", "s": None}).messages
    assert (asked.role, asked.content) == ("user", "Why?")


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_only_answers_call_tools(role):
    function = {"name": "look", "arguments": "{}"}
    turn = {
        "role": role,
        "content": "Why?",
        "tool_calls": [{"function": function}],
        "function_call": function,
    }
    (found,) = Chat(Chat.Options()).parse({"messages": [turn]}).messages
    assert found.tool_calls is None
