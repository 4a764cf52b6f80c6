"""Nothing finished is lost, whatever happens to a run: real snakemake, real jobs, a real server process, killed for real."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from pipeline import Run

from eyas.engines.llamacpp import RANDOM_SEED
from eyas.journal import LABEL, Answered, AnyEntry
from eyas.request import seed_of

pytestmark = [pytest.mark.fault, pytest.mark.workflow]

MARK = "EYAS_FAULT_RUN"
# Hold times, paths or machine facts; everything else after the journal is a function of journal and config.
TIMED = {"timing.parquet", "servers.json"}
TIMED_FOLDERS = {"summary"}


class FaultRun(Run):
    """A run whose processes, the server included, can be found by a variable of their environment."""

    def __init__(self, folder: Path, datasets: dict[str, int], fake: str = "--delay 0.05 --load 0.3") -> None:
        self.mark, self.fake = uuid.uuid4().hex, fake
        super().__init__(folder, datasets)

    def environment(self) -> dict[str, str]:
        return {**os.environ, "FAKE_ARGUMENTS": f"--record {self.record} {self.fake}", MARK: self.mark}

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Snakemake in a session of its own; its output goes to the file `terminal`. Killed with all it started."""
        with (
            (self.folder / "terminal").open("wb") as terminal,
            subprocess.Popen(
                self.command(*arguments),
                cwd=self.folder,
                env=self.environment(),
                stdout=terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            try:
                yield process
            finally:
                self.kill()

    @property
    def terminal(self) -> str:
        return (self.folder / "terminal").read_text()

    def processes(self) -> list[int]:
        """Every living process of this run, wherever it has gone."""
        needle, found = f"{MARK}={self.mark}".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if needle in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """SIGKILL for everything at once; stopped first, so that nobody sees another one die."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        eventually(self._gone, "the killed processes are gone")

    def _gone(self) -> bool:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not self.processes()

    def unlock(self) -> None:
        """What a user does when snakemake says that the folder is locked."""
        if any((self.folder / ".snakemake" / "locks").glob("*")):
            self.snakemake("--unlock")

    def status(self, dataset: str) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return json.loads((self.folder / "logs" / "generate" / f"{dataset}.status.json").read_bytes())
        return {}

    def made(self, name: str) -> bool:
        return (self.folder / "results" / name).exists()

    def segments(self) -> dict[Path, bytes]:
        """The whole entries of every journal segment, as bytes."""
        return {
            path: whole(path.read_bytes())
            for path in sorted((self.folder / "journal").glob("*/[0-9]*.jsonl.zst"))
        }

    def answers(self) -> Counter[tuple[tuple[int, ...], int]]:
        """(prompt ids, seed) of every journalled answer."""
        return Counter(
            (tuple(entry.reply.prompt_ids), seed_of(entry.reply.request) % RANDOM_SEED)
            for data in self.segments().values()
            for entry in entries(data)
            if isinstance(entry, Answered)
        )

    def answered_by_server(self) -> Counter[tuple[tuple[int, ...], int]]:
        return Counter((tuple(request["prompt"]), request["seed"]) for request in self.requests())

    def results(self) -> dict[str, bytes]:
        """All results that hold no times, by name."""
        root = self.folder / "results"
        files = [path for path in root.rglob("*") if path.is_file() and path.name not in TIMED]
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(files)
            if path.relative_to(root).parts[0] not in TIMED_FOLDERS
        }


def whole(data: bytes) -> bytes:
    """The prefix of a segment that consists of whole entries; read without Eyas' own reader."""
    at = 0
    while at + LABEL.size <= len(data):
        *_, length = LABEL.unpack_from(data, at)
        if at + LABEL.size + length > len(data):
            break
        at += LABEL.size + length
    return data[:at]


def entries(data: bytes) -> Iterator[AnyEntry]:
    lines = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    for line in lines.splitlines():
        yield msgspec.json.decode(line, type=AnyEntry)


def eventually(condition: Callable[[], Any], what: str, timeout: float = 60, poll: float = 0.01) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s, but not true: {what}"
        time.sleep(poll)


# --- kill -9 -----------------------------------------------------------------------------------------------------

DATASETS = {"alpha": 90, "beta": 60, "gamma": 80}


def budgeted(run: Run) -> None:
    """`gamma` has a budget that about a half of its answers fill; `beta` asks for two samples each."""
    run.config["datasets"]["gamma"]["budget_tokens"] = 6000
    run.config["datasets"]["beta"]["samples"] = 2
    run.save()


def moments(run: FaultRun, chance: random.Random) -> list[tuple[str, Callable[[], bool], int]]:
    """(name, when it has come, bytes that the power cut takes off the newest segment)."""

    def after_answers(count: int) -> Callable[[], bool]:
        goal: list[int] = []

        def come() -> bool:
            if not goal:
                goal.append(len(run.requests()) + count)
            return len(run.requests()) >= goal[0]

        return come

    def after_seconds(seconds: float) -> Callable[[], bool]:
        end: list[float] = []

        def come() -> bool:
            if not end:
                end.append(time.monotonic() + seconds)
            return time.monotonic() > end[0]

        return come

    def loading() -> bool:
        return (run.folder / ".eyas/server/endpoint.json").exists() and not run.requests()

    def finishing(dataset: str) -> Callable[[], bool]:
        return lambda: run.status(dataset).get("state") in ("finishing", "done")

    return [
        ("starting", after_seconds(chance.uniform(0.5, 2.0)), 0),
        ("the model loads", loading, 0),
        ("first answers", after_answers(chance.randint(1, 12)), 0),
        ("mid-generation", after_answers(chance.randint(15, 40)), 0),
        ("mid-frame", after_answers(chance.randint(15, 40)), chance.randint(1, 20)),
        ("mid-label", after_answers(chance.randint(15, 30)), chance.randint(200, 400)),
        ("a dataset is finished", finishing("gamma"), 0),
        ("a dataset is written", lambda: run.made("alpha/responses.jsonl.zst"), 0),
        ("verdicts", lambda: run.made("beta/verdicts.parquet"), 0),
        ("the mix", lambda: run.made("train/train.parquet"), 0),
    ]


@pytest.mark.parametrize("seed", [1])
def test_kill_minus_nine_of_everything_ten_times_changes_no_byte(tmp_path: Path, seed: int) -> None:
    calm = FaultRun(tmp_path / "calm", DATASETS)
    budgeted(calm)
    calm.snakemake()

    chance = random.Random(seed)
    run = FaultRun(tmp_path / "run", DATASETS)
    budgeted(run)
    kept: list[dict[Path, bytes]] = []
    in_flight: Counter[tuple[tuple[int, ...], int]] = Counter()
    before = run.answered_by_server()
    for name, come, cut in moments(run, chance):
        with run.running() as process:
            eventually(lambda c=come, p=process: p.poll() is not None or c(), name, poll=0.002)
            assert process.poll() is None, f"{name}: ended before the kill:\n{run.terminal}"
        if cut:
            newest = max(
                (path for path, data in run.segments().items() if data), key=lambda path: path.stat().st_mtime
            )
            os.truncate(newest, max(newest.stat().st_size - cut, 0))
        kept.append(run.segments())
        # Generated, but not whole in the journal: on its way at the kill, or in the second that a power cut takes.
        lost = run.answered_by_server() - before - run.answers()
        assert lost.total() <= run.config["server"]["concurrency"] + bool(cut), name
        in_flight += lost
        run.unlock()
    run.snakemake()

    final = run.segments()
    for snapshot in kept:
        for path, data in snapshot.items():
            assert final[path].startswith(data), f"{path}: a finished response was lost"
    assert max(run.answers().values()) == 1
    repeats = run.answered_by_server() - Counter(set(run.answered_by_server()))
    assert not repeats - in_flight, "asked twice, though it was not in flight at a kill"
    eventually(lambda: not run.processes(), "no process is left", 15)
    undisturbed = calm.results()
    assert run.results().keys() == undisturbed.keys()
    for name, data in undisturbed.items():
        assert run.results()[name] == data, f"{name} differs from that of an undisturbed run"
