"""Sizes of the benchmarks, and what they report.

`make bench` (pytest --benchmark-only) measures at full size and asserts ratios; plain pytest only sees that every benchmark
still runs. EYAS_BENCH_ROWS sets the number of responses for either.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from operations import Folder
from reference import Reference

FULL, SMALL = 100_000, 200  # responses
REFERENCE = 20_000  # of which are decoded to know how fast the machine is just now

_lines: list[str] = []


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether numbers count."""
    return bool(pytestconfig.getoption("benchmark_only"))


@pytest.fixture(scope="session")
def rows(full: bool) -> int:
    return int(os.environ.get("EYAS_BENCH_ROWS", FULL if full else SMALL))


@pytest.fixture(scope="session")
def folder(rows: int, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("rows"), rows)


@pytest.fixture
def tell(benchmark: Any) -> Callable[..., None]:
    """Puts figures into the benchmark's extra_info and into the list after the run."""

    def figures(what: str, **named: float | str) -> None:
        benchmark.extra_info.update({f"{what}: {name}": figure for name, figure in named.items()})
        texts = [
            f"{name.replace('_', ' ')} {f'{figure:,.3g}' if isinstance(figure, float) else figure}"
            for name, figure in named.items()
        ]
        _lines.append(f"{what:<20} {', '.join(texts)}")

    return figures


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _lines:
        terminalreporter.section("ratios")
        for line in _lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def reference(rows: int, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference") / "responses.jsonl.zst", min(rows, REFERENCE))
