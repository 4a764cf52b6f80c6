"""The lease: a server is there while somebody holds one, and its concurrency is shared among the holders.

With `server.url` the servers are somebody else's: they are inspected and shared, never started or stopped, and one that
generates is enough to begin with. Otherwise the
first holder on this host starts it under a lock, and its supervisor stops it when nobody has held it for
`server.idle_timeout`. Holders live in separate processes and meet in the folder described in eyas.server.state.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

import eyas
from eyas.capacity import together
from eyas.config import AccessSettings, fingerprint
from eyas.errors import EyasError
from eyas.plugins import Engine, Pool, Retry
from eyas.server.shares import Client, Shares, all_lanes
from eyas.server.state import Endpoint, Plan, Process, State, locked

POLL = 0.25  # s between two looks at a server that loads
LOOK_INTERVAL = 0.5  # s for which a look at a server's model is good: none is replaced in less
STRAGGLERS = 5.0  # s in which a look under way may still end once enough of the others generate
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
STOP_WAIT = 30.0  # s for a supervisor that is on its way out
LOG_TAIL = 65536  # bytes of server.log in which a cause of failure is looked for

_log = logging.getLogger(__name__)


class Server(NamedTuple):
    """Who answers: a manifest, and its hash."""

    id: str
    manifest: dict[str, Any]


class Ready(NamedTuple):
    """By address: the manifests of those that generate, and why the others do not."""

    manifests: dict[str, dict[str, Any]]
    causes: dict[str, str]


class Lease:
    """A server that has really generated, and this client's part of it.

    shares: how much of it may be used. urls, key: where and how to ask; the first of them has generated. manifests: by
    address, what each was when it last generated, without secrets; an address that has not yet generated is not in it.
    absent: why those had not at the start.
    endpoint: the file in which the other holders find a started server, None with `server.url`. events: what happened to
    the servers since, as Unix time in s and a few words; eyas.fleet adds what it sees.
    """

    def __init__(
        self,
        shares: Shares,
        engine: Engine,
        urls: list[str],
        key: str | None,
        ready: Ready,
        check: Callable[[], None],
        endpoint: Path | None,
    ) -> None:
        self.manifests, self.absent = ready.manifests, ready.causes
        self.urls = sorted(urls, key=lambda url: url not in self.manifests)
        self.key, self.endpoint = key, endpoint
        self.shares, self._engine, self._check = shares, engine, check
        self.events: list[tuple[float, str]] = []
        self._looked_at: dict[str, float] = {}
        self._servers: dict[str, Server] = {}
        self._found = threading.Lock()  # several addresses may be looked at at a time

    def server(self, url: str) -> Server:
        """Who answers at `url`, as of its last look."""
        servers = self._servers
        if url not in servers:
            servers[url] = _server(self._engine, self.manifests, url)
        return servers[url]

    def capacity(self) -> Pool | None:
        """What all that have generated hold together; None if one does not tell."""
        return _capacity(self._engine, list(self.manifests.values()))

    def healthy(self, url: str | None = None) -> bool:
        """Whether `url`, or else some process of the server, really generates. Takes a second or more.

        Raises EyasError when the server has ended for good, or holds another model than before.
        """
        for asked in self.urls if url is None else [url]:
            try:
                self._look(asked)
            except Retry:
                continue
            return True
        self.check()
        return False

    def recognise(self, url: str) -> None:
        """Raises EyasError if `url` holds another model than before, Retry while it is away.

        Generates only where a server with other settings has taken the place of the one before.
        """
        now = time.monotonic()
        if now - self._looked_at.get(url, float("-inf")) < LOOK_INTERVAL:
            return
        told = self._engine.identify(url, self.key)
        if told is not None:
            self._compare(url, told)
            if _changes(self.manifests[url], told):
                self._look(url)
        self._looked_at[url] = now

    def _look(self, url: str) -> None:
        """Keeps the manifest of `url`. Settings do not choose tokens, so others are no error, but nobody should have to guess."""
        manifest = self._engine.inspect(url, self.key)
        self._compare(url, manifest)
        known = self.manifests.get(url)
        if manifest == known:
            return
        if known is None:
            _log.info("%s generates too, and is asked from now on", url)
            self.events.append((time.time(), f"{url} is asked too"))
        else:
            came = f"{url} came back with other settings ({', '.join(_changes(known, manifest))})"
            _log.warning("%s; answers from now on are kept under its new manifest", came)
            self.events.append((time.time(), came))
        with self._found:
            self.manifests = {**self.manifests, url: manifest}
            self._servers = {}

    def _compare(self, url: str, told: dict[str, Any]) -> None:
        known = self.manifests.get(url)
        if known is None:
            _check_alike(self._engine, {url: told, self.urls[0]: self.manifests[self.urls[0]]})
            return
        for name in self._engine.model_fields:
            if told.get(name) != known.get(name):
                raise EyasError(
                    f"server.url: {url} came back with another model ({name} {told.get(name)}, it was {known.get(name)}); "
                    f"serve the same model again, or give this one a config of its own"
                )

    def check(self) -> None:
        """Raises EyasError if a started server has ended for good."""
        self._check()


def _changes(was: dict[str, Any], told: dict[str, Any]) -> list[str]:
    """What is told otherwise than it was."""
    return [f"{name} {was.get(name)} → {told[name]}" for name in sorted(told) if told[name] != was.get(name)]


def _server(engine: Engine, manifests: dict[str, dict[str, Any]], url: str) -> Server:
    """The manifest of `url` with how many of the addresses have the same, and what these hold: they answer as one."""
    equal = [manifest for manifest in manifests.values() if manifest == manifests[url]]
    whole: dict[str, Any] = {**manifests[url], "processes": len(equal)}
    if (pool := _capacity(engine, equal)) is not None:
        whole["capacity"] = msgspec.to_builtins(pool)
    return Server(fingerprint(whole), whole)


def _capacity(engine: Engine, manifests: list[dict[str, Any]]) -> Pool | None:
    pools = [pool for manifest in manifests if (pool := engine.capacity(manifest)) is not None]
    return together(pools) if len(pools) == len(manifests) else None


@contextlib.contextmanager
def hold(
    access: AccessSettings, engine: Engine, log: logging.Logger, *, serving: bool = False
) -> Iterator[Lease]:
    """A lease on the server of `access`, which is started if need be.

    serving: this is `serve`, which may start a server in any cluster job. Raises EyasError with the cause when there
    is no server to be had.
    """
    server = access.server
    if server.url is None:
        with _Started(access, engine, log).hold(serving) as lease:
            yield lease
        return
    listed = [server.url] if isinstance(server.url, str) else server.url
    urls = list(dict.fromkeys(url.rstrip("/") for url in listed))
    state = State(Path(server.state) / fingerprint(sorted(urls)))
    key = _key_from_environment(server.api_key_env)
    with Client(state, settings="", lane=access.lane) as client:

        def late(causes: str) -> EyasError:
            return EyasError(
                f"server.url: nothing generated within {server.start_timeout:g} s at {causes}; start a server or correct the address"
            )

        ready = _wait_until_ready(engine, urls, key, 1, server.start_timeout, log, late, lambda: None)
        client.update(ready=True)
        client.beside_server = any(urlsplit(url).hostname in LOOPBACK for url in urls)
        yield Lease(Shares(client, server), engine, urls, key, ready, lambda: None, None)


def _key_from_environment(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise EyasError(
            f"server.api_key_env: the environment variable {variable} is not set; export the server's API key"
        )
    if not (key.isascii() and key.isprintable()) or " " in key:  # it goes into a header as it is
        raise EyasError(
            f"server.api_key_env: the environment variable {variable} holds a line break, a space or a letter that no API key has; export the key alone"
        )
    return key


def _wait_until_ready(
    engine: Engine,
    urls: list[str],
    key: str | None,
    needed: int,
    timeout: float,
    log: logging.Logger,
    late: Callable[[str], EyasError],
    check: Callable[[], None],
) -> Ready:
    """What is at `urls` once `needed` of them generate. `check` raises if that will never be.

    Each is looked at in a thread of its own, since one that hangs must not hide the others.
    """
    manifests: dict[str, dict[str, Any]] = {}
    causes: dict[str, str] = {}
    heard: queue.SimpleQueue[tuple[str, dict[str, Any] | Exception]] = queue.SimpleQueue()
    enough = threading.Event()

    def look(url: str) -> None:
        while not enough.is_set():
            try:
                told: dict[str, Any] | Exception = engine.inspect(url, key)
            except Exception as error:  # noqa: BLE001 (it is raised where it is heard)
                told = error
            heard.put((url, told))
            if not isinstance(told, Retry):
                return
            enough.wait(POLL)

    for url in urls:
        threading.Thread(target=look, args=(url,), daemon=True).start()
    deadline = time.monotonic() + timeout
    waits = False
    try:
        while True:
            with contextlib.suppress(queue.Empty):
                url, told = heard.get(timeout=POLL)
                if isinstance(told, Retry):
                    causes[url] = str(told)
                elif isinstance(told, Exception):
                    raise told
                else:
                    causes.pop(url, None)
                    manifests[url] = told
                    _check_alike(engine, manifests)
            if len(manifests) >= needed:
                deadline = min(deadline, time.monotonic() + STRAGGLERS)
                if len(manifests) + len(causes) == len(urls) or time.monotonic() >= deadline:
                    return Ready(manifests, causes)
                continue
            check()
            if time.monotonic() >= deadline:
                raise late(", ".join(f"{url} ({causes.get(url, 'no reply yet')})" for url in urls))
            if causes and not waits:
                log.info("waiting up to %g s for %s to generate", timeout, ", ".join(urls))
                waits = True
    finally:
        enough.set()


def _check_alike(engine: Engine, manifests: dict[str, dict[str, Any]]) -> None:
    """Raises EyasError unless all hold one model."""
    first, *others = sorted(manifests)
    for name in engine.model_fields:
        for url in others:
            if (here := manifests[url].get(name)) != (there := manifests[first].get(name)):
                raise EyasError(
                    f"server.url: {first} and {url} hold different models ({name} {there} and {here}); list servers of one model"
                )


def _in_job_without_gpus() -> bool:
    """Whether this is a Slurm job without GPUs (Slurm names none, or the device NoDevFiles)."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("SLURM_JOB_GPUS")
    return "SLURM_JOB_ID" in os.environ and gpus in (None, "", "NoDevFiles")


def _environment() -> dict[str, str]:
    """This process's, without the thread counts of a Snakemake job with `threads: 0`: OpenMP refuses them."""
    return {
        name: value
        for name, value in os.environ.items()
        if not (name.endswith("_NUM_THREADS") and value == "0")
    }


class _Started:
    """A server that holders start themselves."""

    def __init__(self, access: AccessSettings, engine: Engine, log: logging.Logger) -> None:
        self.access, self.server, self.engine, self.log = access, access.server, engine, log
        self.state = State(Path(self.server.state))
        model = access.model
        # What a running server must have been started with to be of use. Templates and reasoning are the client's.
        self.settings = fingerprint(
            [
                *(model.id, model.revision, model.sha256, model.quantisation),
                *(model.weight_dtype, model.kv_dtype, model.context),
                *(engine.name, msgspec.to_builtins(engine.options), self.server.env),
            ]
        )

    @contextlib.contextmanager
    def hold(self, serving: bool) -> Iterator[Lease]:
        with Client(self.state, self.settings, self.access.lane) as client:
            if not serving and _in_job_without_gpus():
                endpoint = self._await_serve()
            else:
                endpoint = self._find_or_start(client)
            self._check_reachable(endpoint)

            def check() -> None:
                if not self.state.alive(endpoint):
                    raise EyasError(self._why_ended())

            ready = _wait_until_ready(
                self.engine,
                endpoint.urls,
                endpoint.key,
                len(endpoint.urls),
                self.server.start_timeout,
                self.log,
                self._late,
                check,
            )
            client.update(ready=True)
            client.beside_server = endpoint.host == socket.gethostname()
            yield Lease(
                Shares(client, self.server),
                self.engine,
                endpoint.urls,
                endpoint.key,
                ready,
                check,
                self.state.endpoint,
            )

    def _late(self, causes: str) -> EyasError:
        return EyasError(
            f"server.start_timeout: the server did not generate within {self.server.start_timeout:g} s: {causes}; raise it, or see {self.state.log}"
        )

    def _why_ended(self) -> str:
        """One sentence from the server's log."""
        try:
            text = self.state.log.read_bytes()[-LOG_TAIL:].decode(errors="replace")
        except OSError:
            text = ""
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("[eyas]")]
        cause = (
            self.engine.explain(text)
            or f"server.engine: the server ended; its last words: {lines[-1] if lines else 'none'}"
        )
        return f"{cause}; its whole log is {self.state.log}"

    # --- finding and starting ------------------------------------------------------------------------------------

    def _find_or_start(self, client: Client) -> Endpoint:
        def waiting() -> None:
            self.log.info("another job is about to start the server; waiting for it (%s)", self.state.lock)

        with locked(self.state.lock, waiting):
            endpoint = self._find()
            if endpoint is not None and endpoint.settings != self.settings:
                self._replace(endpoint, client)
                endpoint = None
            return endpoint or self._start()

    def _find(self) -> Endpoint | None:
        """The running server, if there is one; waits while one is stopping."""
        deadline = time.monotonic() + STOP_WAIT
        while time.monotonic() < deadline:
            endpoint = self.state.read_endpoint()
            if endpoint is not None and self.state.alive(endpoint):
                return endpoint
            if not self.state.supervised():
                self.state.endpoint.unlink(missing_ok=True)
                return None
            time.sleep(POLL)
        raise EyasError(
            f"server.state: a supervisor of {self.state.root} does not end; kill it (pgrep -f eyas.server.supervisor) and run again"
        )

    def _replace(self, endpoint: Endpoint, client: Client) -> None:
        """Stops a server that was started with other settings, if nobody needs it."""
        needed = any(other.settings != self.settings for other in client.others().values())
        if needed or endpoint.host != socket.gethostname():
            raise EyasError(
                f"server.state: the server of {self.state.root} was started with other settings by {endpoint.host} and is in use; wait for it to stop, or give this run a server.state of its own"
            )
        self.log.info("the running server was started with other settings; stopping it")
        os.kill(endpoint.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_WAIT
        while self.state.supervised():
            if time.monotonic() > deadline:
                raise EyasError(
                    f"server.state: the supervisor {endpoint.pid} does not end; kill it and run again"
                )
            time.sleep(POLL)

    def _start(self) -> Endpoint:
        python = self._python()
        launches = self.engine.launch(python)
        for warning in self.engine.warnings(all_lanes(self.server)):
            self.log.warning("%s", warning)
        key = secrets.token_urlsafe(32)
        plan = Plan(
            processes=[
                Process(launch.argv, {**_environment(), **launch.env, "EYAS_API_KEY": key}, launch.url)
                for launch in launches
            ],
            key=key,
            settings=self.settings,
            idle_timeout=self.server.idle_timeout,
            restarts=self.server.restarts,
        )
        self.log.info(
            "starting the server at %s; its log is %s", ", ".join(x.url for x in launches), self.state.log
        )
        # Only the supervisor may import eyas from here: the engine's environment is its own.
        package_parent = str(Path(eyas.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
        self.state.log.unlink(missing_ok=True)
        descriptor = os.open(self.state.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab") as output:
            supervisor = subprocess.run(
                [sys.executable, "-P", "-m", "eyas.server.supervisor", str(self.state.root)],
                input=msgspec.json.encode(plan),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
                check=False,
            )
        endpoint = self.state.read_endpoint()
        if supervisor.returncode != 0 or endpoint is None:
            raise EyasError(self._why_ended())
        return endpoint

    def _python(self) -> str:
        wanted = self.server.env
        if wanted is None:
            return sys.executable
        found = shutil.which(wanted)
        if found is None:
            raise EyasError(
                f"server.env: {wanted} is no interpreter; create that environment or correct the path"
            )
        return str(Path(found).absolute())

    # --- across hosts --------------------------------------------------------------------------------------------

    def _await_serve(self) -> Endpoint:
        """The server of `snakemake serve --cores 1`, which another job holds."""
        timeout = self.server.start_timeout
        self.log.info(
            "this cluster job holds no GPU, so it starts no server; waiting up to %g s for `snakemake serve --cores 1` (%s)",
            timeout,
            self.state.endpoint,
        )
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            endpoint = self.state.read_endpoint()
            if endpoint is not None and self.state.alive(endpoint):
                if endpoint.settings != self.settings:
                    raise EyasError(
                        "server: `snakemake serve --cores 1` runs with other settings than this job; stop it and start it again"
                    )
                return endpoint
            time.sleep(POLL)
        raise EyasError(
            f"server: no server after {timeout:g} s, and this cluster job holds no GPU to start one; run `snakemake serve --cores 1` as a GPU job, or set server.url"
        )

    def _check_reachable(self, endpoint: Endpoint) -> None:
        names = {urlsplit(url).hostname for url in endpoint.urls}
        if endpoint.host != socket.gethostname() and names & LOOPBACK:
            raise EyasError(
                f"server.engine.host: the server on {endpoint.host} listens to its own host only; let it listen on 0.0.0.0, or give this run a server.state of its own"
            )
