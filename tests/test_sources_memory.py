"""A dataset file of any size is read in flat memory: a large one takes no more than one of a twentieth."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

PEAK = Path(__file__).parent / "bench" / "peak.py"
READ = """
import sys
from pathlib import Path
from eyas.sources.files import read_rows
rows = sum(1 for file in sys.argv[2:] for _ in read_rows(Path(file)))
assert rows == int(sys.argv[1]), rows
"""
ROWS = 20_000  # of 2 kB: 40 MB
SMALLER = 20
MOST = 1.15


def rows(count: int) -> Iterator[dict[str, Any]]:
    for n in range(count):
        text = hashlib.sha512(str(n).encode()).hexdigest() * 16
        yield {"id": str(n), "text": text, "turns": json.dumps([{"role": "user", "content": str(n)}])}


def lines(path: Path, count: int) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(count))


def array(path: Path, count: int) -> None:
    with path.open("w") as file:
        file.write("[")
        file.writelines("," * (n > 0) + json.dumps(row) for n, row in enumerate(rows(count)))
        file.write("]")


def table(path: Path, count: int) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text", "turns"])
        writer.writeheader()
        writer.writerows(rows(count))


def parquet(path: Path, count: int, group: int = 500, compression: str = "none") -> None:
    whole = pyarrow.Table.from_pylist(list(rows(count)))
    pyarrow.parquet.write_table(
        whole, path, row_group_size=group, use_dictionary=False, compression=compression
    )


def one_group(compression: str) -> Callable[[Path, int], None]:
    """Parquet whose rows are all in one row group, as in some public files."""
    return lambda path, count: parquet(path, count, count, compression)


def packed(plain: Callable[[Path, int], None], pack: Callable[[bytes], bytes]) -> Callable[[Path, int], None]:
    def write(path: Path, count: int) -> None:
        plain(path, count)
        path.write_bytes(pack(path.read_bytes()))

    return write


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.jsonl", lines),
        ("rows.json", array),
        ("rows.csv", table),
        ("rows.parquet", parquet),
        ("one-group.parquet", one_group("none")),
        ("one-group.zstd.parquet", one_group("zstd")),
        ("rows.csv.gz", packed(table, lambda content: gzip.compress(content, 1))),
        ("rows.json.gz", packed(array, lambda content: gzip.compress(content, 1))),
        ("rows.jsonl.zst", packed(lines, zstandard.ZstdCompressor().compress)),
        ("rows.parquet.zst", packed(parquet, zstandard.ZstdCompressor().compress)),
    ],
)
def test_a_large_file_takes_no_more_memory_than_a_small_one(
    tmp_path: Path, name: str, write: Callable[[Path, int], None]
) -> None:
    peaks = []
    for count in (ROWS // SMALLER, ROWS):
        path = tmp_path / name
        write(path, count)
        command = [sys.executable, str(PEAK), sys.executable, "-c", READ, str(count), str(path)]
        peaks.append(int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.split()[0]))
    small, large = peaks
    assert large <= MOST * small, f"{large:,} bytes against {small:,}"
