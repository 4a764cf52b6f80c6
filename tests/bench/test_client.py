"""What a request costs the client, from prompt to journal, against a bare loop that only asks and against its own parts: SGLang replies
of 1,400 tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TOKENS = 1400
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}


@contextmanager
def server(folder: Path, seconds: float) -> Iterator[tuple[str, Callable[[], int]]]:
    """Its address, and a function that ends it and tells the most requests it had at once."""
    command = [sys.executable, str(HERE / "fast_sglang.py"), str(folder / "model"), str(TOKENS), str(seconds)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        yield process.stdout.readline().strip(), lambda: int(process.communicate()[0])
    finally:
        process.kill()
        process.wait()


def client(mode: str, folder: Path, url: str, prompts: int, in_flight: int) -> dict[str, float]:
    command = [sys.executable, str(HERE / "client.py"), mode, str(folder), url]
    done = subprocess.run(
        [*command, str(prompts), str(in_flight)], check=True, stdout=subprocess.PIPE, env=ENVIRONMENT
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("in_flight", [256, 1024])
def test_client(
    in_flight: int, tmp_path: Path, full: bool, benchmark: Any, tell: Callable[..., None]
) -> None:
    # Many more than in flight: until the gate is open, and while the last come, fewer are.
    prompts, rounds = (max(4096, 8 * in_flight), 3) if full else (100, 1)
    runs: dict[str, list[dict[str, float]]] = {"eyas": [], "minimal": [], "parts": []}
    reached = 0
    for _ in range(rounds):  # in turn, since a machine's speed comes and goes
        shutil.rmtree(tmp_path / "journal", ignore_errors=True)
        shutil.rmtree(tmp_path / "parts", ignore_errors=True)
        for mode, found in runs.items():
            with server(tmp_path, 1.0 if full else 0.01) as (url, most):
                found.append(client(mode, tmp_path, url, prompts, in_flight))
                reached = max(reached, most()) if mode == "eyas" else reached
    ours, theirs, parts = (sorted(found, key=itemgetter("cpu"))[rounds // 2] for found in runs.values())
    benchmark.pedantic(lambda: None, rounds=1)  # what counts are the ratios
    tell(
        f"client, {in_flight} in flight",
        ratio=ours["cpu"] / theirs["cpu"],
        CPU_ms_per_request=ours["cpu"] / prompts * 1e3,
        bare_loop_ms=theirs["cpu"] / prompts * 1e3,
        parts_alone_ms=parts["cpu"] / prompts * 1e3,
        memory_MB=ours["memory_mb"],
        longest_block_ms=ours["block_ms"],
        reached=float(reached),
    )
    if full:
        assert ours["cpu"] < 3 * theirs["cpu"]
        assert ours["block_ms"] <= 20
        # What decides what to ask, of whom and how much at once.
        assert ours["cpu"] < 1.5 * parts["cpu"]
        assert ours["memory_mb"] <= 150


def test_in_flight_reaches_what_is_asked(
    tmp_path: Path, full: bool, benchmark: Any, tell: Callable[..., None]
) -> None:
    """Eight doublings from the first gate, each seen in the server's load before the next."""
    asked, prompts = (4096, 8192) if full else (64, 256)
    with server(tmp_path, 20.0 if full else 2.0) as (url, most):
        found = benchmark.pedantic(client, args=("eyas", tmp_path, url, prompts, asked), rounds=1)
        reached = most()
    tell("in flight", asked=float(asked), reached=float(reached), memory_MB=found["memory_mb"])
    assert reached == asked


def test_memory_does_not_grow_with_the_prompts(
    tmp_path: Path, full: bool, benchmark: Any, tell: Callable[..., None]
) -> None:
    prompts = (2_000, 16_000) if full else (50, 100)
    with server(tmp_path, 0.1) as (url, _):
        few = client("eyas", link(tmp_path, "few"), url, prompts[0], 256)
        many = benchmark.pedantic(
            client, args=("eyas", link(tmp_path, "many"), url, prompts[1], 256), rounds=1
        )
    tell("memory of asking", **{f"MB_{prompts[0]}": few["memory_mb"], f"MB_{prompts[1]}": many["memory_mb"]})
    if full:
        assert many["memory_mb"] <= few["memory_mb"] + 20


def link(folder: Path, name: str) -> Path:
    """A folder of its own with the server's model."""
    (folder / name).mkdir()
    (folder / name / "model").symlink_to(folder / "model")
    return folder / name
