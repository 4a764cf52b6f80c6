"""What it costs to do nothing: a finished run, a status line, a job on a handful of rows."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pipeline import PROFILE, Run

TRIVIAL = 'rule all:\n    output:\n        "done.txt",\n    shell:\n        "touch {output}"\n'
# What a job that writes a table cannot do without.
LIBRARIES = "import msgspec, pyarrow.parquet"

pytestmark = pytest.mark.workflow


@pytest.fixture(scope="module")
def finished(full: bool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of eight datasets; of one where numbers do not count."""
    datasets = {f"d{n}": 3 for n in range(8 if full else 1)}
    run = Run(tmp_path_factory.mktemp("finished") / "run", datasets)
    run.snakemake()
    return run


@pytest.fixture(scope="module")
def times(full: bool) -> int:
    return 5 if full else 1


def seconds(command: Sequence[str], folder: Path) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def compare(
    benchmark: Any, command: Sequence[str], base: Sequence[str], folder: Path, times: int
) -> tuple[float, float]:
    """Median s of `command` and of `base`, run by turns."""
    bases: list[float] = []
    benchmark.pedantic(
        seconds,
        args=(command, folder),
        setup=lambda: bases.append(seconds(base, folder)),
        rounds=times,
    )
    return benchmark.stats.stats.median, statistics.median(bases)


def test_finished_run(finished: Run, times: int, benchmark: Any, tell: Callable[..., None]) -> None:
    trivial = finished.folder / "trivial"
    trivial.mkdir()
    (trivial / "Snakefile").write_text(TRIVIAL)
    base = [
        *(sys.executable, "-m", "snakemake", "--cores", "2", "--workflow-profile", str(PROFILE)),
        *("--directory", str(trivial), "--snakefile", str(trivial / "Snakefile")),
    ]
    seconds(base, finished.folder)
    assert not finished.jobs()
    ours, theirs = compare(benchmark, finished.command(), base, finished.folder, times)
    tell("finished run", ratio=ours / theirs, s=ours, trivial_Snakefile_s=theirs)


def test_status(finished: Run, times: int, benchmark: Any, tell: Callable[..., None]) -> None:
    eyas = [sys.executable, "-c", "import sys; from eyas.cli import main; sys.exit(main(['status']))"]
    ours, theirs = compare(benchmark, eyas, [sys.executable, "-c", "pass"], finished.folder, times)
    tell("eyas status", ratio=ours / theirs, ms=ours * 1e3, python_ms=theirs * 1e3)


def test_jobs(finished: Run, times: int, benchmark: Any, tell: Callable[..., None]) -> None:
    """Every program with the very command of the workflow, on three rows. `generate` finds all in its journal."""
    planned = finished.snakemake("--dry-run", "--forceall", "--printshellcmds")
    commands = re.findall(r"^Shell command: (.*)$", planned.stdout + planned.stderr, re.MULTILINE)
    by_stage = {
        match[1]: command for command in commands if (match := re.search(r"/scripts/(\w+)\.py ", command))
    }
    libraries = [sys.executable, "-c", LIBRARIES]
    base = statistics.median(seconds(libraries, finished.folder) for _ in range(times))
    benchmark.pedantic(seconds, args=(libraries, finished.folder), rounds=times)
    for stage, command in sorted(by_stage.items()):
        ours = statistics.median(seconds(["bash", "-c", command], finished.folder) for _ in range(times))
        tell(f"job of {stage}", ratio=ours / base, ms=ours * 1e3, libraries_ms=base * 1e3)
    assert {"generate", "mix", "prompts", "stats", "summary", "train", "validate"} <= set(by_stage)
