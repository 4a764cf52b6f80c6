"""How fast each operation is, as a ratio to plain decoding of the same responses in the same run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import synthetic
from operations import OPERATIONS, Folder
from reference import Reference

from eyas.journal import AnyEntry, JournalWriter

LEAST = {"validate": 0.3, "train": 0.3}
BATCH = 1_000  # responses made, then appended, at a time: only the appending is measured


def _report(
    name: str, before: float, seconds: float, reference: Reference, tell: Callable[..., None]
) -> float:
    """seconds: per response."""
    ratio = (before + reference.seconds()) / 2 / seconds
    tell(name, ratio=ratio, responses_per_s=round(1 / seconds), MB_per_s=reference.bytes / seconds / 1e6)
    return ratio


def test_append(
    folder: Folder, rows: int, reference: Reference, benchmark: Any, tell: Callable[..., None]
) -> None:
    folder.prepare("append")
    before = reference.seconds()
    entries = synthetic.entries(rows)
    size = min(BATCH, rows)

    def append(batch: list[AnyEntry]) -> None:
        for entry in batch:
            writer.append(entry)

    with JournalWriter(folder.journal) as writer:
        benchmark.pedantic(
            append,
            setup=lambda: ((list(islice(entries, 2 * size)),), {}),  # a rendering and an answer each
            rounds=rows // size,
        )
    _report("append", before, benchmark.stats.stats.mean / size, reference, tell)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "append"])
def test_throughput(
    name: str,
    folder: Folder,
    full: bool,
    rows: int,
    reference: Reference,
    benchmark: Any,
    tell: Callable[..., None],
) -> None:
    folder.prepare(name)
    before = reference.seconds()
    benchmark.pedantic(OPERATIONS[name], args=(folder,), rounds=1)
    ratio = _report(name, before, benchmark.stats.stats.mean / rows, reference, tell)
    if full and name in LEAST:
        assert ratio >= LEAST[name]
