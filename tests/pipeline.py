"""A run of the real workflow in a folder of its own, against the fake server, with everything counted."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from fake_llamacpp import make_model

ROOT = Path(__file__).parent.parent
TESTS = Path(__file__).parent
PROFILE = ROOT / "profiles" / "default"

CONFIG: dict[str, Any] = {
    "model": {
        "id": "fake",
        "quantisation": "Q4_1",
        "context": 2048,
        "tools": "system",
        "reasoning": {"name": "tags", "opened_by_prompt": True, "prefill": "<think>\n"},
    },
    "server": {
        "engine": {"name": "fake", "model_file": "tiny.gguf"},
        "concurrency": 8,
        "idle_timeout": 3,
        "retries": 2,
    },
    "defaults": {"sampling": {"temperature": 0.7, "max_new_tokens": 400}},
    "datasets": {},
    "mix": {"eval_share": 0.2},
    "plugins": [str(TESTS / "fake_engine.py")],
}


def evol_rows(dataset: str, count: int) -> list[dict[str, str]]:
    """Rows in the schema of Magicoder-Evol-Instruct-110K, each a different question."""
    return [{"instruction": f"{dataset} question {n}: why?", "response": "old answer"} for n in range(count)]


class Run:
    """A working directory with a config, source files and recorded requests."""

    def __init__(self, folder: Path, datasets: dict[str, int]) -> None:
        self.folder = self.cwd = folder
        self.config = copy.deepcopy(CONFIG)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        make_model(folder / "tiny.gguf")
        self.record = folder / "requests.jsonl"
        for name, count in datasets.items():
            self.add_dataset(name, evol_rows(name, count))
        self.save()

    def add_dataset(self, name: str, rows: list[dict[str, str]]) -> None:
        self.write_rows(name, rows)
        self.config["datasets"][name] = {"source": {"name": "magicoder"}, "files": [f"data/{name}.jsonl"]}

    def write_rows(self, name: str, rows: list[dict[str, str]]) -> None:
        (self.folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def save(self) -> None:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config, sort_keys=False))

    def command(self, *arguments: str, snakefile: Path | None = None) -> list[str]:
        """A snakemake call as a user with a checkout elsewhere would type it."""
        return [
            sys.executable,
            "-m",
            "snakemake",
            "--snakefile",
            str(snakefile or ROOT / "Snakefile"),
            "--workflow-profile",
            str(PROFILE),
            "--cores",
            "2",
            *arguments,
        ]

    def snakemake(
        self, *arguments: str, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments, **options),
            cwd=self.cwd,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        if check and done.returncode:
            raise AssertionError(
                f"snakemake ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
            )
        return done

    def environment(self) -> dict[str, str]:
        """The environment of a run; a started fake server records its requests."""
        # With bytecode kept, a call of snakemake takes half the time.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**inherited, "FAKE_ARGUMENTS": f"--record {self.record} --delay 0.02 --slots 16"}

    def jobs(self, *arguments: str, **options: Any) -> Counter[str]:
        """The jobs that a run executes, as `rule` or `rule dataset`, targets left out."""
        return executed(self.snakemake(*arguments, **options).stderr)

    def requests(self) -> list[dict[str, Any]]:
        """Every generation that reached the server so far."""
        return (
            [json.loads(line) for line in self.record.read_text().splitlines()]
            if self.record.exists()
            else []
        )

    @contextmanager
    def asked(self) -> Iterator[list[dict[str, Any]]]:
        """The generations that reach the server within the block."""
        before = len(self.requests())
        new: list[dict[str, Any]] = []
        yield new
        new += self.requests()[before:]


def checkout(folder: Path) -> Path:
    """A git repository of its own on branch `main` with the files of this one as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    """Everything in the repository, committed to its current branch."""
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "-m", "as is")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "core.hooksPath=/dev/null", *arguments], cwd=folder, check=True)


TARGETS = {"all", "fetch", "prompts", "responses", "verdicts", "stats", "train"}


def executed(output: str) -> Counter[str]:
    """Jobs in Snakemake's output, as `rule` or `rule dataset`; a module's prefix `eyas_` is left out."""
    jobs: Counter[str] = Counter()
    for block in re.split(r"\n(?=\[|rule |localrule )", output):
        if match := re.search(r"^(?:local)?rule (?:eyas_)?(\w+):$", block, re.MULTILINE):
            rule = match[1]
            wildcards = re.search(r"wildcards: (?:dataset|place)=([^,\n]+)", block)
            if rule not in TARGETS:
                jobs[f"{rule} {wildcards[1]}" if wildcards else rule] += 1
    return jobs


@contextmanager
def fake_server(run: Run, *arguments: str) -> Iterator[str]:
    """A fake server that already runs; yields its URL and records into the run."""
    process = subprocess.Popen(
        [
            sys.executable,
            str(TESTS / "fake_llamacpp.py"),
            *("--model", str(run.folder / "tiny.gguf"), "--record", str(run.record), *arguments),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
