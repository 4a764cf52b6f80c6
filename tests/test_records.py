"""docs/records.md says what the files hold: every field of every record, as the classes and the Arrow schemas have it."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pytest
from helpers import response
from msgspec import Struct

from eyas import timing, train, verdicts
from eyas.exporters.reports import ExportReport
from eyas.mix import MixReport
from eyas.pilot_report import PilotReport
from eyas.prompts import PromptsReport
from eyas.recordfile import write_records
from eyas.records import Finish, Outcome, Prompt, Response, TrainMetadata, TrainRow, Verdict
from eyas.stats import DatasetStats
from eyas.tables import write_table
from eyas.timing import Timing

PAGE = Path(__file__).parent.parent / "docs" / "records.md"
FILES: list[type[Struct]] = [
    *(
        Prompt,
        PromptsReport,
        Response,
        Outcome,
        Timing,
        Verdict,
        TrainRow,
        MixReport,
        ExportReport,
        PilotReport,
        DatasetStats,
    )
]
COLUMNS: dict[type[Struct], Any] = {
    Timing: timing.SCHEMA,
    Verdict: verdicts.SCHEMA,
    TrainRow: train.SCHEMA,
    TrainMetadata: train.SCHEMA.field("metadata").type,
}
NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", Any: "any"}


def parts(kind: Any) -> list[Any]:
    return [part for argument in typing.get_args(kind) for part in [argument, *parts(argument)]]


def reached(kind: type[Struct]) -> list[type[Struct]]:
    """A record and those within it."""
    inner = [part for field in msgspec.structs.fields(kind) for part in [field.type, *parts(field.type)]]
    found = [part for part in inner if isinstance(part, type) and issubclass(part, Struct)]
    return [kind, *(deeper for part in found for deeper in reached(part))]


RECORDS = {kind.__name__: kind for file in FILES for kind in reached(file)}


def in_words(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "string"
    if origin in (types.UnionType, typing.Union):
        *others, last = map(in_words, arguments)
        return f"{', '.join(others)} or {last}"
    if origin in (list, Sequence):
        return f"list of {in_words(arguments[0])}"
    if origin is dict:
        return f"object of {in_words(arguments[1])}"
    return NAMES.get(kind) or f"`{kind.__name__}`"


def column(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list<{kind.value_type}>"
    return "struct" if pa.types.is_struct(kind) else str(kind)


@lru_cache
def told() -> dict[str, list[tuple[str, ...]]]:
    """By record, its rows on the page: field, type, meaning."""
    sections = re.split(r"^### `(\w+)`", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {
        name: re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", text.split("\n## ")[0], re.MULTILINE)
        for name, text in zip(sections[::2], sections[1::2], strict=True)
    }


def test_every_record_of_every_file_is_told_of_and_no_other() -> None:
    assert set(told()) == set(RECORDS)


@pytest.mark.parametrize("name", RECORDS)
def test_fields_and_types_are_those_of_the_files(name: str) -> None:
    record = RECORDS[name]
    fields = {field.encode_name: in_words(field.type) for field in msgspec.structs.fields(record)}
    if record in COLUMNS:
        schema = COLUMNS[record]
        assert [one.name for one in schema] == list(fields)
        fields = {one.name: column(one.type) for one in schema}
    assert [(field, kind) for field, kind, _ in told()[name]] == list(fields.items())


@pytest.mark.parametrize("name", RECORDS)
def test_every_value_that_a_field_may_have_is_told(name: str) -> None:
    meanings = {field: meaning for field, _, meaning in told()[name]}
    for field in msgspec.structs.fields(RECORDS[name]):
        if typing.get_origin(field.type) is Literal:
            for value in typing.get_args(field.type):
                assert f"`{value}`" in meanings[field.encode_name]


def example(having: str) -> str:
    """The Python example on the page that has this text."""
    (found,) = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if having in code
    ]
    return str(found)


def row(n: int, prompt: int, output: int) -> TrainRow:
    return TrainRow(
        id=f"a/k{n}:0:0",
        primary_id=f"a/k{n}",
        input_ids=list(range(prompt + output)),
        loss_mask=[0] * prompt + [1] * output,
        metadata=TrainMetadata(
            dataset="ab"[n % 2],
            group="g",
            request="r",
            finish="stop",
            truncated=False,
            constrained=False,
            reasoning_tokens=output // 3,
            answer_tokens=output - output // 3,
        ),
    )


def run_example(having: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    exec(compile(example(having), str(PAGE), "exec"), {})


def test_the_example_counts_supervised_tokens_beyond_what_a_byte_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(
        tmp_path / "results/train/train.parquet", train.SCHEMA, [row(n, 7, 1000 + n) for n in range(300)]
    )
    expected = sum(1000 + n for n in range(300))
    run_example("pc.sum", tmp_path, monkeypatch)
    assert capsys.readouterr().out == f"{expected:,} of {expected + 300 * 7:,} tokens are supervised\n"
    run_example("groupby", tmp_path, monkeypatch)
    sums = [line.split()[1:3] for line in capsys.readouterr().out.splitlines()[2:]]
    assert sums == [["150", str(sum(1000 + n for n in range(start, 300, 2)))] for start in (0, 1)]


def test_the_example_counts_nothing_in_a_table_without_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(tmp_path / "results/train/train.parquet", train.SCHEMA, [])
    run_example("pc.sum", tmp_path, monkeypatch)
    assert capsys.readouterr().out == "0 of 0 tokens are supervised\n"


def test_the_example_reads_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(tmp_path / "results/B1_glaive/responses.jsonl.zst", [response("k1"), response("k2")])
    run_example("read_records", tmp_path, monkeypatch)
    assert capsys.readouterr().out == "k1 stop 5\nk2 stop 5\n"


@pytest.mark.parametrize(
    ("tokens", "held"),
    [
        ({2}, True),
        ({3}, True),
        ([2, 2], True),
        ({-1, 2}, True),
        ({4_000_000_000, 3}, True),
        ({7}, False),
        ({9, 1}, False),
        ({0, 4_000_000_000}, False),
        ({-1}, False),
        (set(), False),
    ],
)
def test_a_response_tells_whether_it_holds_ids_before_what_ended_it(
    tokens: Iterable[int], held: bool
) -> None:
    found = response(output_ids=[5, 2, 3, 7], finish=Finish(type="stop", matched=7))
    assert found.holds(tokens) is held
