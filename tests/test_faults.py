"""Nothing finished is lost, whatever happens to a run: real snakemake, real jobs, a real server process, killed for real."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import journal_entries
from pipeline import ROOT, Run, evol_rows

from eyas.engines.llamacpp import RANDOM_SEED
from eyas.journal import LABEL, Answered
from eyas.request import seed_of

pytestmark = [pytest.mark.fault, pytest.mark.workflow]

MARK = "EYAS_FAULT_RUN"
# Hold times, paths or machine facts; everything else after the journal is a function of journal and config.
TIMED = {"timing.parquet", "servers.json"}
TIMED_FOLDERS = {"summary"}


def heed_signals() -> None:
    """A test run in the background of a script ignores Ctrl-C, one under nohup a closed terminal; children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class FaultRun(Run):
    """A run whose processes, the server included, can be found by a variable of their environment."""

    fake = "--delay 0.05 --load 0.3"

    def __init__(self, folder: Path, datasets: dict[str, int]) -> None:
        self.mark, self.screen = uuid.uuid4().hex, folder / "terminal"
        super().__init__(folder, datasets)

    def environment(self) -> dict[str, str]:
        return {**os.environ, "FAKE_ARGUMENTS": f"--record {self.record} {self.fake}", MARK: self.mark}

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Snakemake in a session of its own; its output goes to the file `screen`. Killed with all it started."""
        with (
            self.screen.open("wb") as terminal,
            subprocess.Popen(
                self.command(*arguments),
                cwd=self.folder,
                env=self.environment(),
                stdout=terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=heed_signals,
            ) as process,
        ):
            try:
                yield process
            finally:
                self.kill()

    @property
    def terminal(self) -> str:
        return self.screen.read_text()

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
            for entry in journal_entries(data)
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
        lost = run.answered_by_server() - run.answers() - in_flight
        assert lost.total() <= run.config["server"]["concurrency"] + bool(cut), name
        in_flight += lost
        run.unlock()
    run.snakemake()

    final = run.segments()
    for snapshot in kept:
        for path, data in snapshot.items():
            assert final[path].startswith(data), f"{path}: a finished response was lost"
    assert max(run.answers().values()) == 1
    twice = run.answered_by_server() - run.answers()
    assert twice == in_flight, "asked twice are those in flight at a kill, and no other"
    eventually(lambda: not run.processes(), "no process is left", 15)
    undisturbed = calm.results()
    assert run.results().keys() == undisturbed.keys()
    for name, data in undisturbed.items():
        assert run.results()[name] == data, f"{name} differs from that of an undisturbed run"


# --- one clear line, and nothing lost ----------------------------------------------------------------------------


def failing(run: FaultRun, *arguments: str) -> str:
    """What the user sees of a run that must fail."""
    done = run.snakemake(*arguments, check=False)
    assert done.returncode != 0
    return done.stdout + done.stderr


def report(terminal: str) -> str:
    """The last words of a failed run."""
    assert terminal.count("Eyas: ") == 1, terminal
    return terminal[terminal.index("Eyas: ") :]


def assert_clear(terminal: str, line: str) -> None:
    """`line` stands by itself, no traceback or screenful of settings around it."""
    assert re.search(f"^(eyas( [a-z]+)?: error:)? *{line}$", terminal, re.MULTILINE), terminal
    assert "Traceback" not in terminal
    assert max(map(len, terminal.splitlines())) < 600


def assert_reported(terminal: str, line: str, logs: str) -> None:
    """The report names the reason once, the logs, and the command that resumes."""
    assert_clear(terminal, line)
    assert len(re.findall(line, report(terminal))) == 1
    assert f"    log: {logs}\n" in report(terminal)
    assert "Nothing finished is lost" in report(terminal)
    assert f"  snakemake --snakefile {shlex.quote(str(ROOT / 'Snakefile'))} " in report(terminal)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FaultRun:
    run = FaultRun(tmp_path_factory.mktemp("finished") / "run", {"alpha": 50, "beta": 6})
    run.snakemake()
    return run


@pytest.fixture
def run(finished: FaultRun, tmp_path: Path) -> Iterator[FaultRun]:
    """A finished run, free to be broken."""
    run = copy.deepcopy(finished)
    shutil.copytree(finished.folder, tmp_path / "run")
    run.folder = run.cwd = tmp_path / "run"
    run.record = run.folder / "requests.jsonl"
    run.mark = uuid.uuid4().hex
    yield run
    run.kill()


def rows(run: FaultRun, dataset: str) -> Path:
    return run.folder / "data" / f"{dataset}.jsonl"


def grow(run: FaultRun, count: int = 3) -> None:
    """`count` new questions for alpha, so that a server is needed."""
    run.write_rows("alpha", evol_rows("alpha", 50 + count))


def misspelt_key(run: FaultRun) -> None:
    run.config["server"]["concurency"] = 3


def unknown_plugin(run: FaultRun) -> None:
    run.config["datasets"]["alpha"]["source"]["name"] = "magicode"


def missing_file(run: FaultRun) -> None:
    rows(run, "alpha").rename(run.folder / "elsewhere")


def test_a_config_that_is_no_yaml_is_told_with_its_line(run: FaultRun) -> None:
    (run.folder / "config.yaml").write_text("model:\n  id: fake\n  context: [2048\n")
    try:
        assert_clear(failing(run), r"config\.yaml:4: not valid YAML: .*; correct it")
    finally:
        run.save()


@pytest.mark.parametrize(
    ("breaking", "line"),
    [
        (misspelt_key, r"config\.yaml:\d+: server\.concurency: unknown key; did you mean `concurrency`\?"),
        (
            unknown_plugin,
            r"config\.yaml:\d+: datasets\.alpha\.source: no source plugin named 'magicode'; did you mean 'magicoder'\?.*",
        ),
        (
            missing_file,
            r"config\.yaml:\d+: datasets\.alpha\.files: data/alpha\.jsonl does not exist; correct the path .*",
        ),
    ],
)
def test_a_wrong_config_is_one_line_before_anything_runs(
    run: FaultRun, breaking: Callable[[FaultRun], None], line: str
) -> None:
    before = copy.deepcopy(run.config)
    breaking(run)
    run.save()
    terminal = failing(run)
    assert_clear(terminal, line)
    assert "Snakefile" not in terminal and ".smk" not in terminal, "the fault is not there"
    run.config = before
    run.save()
    if (run.folder / "elsewhere").exists():
        (run.folder / "elsewhere").rename(rows(run, "alpha"))
    with run.asked() as asked:
        assert not run.jobs()
    assert asked == []


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"instruction": "x", ', r"data/alpha\.jsonl: line 37: not valid JSON .*; correct the line, .*"),
        (
            '{"instruction": 5, "response": ""}',
            r"data/alpha\.jsonl: row 37: column 'instruction' holds int, not text; correct the row, .*",
        ),
        ("", r"dataset alpha: no usable row in data/alpha\.jsonl \(there are no rows\); correct `files:` .*"),
    ],
    ids=["cut", "wrong type", "empty"],
)
def test_a_malformed_dataset_is_named_by_row_and_stops_no_other(
    run: FaultRun, content: str, line: str
) -> None:
    good = rows(run, "alpha").read_text()
    lines = good.splitlines()
    rows(run, "alpha").write_text("\n".join([*lines[:36], content, *lines[37:]]) if content else "")
    run.write_rows("beta", evol_rows("beta", 8))
    with run.asked() as asked:
        terminal = failing(run)
    assert_reported(terminal, line, "logs/prompts/alpha.log")
    assert len(asked) == 2 and run.made("beta/train.parquet")
    rows(run, "alpha").write_text(good)
    with run.asked() as asked:
        run.snakemake()
    assert asked == []


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def taken_port(engine: dict[str, Any], taken: int) -> None:
    engine["port"] = taken


def no_model(engine: dict[str, Any], _taken: int) -> None:
    engine["model_file"] = "gone.gguf"


def garbage_model(engine: dict[str, Any], _taken: int) -> None:
    engine |= {"name": "llamacpp", "model_file": "garbage.gguf"}


def model_without_weights(engine: dict[str, Any], _taken: int) -> None:
    engine["name"] = "llamacpp"


@pytest.mark.parametrize(
    ("breaking", "line"),
    [
        (taken_port, r"server\.engine\.port: 127\.0\.0\.1:\d+ is taken .*; choose another port, or 0 .*"),
        (
            no_model,
            r"server\.engine\.model_file: gone\.gguf does not exist; fetch it \(make model\) or correct .*",
        ),
        pytest.param(
            garbage_model,
            r"server\.engine\.model_file: the file is not a GGUF model; fetch it again .*; its whole log is .*",
            marks=pytest.mark.engine,
        ),
        pytest.param(
            model_without_weights,
            r"server\.engine\.model_file: llama\.cpp cannot load the file \(.*\); fetch it again .*",
            marks=pytest.mark.engine,
        ),
    ],
)
def test_a_server_that_cannot_start_is_one_line_for_all_datasets(
    run: FaultRun, taken: int, breaking: Callable[[dict[str, Any], int], None], line: str
) -> None:
    grow(run)
    run.write_rows("beta", evol_rows("beta", 7))
    (run.folder / "garbage.gguf").write_bytes(b"garbage" * 1000)
    before = copy.deepcopy(run.config)
    breaking(run.config["server"]["engine"], taken)
    run.save()
    terminal = failing(run)
    assert_clear(terminal, line)
    assert len(re.findall(line, report(terminal))) == 1, "one reason, though two datasets failed"
    assert report(terminal).startswith("Eyas: 2 jobs failed:")
    run.config = before
    run.save()
    with run.asked() as asked:
        run.snakemake()
    assert len(asked) == 4


def test_the_report_names_only_jobs_of_this_run(run: FaultRun) -> None:
    good = rows(run, "alpha").read_text()
    rows(run, "alpha").write_text("")
    assert "logs/prompts/alpha.log" in report(failing(run))
    rows(run, "alpha").write_text(good)
    rows(run, "beta").write_text("{")
    last = report(failing(run, "results/beta/prompts.jsonl.zst"))
    assert "logs/prompts/beta.log" in last and "alpha" not in last


# --- full disks, second runs, Ctrl-C -----------------------------------------------------------------------------


SLOW = "--delay 1"  # 16 answers a second from eight in flight: time to do harm


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all the space that is left."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


def mid_generation(run: FaultRun, count: int = 20) -> None:
    """Returns when `count` answers of this run are journalled."""
    start = run.answers().total()
    eventually(lambda: run.answers().total() >= start + count, f"{count} answers")


def resumed(run: FaultRun) -> None:
    """Goes on with the run, at full speed: asks what is missing and nothing else."""
    kept, run.fake = run.answers(), FaultRun.fake
    planned = sum(rows(run, name).read_text().count("\n") for name in run.config["datasets"])
    assert kept.total() >= 20
    with run.asked() as asked:
        run.snakemake()
    assert len(asked) == planned - kept.total()
    assert run.answers().total() == planned == len(run.answers())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_stops_the_run_and_freed_space_lets_it_go_on(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "16m"):
        run = FaultRun(tmp_path / "disk" / "run", {"alpha": 150})
        run.record, run.screen, run.fake = tmp_path / "requests.jsonl", tmp_path / "screen", SLOW
        with run.running() as process:
            mid_generation(run)
            ballast = fill(run.folder)
            assert process.wait(60) != 0
        # Neither logs nor the report can be written now; the line in the terminal must do.
        assert_clear(
            run.terminal,
            r"journal/alpha: an entry could not be written \(No space left on device\); free space .*: every finished response is kept",
        )
        ballast.unlink()
        run.unlock()
        resumed(run)


def test_a_file_limit_is_told_by_the_journal_and_the_run_goes_on_without_it(tmp_path: Path) -> None:
    run = FaultRun(tmp_path / "run", {"alpha": 150})
    run.fake = SLOW
    with run.running() as process:
        mid_generation(run)
        (segment,) = run.segments()
        limit = segment.stat().st_size + 4000
        resource.prlimit(run.status("alpha")["pid"], resource.RLIMIT_FSIZE, (limit, limit))
        assert process.wait(60) != 0
    line = (
        r"journal/alpha: an entry could not be written \(File too large\); free space or raise the limit, .*"
    )
    assert_reported(run.terminal, line, "logs/generate/alpha.log")
    resumed(run)


def test_a_job_killed_by_the_kernel_is_reported_though_it_said_nothing(tmp_path: Path) -> None:
    run = FaultRun(tmp_path / "run", {"alpha": 150})
    run.fake = SLOW
    with run.running() as process:
        mid_generation(run)
        os.kill(run.status("alpha")["pid"], signal.SIGKILL)
        assert process.wait(60) != 0
    assert_reported(
        run.terminal, "its log ends without a reason; it was killed, .*", "logs/generate/alpha.log"
    )
    resumed(run)


def test_an_engine_that_crashes_midway_is_started_again_and_costs_only_what_it_was_doing(
    tmp_path: Path,
) -> None:
    run = FaultRun(tmp_path / "run", {"alpha": 80})
    run.fake = SLOW
    with run.running() as process:
        mid_generation(run)
        (engine,) = (pid for pid in run.processes() if "fake_llamacpp.py" in command_line(pid))
        os.kill(engine, signal.SIGKILL)
        assert process.wait(60) == 0, run.terminal
    twice = run.answered_by_server() - run.answers()
    assert run.answers().total() == 80 and twice.total() <= run.config["server"]["concurrency"]


def command_line(pid: int) -> str:
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "cmdline").read_text()
    return ""


def test_a_second_run_in_the_same_folder_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    run = FaultRun(tmp_path / "run", {"alpha": 80})
    run.fake = SLOW
    with run.running() as process:
        mid_generation(run)
        terminal = failing(run)
        assert "Directory cannot be locked" in terminal and "Eyas: " not in terminal
        assert process.wait(60) == 0, run.terminal
    assert run.answered_by_server() == run.answers() and run.answers().total() == 80


def test_a_second_run_on_the_same_journal_is_told_who_writes_it(tmp_path: Path) -> None:
    run = FaultRun(tmp_path / "run", {"alpha": 400})
    second = FaultRun(tmp_path / "second", {"alpha": 400})
    second.config["journal"] = str(run.folder / "journal")
    second.save()
    run.fake = SLOW
    with run.running():
        mid_generation(run)
        terminal = failing(second)
        pid = run.status("alpha")["pid"]
    line = (
        rf'{run.folder}/journal/alpha: another run is writing this journal .*"pid": {pid}.*; wait for it, .*'
    )
    assert_reported(terminal, line, "logs/generate/alpha.log")
    kept = run.answers().total()
    second.snakemake()
    assert len(second.requests()) == 400 - kept, "the journal is shared"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["Ctrl-C", "closed terminal"])
def test_an_interrupted_run_leaves_no_server_and_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    run = FaultRun(tmp_path / "run", {"alpha": 150, "beta": 20})
    run.fake = SLOW
    with run.running() as process:
        mid_generation(run)
        os.killpg(process.pid, number)
        assert process.wait(30) != 0
        grace = run.config["server"]["idle_timeout"] + 10
        eventually(lambda: not run.processes(), "no process is left", grace)
    assert "Traceback" not in run.terminal
    if number == signal.SIGINT:
        assert run.status("alpha")["state"] == "interrupted"
        assert report(run.terminal).startswith(
            "Eyas: interrupted. Nothing finished is lost. Go on with:\n  snakemake "
        )
    else:
        run.unlock()
    resumed(run)


def test_ctrl_c_ends_serve_well_and_serve_can_be_started_again(tmp_path: Path) -> None:
    run = FaultRun(tmp_path / "run", {"alpha": 1})
    for _ in range(2):
        with run.running("serve") as process:
            eventually(lambda: "serving at" in run.terminal, "serve holds a server")
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(30) == 0
            eventually(lambda: not run.processes(), "no process is left")
        assert "it runs until Ctrl-C" in run.terminal
        assert "the server stops when no job has used it for 3 s" in run.terminal
        assert not re.search("fail|error|interrupt", run.terminal, re.IGNORECASE)
