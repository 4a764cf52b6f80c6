"""What a request costs the client: `generate` at concurrency 64 against a bare aiohttp loop that asks the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A fake server with room for all."""
    command = [sys.executable, str(HERE.parent / "fake_llamacpp.py"), "--model", "tiny.gguf", "--slots", "64"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def cpu_seconds(mode: str, folder: Path, url: str, prompts: int) -> float:
    done = subprocess.run(
        [sys.executable, str(HERE / "client.py"), mode, str(folder), url, str(prompts)],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )
    return float(done.stdout)


def test_client(url: str, tmp_path: Path, full: bool, benchmark: Any, tell: Callable[..., None]) -> None:
    prompts = 3_000 if full else 100
    ours = benchmark.pedantic(cpu_seconds, args=("eyas", tmp_path, url, prompts), rounds=1)
    theirs = cpu_seconds("minimal", tmp_path, url, prompts)
    tell(
        "client of generate",
        ratio=ours / theirs,
        CPU_ms_per_request=ours / prompts * 1e3,
        bare_loop_ms=theirs / prompts * 1e3,
    )
