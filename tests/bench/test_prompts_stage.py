"""CPU time of the prompts stage, as a ratio to a plain reader of the same file in the same run, and how much memory it takes.

As a program, `python test_prompts_stage.py FILE VARIANT` runs the stage in a fresh process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic

from eyas.config import (
    DecontaminateConfig,
    EvaluationSet,
    FilterConfig,
    NearDuplicatesConfig,
    PromptsSettings,
)
from eyas.prompts import CACHE_KIBIBYTES, Evaluation, prompts
from eyas.sources.chat import Chat
from eyas.sources.text import Text

HERE = Path(__file__).parent
MOST = 1.1  # of the memory that a tenth of the rows takes, the sorter's page cache aside: a tenth may not fill it
# What is left out; for near-duplicates, which cost a millisecond each, a tenth of the rows.
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "prompts": (1, {}),
    "prompts, filtered": (1, {"filter": FilterConfig(min_characters=2, scripts=["Latin"])}),
    "prompts, no duplicates": (1, {"duplicates": "drop"}),
    "prompts, decontaminated": (1, {"decontaminate": DecontaminateConfig(against=["bench"])}),
    "prompts, no near-duplicates": (10, {"near_duplicates": NearDuplicatesConfig()}),
}


def write(path: Path, count: int) -> None:
    """Conversations of one question and answer; each tenth question is an earlier one again.

    A question is two halves of the pool's, in ever other pairs, so that no two are nearly the same.
    """
    answers = synthetic.pool(min(count, synthetic.POOL))
    with path.open("w") as file:
        for n in range(count):
            asked = n // 2 if n % 10 == 9 else n
            answer = answers[asked % len(answers)]
            other = answers[(asked + asked // len(answers) + 1) % len(answers)].prompt
            question = f"{asked}{answer.prompt[: len(answer.prompt) // 2]} {other[len(other) // 2 :]}"
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer.text},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


def run(path: Path, variant: str) -> None:
    bench = path.with_name("bench.txt")
    bench.write_text("".join(f"{answer.prompt[:400]}\n" for answer in synthetic.pool(200)[100:]))
    usual: dict[str, Any] = {
        "filter": FilterConfig(),
        "duplicates": "keep",
        "near_duplicates": None,
        "decontaminate": None,
    }
    settings = PromptsSettings(
        dataset="bench",
        source={"name": "chat"},
        revision=None,
        rows=None,
        turns="first",
        evaluation_sets={"bench": EvaluationSet(source={"name": "text"}, files=["bench.txt"])},
        seed=0,
        **(usual | VARIANTS[variant][1]),
    )
    out = path.with_name("out")
    held = {"bench": Evaluation(Text(Text.Options()), [bench])}
    source = Chat(Chat.Options())
    report = prompts(
        settings, [path], [path.name], source, out / "prompts.jsonl.zst", out / "prompts.json", held
    )
    assert report.used > report.rows_read / 2


def read(path: Path, count: int) -> float:
    """CPU seconds per row of reading lines as JSON and nothing else."""
    started = time.process_time()
    with path.open("rb") as file:
        for line in file:
            json.loads(line)
    return (time.process_time() - started) / count


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts(variant: str, rows: int, tmp_path: Path, benchmark: Any, tell: Callable[..., None]) -> None:
    count = rows // VARIANTS[variant][0]
    path = tmp_path / "rows.jsonl"
    write(path, count)
    before = read(path, count)
    started = time.process_time()
    benchmark.pedantic(run, args=(path, variant), rounds=1)
    seconds = (time.process_time() - started) / count
    tell(variant, ratio=(before + read(path, count)) / 2 / seconds, rows_per_s=round(1 / seconds))


@pytest.mark.parametrize("variant", ["prompts", "prompts, no near-duplicates"])
def test_memory_of_prompts(
    variant: str, rows: int, full: bool, tmp_path: Path, benchmark: Any, tell: Callable[..., None]
) -> None:
    def peak(count: int) -> int:
        """Peak resident memory in bytes, in a fresh process."""
        path = tmp_path / str(count) / "rows.jsonl"
        path.parent.mkdir()
        write(path, count)
        command = [sys.executable, str(HERE / "peak.py"), sys.executable, __file__, str(path), variant]
        return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.split()[0])

    count = rows // VARIANTS[variant][0]
    few = peak(count // 10)
    many = benchmark.pedantic(peak, args=(count,), rounds=1)
    tell(f"memory of {variant}", ratio=many / few, MB_at_a_tenth=round(few / 1e6), MB=round(many / 1e6))
    if full:
        assert many <= MOST * few + CACHE_KIBIBYTES * 1024


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
