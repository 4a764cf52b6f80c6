"""A table that is not as it was written is one clear error, whoever reads it and wherever it is damaged."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_results import verdict

from eyas.config import ExportSettings, MixSettings
from eyas.errors import EyasError
from eyas.export import export
from eyas.mix import mix
from eyas.plugins import registry
from eyas.records import TrainMetadata, TrainRow
from eyas.stats import tabulate
from eyas.summary import output, read_timing
from eyas.tables import SEAL_SIZE, new_parquet, open_parquet, read_table, write_table
from eyas.timing import Timing, TimingWriter
from eyas.train import SCHEMA
from eyas.verdicts import read_verdicts, write_verdicts

ROWS = 200


def write_train(path: Path) -> None:
    rows = (
        TrainRow(
            id=f"k{n}:0:0",
            primary_id=f"k{n}",
            input_ids=list(range(n, n + 20)),
            loss_mask=[0] * 8 + [1] * 12,
            metadata=TrainMetadata(
                dataset="a",
                group=f"g{n}",
                request=f"r{n}",
                finish="stop",
                truncated=False,
                constrained=False,
                reasoning_tokens=5,
                answer_tokens=7,
            ),
        )
        for n in range(ROWS)
    )
    write_table(path, SCHEMA, rows, 64)


def write_verdict_table(path: Path) -> None:
    write_verdicts(path, [verdict(f"k{n}", n, reasons=("empty_answer",) * (n % 5 == 0)) for n in range(ROWS)])


def write_timing(path: Path) -> None:
    with TimingWriter(path) as timing:
        for n in range(ROWS):
            timing.write(
                Timing(
                    request=f"r{n}",
                    attempt=1,
                    server="s",
                    started=float(n),
                    finished=n + 0.5,
                    prompt_tokens=n,
                    output_tokens=n,
                    used=n % 3 > 0,
                )
            )


def mixed(path: Path) -> list[bytes]:
    out = [path.with_name(name) for name in ("mixed", "held out", "mix.json")]
    mix(MixSettings(datasets=["a"], weights=None, eval_share=0.1, seed=0), [path], *out)
    return [one.read_bytes() for one in out]


def exported(path: Path) -> bytes:
    out = path.with_name("out.jsonl.zst")
    export(ExportSettings(exporter="tokens", options={}), path, out, registry())
    return out.read_bytes()


def tabulated(path: Path) -> Any:
    table = tabulate(path)
    lengths = {
        kind: (counts.accepted.tolist(), counts.rejected.tolist()) for kind, counts in table.lengths.items()
    }
    return lengths, table.units, table.decided, table.tallies


def timed(path: Path) -> str:
    frame: pd.DataFrame = read_timing(path)
    return frame.to_csv()


def rows(path: Path) -> int | None:
    return output(path, "train").rows


# What reads each table. `rows` opens the footer alone.
TABLES: dict[str, tuple[Callable[[Path], None], list[Callable[[Path], Any]]]] = {
    "train.parquet": (write_train, [lambda path: list(read_table(path, TrainRow)), mixed, exported, rows]),
    "verdicts.parquet": (write_verdict_table, [lambda path: list(read_verdicts(path)), tabulated, rows]),
    "timing.parquet": (write_timing, [timed, rows]),
}


def footer_start(data: bytes) -> int:
    return len(data) - 8 - struct.unpack("<I", data[-8:-4])[0]


@pytest.mark.parametrize("name", TABLES)
def test_a_flipped_bit_is_an_error_or_changes_nothing_for_every_reader(tmp_path: Path, name: str) -> None:
    path, (write, readers) = tmp_path / name, TABLES[name]
    write(path)
    data = path.read_bytes()
    right = [read(path) for read in readers]
    chance = random.Random(name)
    sealed = footer_start(data) - SEAL_SIZE
    places = [
        *(chance.randrange(sealed) for _ in range(100)),
        *(chance.randrange(sealed, len(data)) for _ in range(80)),
        *range(len(data) - 8, len(data)),
    ]
    noticed = 0
    for place in places:
        spoilt = bytearray(data)
        spoilt[place] ^= 1 << chance.randrange(8)
        path.write_bytes(spoilt)
        for read, expected in zip(readers, right, strict=True):
            try:
                assert read(path) == expected, place
                assert place < sealed, f"byte {place} of the footer or its seal was not checked by {read}"
            except EyasError as error:
                noticed += 1
                assert re.search(
                    rf"{name}: damaged \(.*\); delete it and run again to rebuild it$", str(error)
                )
    assert noticed > len(places)


@pytest.mark.parametrize("size", [0, 3, 8, 30, -1, -9, -200])
def test_a_cut_table_is_an_error_for_every_reader(tmp_path: Path, size: int) -> None:
    for name, (write, readers) in TABLES.items():
        path = tmp_path / name
        write(path)
        path.write_bytes(path.read_bytes()[:size])
        for read in readers:
            with pytest.raises(EyasError, match=rf"{name}: damaged \("):
                read(path)


def test_a_missing_table_is_an_error_for_every_reader(tmp_path: Path) -> None:
    for name, (_, readers) in TABLES.items():
        for read in readers:
            with pytest.raises(EyasError, match=rf"{name}: missing; run `snakemake`"):
                read(tmp_path / name)


def test_a_table_is_not_kept_in_memory_as_it_is_read(tmp_path: Path) -> None:
    """Of sixteen row groups, whose ids do not compress, about four are there at one time."""
    path, groups, rows_each, ids_each = tmp_path / "ids.parquet", 16, 64, 4_096
    schema = pa.schema([("ids", pa.list_(pa.int32()))])
    drawn = np.random.default_rng(0)
    with new_parquet(path, schema) as writer:
        for _ in range(groups):
            ids = [drawn.integers(1 << 31, size=ids_each, dtype=np.int32) for _ in range(rows_each)]
            writer.write_table(pa.table({"ids": ids}, schema=schema))
    before = pa.total_allocated_bytes()
    with open_parquet(path) as file:
        held = [pa.total_allocated_bytes() - before for _ in file.iter_batches(rows_each)]
    assert len(held) == groups
    assert max(held) < path.stat().st_size / 2


def test_other_tools_read_a_sealed_table_as_usual(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    write_train(path)
    assert pd.read_parquet(path)["primary_id"].tolist() == [f"k{n}" for n in range(ROWS)]
    assert pq.read_table(path, page_checksum_verification=True).num_rows == ROWS


def test_an_exporter_may_write_parquet_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "foreign.parquet"
    pd.DataFrame({"x": [1]}).to_parquet(path)
    assert output(path, "export").rows is None
    with pytest.raises(EyasError, match="does not fit its seal"):
        output(path, "train")
