"""What lies in the folder of a lease, and how it is read and written. Supervisor and clients meet only here.

lock             held while a client decides whether to start a server
supervisor.lock  held by the supervisor as long as it lives: the kernel lets go of it, whatever kills it
endpoint.json    addresses and key of the running server; readable by its owner alone; touched each second
clients/         one heartbeat per client, rewritten each second
shares.lock      held while a client takes its share of the concurrency, or moves a gate
gates.json       how many requests each server lets through now, by address
server.log       output of supervisor and engine, since the last start
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eyas.admission import Gate
from eyas.errors import EyasError
from eyas.server.gpus import Gpu

BEAT = 1.0  # s between heartbeats
STALE = 10.0  # s after which a heartbeat counts as dead


class Process(Struct, frozen=True):
    """One engine process to start; `env` is its whole environment."""

    argv: list[str]
    env: dict[str, str]
    url: str


class Plan(Struct, frozen=True):
    """What a supervisor is to do. Reaches it through stdin, since it holds the API key."""

    processes: list[Process]
    key: str
    settings: str
    idle_timeout: float
    restarts: int


class Endpoint(Struct, frozen=True):
    """A running server. `settings` is a hash of what it was started with; host and pid are the supervisor's."""

    urls: list[str]
    key: str
    settings: str
    host: str
    pid: int


class Heartbeat(Struct, frozen=True):
    """One client. `granted` is what it may have in flight, `outstanding` what it has at each server, `demand` what it could use.

    ready: it has seen the server generate. settings: which server it needs. gpus: of its host, if the server is there.
    time: Unix time in s, for people.
    """

    settings: str
    lane: str | None = None
    ready: bool = False
    outstanding: dict[str, int] = {}
    granted: int = 0
    demand: int = 0
    gpus: list[Gpu] = []
    time: float = 0.0

    @property
    def taken(self) -> int:
        """What others must leave it."""
        return max(sum(self.outstanding.values()), self.granted)


class State:
    """The folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.lock = self.root / "lock"
        self.shares_lock = self.root / "shares.lock"
        self.gates = self.root / "gates.json"
        self.supervisor_lock = self.root / "supervisor.lock"
        self.endpoint = self.root / "endpoint.json"
        self.clients = self.root / "clients"
        self.log = self.root / "server.log"

    def read_endpoint(self) -> Endpoint | None:
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            return msgspec.json.decode(self.endpoint.read_bytes(), type=Endpoint)
        return None

    def read_gates(self) -> dict[str, Gate]:
        """The gates by address; none before the first is moved."""
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            return msgspec.json.decode(self.gates.read_bytes(), type=dict[str, Gate])
        return {}

    def supervised(self) -> bool:
        """Whether a supervisor lives."""
        try:
            descriptor = os.open(self.supervisor_lock, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            # Shared, so that two clients that look at the same moment do not take each other for a supervisor.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def alive(self, endpoint: Endpoint) -> bool:
        """Whether the supervisor of `endpoint` lives; locks are not trusted across hosts."""
        if endpoint.host == socket.gethostname():
            return self.supervised()
        return _fresh(self.endpoint)

    def heartbeat_path(self) -> Path:
        """A new heartbeat's place; the name says whose it is."""
        return self.clients / f"{socket.gethostname()}.{os.getpid()}.{os.urandom(4).hex()}.json"

    def live_clients(self) -> dict[str, Heartbeat]:
        """Heartbeats by file name; those of the dead are removed (a sleeper that wakes writes its own again)."""
        live: dict[str, Heartbeat] = {}
        for path in sorted(self.clients.glob("*.json")):
            if _fresh(path) and _may_run(path.name):
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    live[path.name] = msgspec.json.decode(path.read_bytes(), type=Heartbeat)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
        return live


def _fresh(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < STALE
    except OSError:
        return False


def _may_run(name: str) -> bool:
    """Whether the client named in a heartbeat's file name may still run; only this host's can be asked."""
    host, pid, _ = name.removesuffix(".json").rsplit(".", 2)
    if host != socket.gethostname():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_private(path: Path, value: Any) -> None:
    """Replaces `path` in one step; only the owner may read it, from the first byte on."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(value))
    temporary.replace(path)


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds an exclusive lock on `path`; calls `waiting` once if somebody else has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise EyasError(
                f"server.state: {path} cannot be locked ({error}); put server.state on a file system with locks"
            ) from error
        yield
    finally:
        os.close(descriptor)
