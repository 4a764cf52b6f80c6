"""An export is every training row, once, in order, in the form that trainers read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
import zstandard

from eyas.config import ExportSettings
from eyas.errors import EyasError
from eyas.export import export
from eyas.plugins import registry
from eyas.recordfile import read_records
from eyas.records import TrainMetadata, TrainRow
from eyas.tables import write_table
from eyas.train import SCHEMA

TOKENS = ExportSettings(exporter="tokens", options={})


def rows(count: int) -> list[TrainRow]:
    return [
        TrainRow(
            id=f"d/k{n}:0:0",
            primary_id=f"d/k{n}",
            input_ids=[1, n, 163606, 2],
            loss_mask=[0, 0, 1, 1],
            metadata=TrainMetadata(
                dataset="d",
                group=f"{n:016x}",
                request=f"{n:032x}",
                finish="stop",
                truncated=n % 2 == 0,
                constrained=False,
                reasoning_tokens=1,
                answer_tokens=1,
            ),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_every_row_is_exported_once_and_in_order(tmp_path: Path, count: int) -> None:
    table, out = tmp_path / "train.parquet", tmp_path / "train.jsonl.zst"
    write_table(table, SCHEMA, rows(count))
    assert export(TOKENS, table, out, registry()).rows == count
    assert list(read_records(out, TrainRow)) == rows(count)


def test_an_export_is_json_lines_with_the_columns_that_trainers_read(tmp_path: Path) -> None:
    write_table(tmp_path / "t", SCHEMA, rows(3))
    export(TOKENS, tmp_path / "t", tmp_path / "out.jsonl.zst", registry())
    with (tmp_path / "out.jsonl.zst").open("rb") as file:
        stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        lines = [json.loads(line) for line in io.TextIOWrapper(stream, encoding="utf-8")]
    assert lines == [msgspec.to_builtins(row) for row in rows(3)]
    assert list(lines[0]) == ["id", "primary_id", "input_ids", "loss_mask", "metadata"]


def test_nothing_appears_for_a_table_that_is_damaged(tmp_path: Path) -> None:
    table, out = tmp_path / "train.parquet", tmp_path / "out.jsonl.zst"
    write_table(table, SCHEMA, rows(100))
    table.write_bytes(table.read_bytes()[:-20])
    with pytest.raises(EyasError, match=r"train\.parquet: damaged .*delete it and run again to rebuild it"):
        export(TOKENS, table, out, registry())
    assert list(tmp_path.iterdir()) == [table]


MINE = '''
from eyas import hookimpl
from eyas.plugins import Exporter
from msgspec import Struct


class Options(Struct, forbid_unknown_fields=True):
    separator: str = ","


class Ids(Exporter):
    """Ids as text."""

    name = "ids"
    suffix = "txt"
    Options = Options

    def write(self, rows, path):
        lines = [self.options.separator.join(map(str, row.input_ids)) for row in rows]
        path.write_text("\\n".join(lines))
        return len(lines)


@hookimpl
def register_exporters(register):
    register(Ids)
'''


def test_an_exporter_of_a_stranger_gets_its_options_and_the_rows(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    write_table(tmp_path / "t", SCHEMA, rows(2))
    found = registry((str(tmp_path / "mine.py"),))
    settings = ExportSettings(exporter="ids", options={"separator": " "})
    assert export(settings, tmp_path / "t", tmp_path / "out.txt", found).rows == 2
    assert (tmp_path / "out.txt").read_text() == "1 0 163606 2\n1 1 163606 2"
