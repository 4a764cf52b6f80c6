"""SGLang's launcher: nobody sees the API key, and no process of the server outlives those who own it.

Most tests put a small package in the place of sglang, which does what matters here as sglang does: prints its settings
at its start and works in processes that it spawns.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.engines.sglang_causes import explain
from eyas.engines.sglang_options import LAUNCHER

pytestmark = pytest.mark.service

KEY = "a-key-nobody-may-see"

SETTINGS = """
import argparse, dataclasses

@dataclasses.dataclass
class ServerArgs:
    model_path: str = ""
    {field}: int = 0
    end: str = ""
    api_key: str = ""

def prepare_server_args(argv):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for field in dataclasses.fields(ServerArgs):
        parser.add_argument("--" + field.name.replace("_", "-"), type=field.type, default=field.default)
    return ServerArgs(**vars(parser.parse_args(argv)))
"""

WORKER = """
import os, time

def work(settings, folder):
    print("child", settings.model_path, flush=True)
    (folder / "child").write_text(settings.api_key)
    (folder / "environment").write_text(repr(dict(os.environ)))
    (folder / "pid").write_text(str(os.getpid()))
    time.sleep(600)
"""

PROGRAM = """
import copy, json, multiprocessing, os, pathlib, signal, sys, time
from sglang.srt.server_args import prepare_server_args
from sglang.srt.worker import work

if __name__ == "__main__":
    settings = prepare_server_args(sys.argv[1:])
    print(f"{settings=}", copy.deepcopy(settings), sys.argv, "stdin", sys.stdin.read(), flush=True)
    folder = pathlib.Path(settings.model_path)
    (folder / "main").write_text(json.dumps({"header": f"Bearer {settings.api_key}", "key": settings.api_key}))
    if settings.end == "exit":
        sys.exit(3)
    if settings.end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    multiprocessing.set_start_method("spawn")
    multiprocessing.Process(target=work, args=(settings, folder)).start()
    time.sleep(600)
"""


def eventually(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def members(group: int) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, pgrp = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state not in "ZX":
            found.append(int(folder.name))
    return found


class Fake:
    """A folder with a package sglang, and what was started from it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[subprocess.Popen[bytes]]()

    def start(self, *flags: str, field: str = "cuda_graph_max_bs_decode") -> subprocess.Popen[bytes]:
        package = self.folder / "packages" / "sglang"
        (package / "srt").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "srt" / "server_args.py").write_text(SETTINGS.format(field=field))
        (package / "srt" / "worker.py").write_text(WORKER)
        (package / "launch_server.py").write_text(PROGRAM)
        with (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", str(LAUNCHER), "--model-path", str(self.folder), *flags],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(package.parent), "EYAS_API_KEY": KEY},
                process_group=0,
            )
        self.started.append(process)
        return process

    def ready(self) -> int:
        """The pid of the server's own child."""
        pid = self.folder / "pid"

        def written() -> str | bool:
            assert self.started[-1].poll() is None, self.log
            return pid.is_file() and pid.read_text()

        return int(eventually(written, "the child writes its pid"))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    made = Fake(tmp_path)
    yield made
    for process in made.started:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_the_key_works_and_shows_nowhere(fake: Fake) -> None:
    process = fake.start()
    fake.ready()
    # The server and its children have the key itself …
    assert (fake.folder / "main").read_text() == f'{{"header": "Bearer {KEY}", "key": "{KEY}"}}'
    assert (fake.folder / "child").read_text() == KEY
    # … and print its settings, but not the key; no command line and no inherited environment has it.
    assert fake.log.count("api_key='hidden'") == 2
    assert KEY not in fake.log
    assert KEY not in (fake.folder / "environment").read_text()
    shown = [Path(f"/proc/{pid}/cmdline").read_text() for pid in members(process.pid)]
    assert len(shown) >= 3 and KEY not in "".join(shown)


def test_the_server_does_not_read_the_supervisors_pipe(fake: Fake) -> None:
    fake.start()
    fake.ready()
    assert " stdin  \n" in fake.log or " stdin \n" in fake.log


@pytest.mark.parametrize("field", ["cuda_graph_max_bs", "cuda_graph_max_bs_decode"])
def test_a_flag_goes_by_the_name_that_this_version_has(fake: Fake, field: str) -> None:
    process = fake.start("--cuda-graph-max-bs", "16", "--end", "exit", field=field)
    assert process.wait() == 3
    assert f"{field}=16" in fake.log


@pytest.mark.parametrize("end", ["stdin", "guard", "server"])
def test_all_processes_end_with_the_supervisor_and_with_each_other(fake: Fake, end: str) -> None:
    """As the supervisor sees it: it kills the group of a launcher that has ended, and only then."""
    process = fake.start()
    child = fake.ready()
    assert child in members(process.pid)
    (server,) = [pid for pid in members(process.pid) if pid not in (process.pid, child) and is_server(pid)]
    if end == "stdin":
        assert process.stdin is not None
        process.stdin.close()  # as a supervisor that is killed does
    elif end == "guard":
        process.kill()
        process.wait()
        eventually(lambda: server not in members(process.pid), "the kernel ends the server")
        os.killpg(process.pid, signal.SIGKILL)
    else:
        os.kill(server, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        os.killpg(process.pid, signal.SIGKILL)
    eventually(lambda: not members(process.pid), f"processes remain: {members(process.pid)}")


def is_server(pid: int) -> bool:
    return str(LAUNCHER) in Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.parametrize(("end", "code"), [("exit", 3), ("kill", -signal.SIGKILL)])
def test_the_launcher_ends_as_the_server_did(fake: Fake, end: str, code: int) -> None:
    assert fake.start("--end", end).wait() == code


def test_an_environment_without_sglang_is_named_as_the_cause() -> None:
    argv = [sys.executable, "-I", str(LAUNCHER), "--model-path", "x"]
    env = {**os.environ, "EYAS_API_KEY": KEY}
    with subprocess.Popen(
        argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        log = process.stdout.read()
        assert process.wait() == 1
    assert str(explain(log)).startswith("server.env: SGLang is not installed")
