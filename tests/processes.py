"""What runs on this machine, and what a started server's folder says of it."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def eventually(condition: Callable[[], Any], what: str, timeout: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.05)
    return found


def processes() -> dict[int, tuple[int, int]]:
    """Parent and group of each process that runs."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if state not in "ZX":
            found[int(folder.name)] = (int(parent), int(group))
    return found


def members(group: int) -> list[int]:
    return [pid for pid, (_, its) in processes().items() if its == group]


def launcher(supervisor: int) -> int:
    """The one process that a supervisor has started, which leads the group of all others."""
    (pid,) = [pid for pid, (parent, _) in processes().items() if parent == supervisor]
    return pid


def endpoint(state: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((state / "endpoint.json").read_bytes())
    return read


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def steady_port() -> int:
    """A free port that no outgoing connection is given, so that it stays free while a server is away."""
    return next(filter(is_free, random.sample(range(20_000, 32_000), 100)))


def read_quietly(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def command_lines_with(secret: bytes) -> list[str]:
    """The command lines that show `secret` to everybody on the machine."""
    lines = (read_quietly(path) for path in Path("/proc").glob("[0-9]*/cmdline"))
    return [line.replace(b"\0", b" ").decode(errors="replace") for line in lines if secret in line]


def files_with(secret: bytes, folder: Path) -> list[Path]:
    """The files under `folder` that hold `secret`; some may come and go meanwhile."""
    files = (Path(at, name) for at, _, names in os.walk(folder) for name in names)
    return [path for path in files if path.is_file() and secret in read_quietly(path)]
