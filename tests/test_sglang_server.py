"""A real SGLang on CPUs under a real lease: nobody sees its key, it comes back when it breaks, and nothing is left of it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import real_sglang
import requests
from processes import (
    command_lines_with,
    endpoint,
    eventually,
    files_with,
    launcher,
    members,
    processes,
    read_quietly,
)

from eyas import config
from eyas.config import AccessSettings, ServerConfig
from eyas.engines import sglang_options
from eyas.errors import EyasError
from eyas.plugins import Engine, registry
from eyas.server.lease import Lease, hold

pytestmark = pytest.mark.sglang
LOG = logging.getLogger("test")


def access_to(folder: Path, **section: Any) -> AccessSettings:
    server = ServerConfig(
        engine=real_sglang.engine_section(**section),
        env=real_sglang.python(),
        state=str(folder / "state"),
        idle_timeout=1.0,
        restarts=1,
    )
    return AccessSettings(model=real_sglang.model(), server=server, plugins=[])


def engine_of(access: AccessSettings) -> Engine:
    section = dict(access.server.engine)
    made = registry().create("engine", section.pop("name"), section, "server.engine", access.model)
    assert isinstance(made, Engine)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sglang")
    (made / "tmp").mkdir()
    return made


@pytest.fixture(scope="module")
def lease(folder: Path) -> Iterator[Lease]:
    """A server of its own, whose temporary files lie in `folder` too."""
    env = {**real_sglang.ON_CPUS["env"], "TMPDIR": str(folder / "tmp")}
    access = access_to(folder, env=env)
    with hold(access, engine_of(access), LOG) as held:
        yield held


def generate(lease: Lease, key: str | None) -> requests.Response:
    body = {"input_ids": [20, 21], "sampling_params": {"max_new_tokens": 3}}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return requests.post(f"{lease.urls[0]}/generate", json=body, headers=headers, timeout=60)


def test_only_the_key_opens_the_server(lease: Lease) -> None:
    assert generate(lease, lease.key).status_code == 200
    assert generate(lease, None).status_code == 401
    assert generate(lease, "hidden").status_code == 401


def test_the_key_is_in_the_lease_file_and_nowhere_else(lease: Lease, folder: Path) -> None:
    assert lease.key is not None
    secret = lease.key.encode()
    # Each of these makes SGLang say much about itself.
    for path in ("/server_info", "/model_info", "/v1/loads?include=all", "/no-such-page"):
        requests.get(lease.urls[0] + path, headers={"Authorization": f"Bearer {lease.key}"}, timeout=60)
    path = folder / "state" / "endpoint.json"
    assert secret in path.read_bytes() and path.stat().st_mode & 0o777 == 0o600
    group = launcher(endpoint(folder / "state")["pid"])
    assert len(members(group)) >= 4
    assert files_with(secret, folder) == [path]
    assert command_lines_with(secret) == []
    assert b"api_key" in (folder / "state" / "server.log").read_bytes()
    assert lease.key not in json.dumps(lease.server(lease.urls[0]).manifest)


def test_a_scheduler_that_is_killed_costs_a_restart_and_no_more(lease: Lease, folder: Path) -> None:
    supervisor = endpoint(folder / "state")["pid"]
    before = launcher(supervisor)
    (scheduler,) = [
        pid for pid in members(before) if b"scheduler" in read_quietly(Path(f"/proc/{pid}/cmdline"))
    ]
    os.kill(scheduler, signal.SIGKILL)
    eventually(lambda: not members(before), "the broken server ends whole")
    eventually(lease.healthy, "it generates again", 240)
    after = launcher(supervisor)
    assert after != before and members(after)
    assert generate(lease, lease.key).status_code == 200


def test_a_launcher_that_is_killed_takes_the_server_with_it(lease: Lease, folder: Path) -> None:
    """And since no restart is left, whoever holds the lease is told why."""
    supervisor = endpoint(folder / "state")["pid"]
    group = launcher(supervisor)
    os.kill(group, signal.SIGKILL)
    eventually(lambda: not members(group), "nothing is left")
    eventually(lambda: supervisor not in processes(), "the supervisor ends")
    with pytest.raises(EyasError, match=r"^server\.engine: something killed the server"):
        lease.check()
    assert not (folder / "state" / "endpoint.json").exists()


@pytest.mark.fault
def test_a_supervisor_that_is_killed_while_the_model_loads_leaves_nothing(tmp_path: Path) -> None:
    """SGLang's own processes do not notice until they have loaded; until then the launcher has to."""
    access = access_to(tmp_path)
    program = (
        "import logging, sys, msgspec\n"
        "from eyas.config import AccessSettings\n"
        "from eyas.plugins import registry\n"
        "from eyas.server.lease import hold\n"
        "access = msgspec.json.decode(sys.argv[1], type=AccessSettings)\n"
        "section = dict(access.server.engine)\n"
        "engine = registry().create('engine', section.pop('name'), section, 'server.engine', access.model)\n"
        "with hold(access, engine, logging.getLogger()):\n"
        "    pass\n"
    )
    state = tmp_path / "state"
    holder = subprocess.Popen([sys.executable, "-c", program, config.canonical(access)])
    try:
        eventually((state / "endpoint.json").exists, "the supervisor is there")
        supervisor = endpoint(state)["pid"]
        group = eventually(lambda: [p for p, (up, _) in processes().items() if up == supervisor], "launcher")[
            0
        ]
        # Launcher, server, and the first that the server has spawned, which has imported nothing yet.
        eventually(lambda: len(members(group)) > 2, "the server spawns its own processes", 120)
        os.kill(supervisor, signal.SIGKILL)
        eventually(lambda: not members(group), "nothing is left", 20)
    finally:
        holder.kill()
        holder.wait()


def test_every_flag_that_eyas_knows_is_one_of_sglangs() -> None:
    """In the pinned version; else a conflict would go unnoticed, or a start would fail."""
    program = (
        "import argparse, json\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser()\n"
        "ServerArgs.add_cli_args(parser)\n"
        "print(json.dumps(sorted(parser._option_string_actions)))\n"
    )
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    output = subprocess.run(
        [real_sglang.python(), "-I", "-c", program], env=env, capture_output=True, check=True
    ).stdout
    known = set(msgspec.json.decode(output.splitlines()[-1], type=list[str]))
    ours = {*sglang_options.OWNED, *sglang_options._REFUSED, *sglang_options._CHANGE_ANSWERS}
    # The launcher passes this one under its newer name.
    assert ours - known == {"--cuda-graph-max-bs"}
    shadowed = {
        flag
        for flag in known - set(ours)
        if sglang_options._refusal(flag) is not None and flag not in ("--model", "--tp", "--help")
    }
    assert shadowed == set()
