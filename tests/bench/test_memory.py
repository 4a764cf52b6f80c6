"""Peak memory does not grow with the number of responses: each operation in a fresh process, at a tenth and at all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from operations import Folder

HERE = Path(__file__).parent
MOST = 1.1


def peak(operation: str, folder: Folder) -> int:
    """Peak resident memory of the operation's process in bytes."""
    command = [sys.executable, str(HERE / "operations.py"), operation, str(folder.path), str(folder.rows)]
    done = subprocess.run(
        [sys.executable, str(HERE / "peak.py"), *command], check=True, stdout=subprocess.PIPE
    )
    return int(done.stdout.split()[0])


@pytest.fixture(scope="module")
def tenth(rows: int, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("tenth"), max(1, rows // 10))


@pytest.mark.parametrize("operation", ["append", "finalise", "validate", "train", "stats"])
def test_memory(
    operation: str, folder: Folder, tenth: Folder, full: bool, benchmark: Any, tell: Callable[..., None]
) -> None:
    folder.prepare(operation)
    tenth.prepare(operation)
    # The highest of three: how an allocator's heap grows is partly luck, and a run of ten times the length has more of it.
    few = max(peak(operation, tenth) for _ in range(3 if full else 1))
    many = benchmark.pedantic(peak, args=(operation, folder), rounds=1)
    tell(f"memory of {operation}", ratio=many / few, MB_at_a_tenth=round(few / 1e6), MB=round(many / 1e6))
    if full:
        assert many <= MOST * few
