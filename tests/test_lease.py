"""The lease and the supervisor: one server for many, and none that nobody uses, whatever dies."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_model import KEY, MODEL, engine, model_file, running

import eyas.server.lease
from eyas.admission import Gate
from eyas.config import AccessSettings, LaneConfig, ServerConfig
from eyas.engines.llamacpp import LlamaCpp, ServerOptions
from eyas.errors import EyasError
from eyas.plugins import Engine, Launch, Pool, Retry
from eyas.server.lease import Lease, hold
from eyas.server.shares import Client, Shares, fair_share
from eyas.server.state import STALE, Endpoint, Heartbeat, State, write_private

LOG = logging.getLogger("test")
URL = "http://127.0.0.1:9"
IDLE = 1.0  # s
GONE = (
    6.0  # s in which a server that is not wanted must have gone: idle_timeout, the poll, the engine's own end
)


def access(state: Path, model_path: str | None = None, **server: Any) -> AccessSettings:
    options = {"name": "llamacpp", "model_file": model_path or str(model_file()), "slots": 2}
    fields = {"engine": options, "state": str(state), "idle_timeout": IDLE, "start_timeout": 300.0, **server}
    return AccessSettings(
        model=msgspec.structs.replace(MODEL, sha256=None), server=ServerConfig(**fields), plugins=[]
    )


def engine_of(settings: AccessSettings) -> LlamaCpp:
    options = {key: value for key, value in settings.server.engine.items() if key != "name"}
    return LlamaCpp(ServerOptions(**options), settings.model)


def eventually(condition: Callable[[], bool], what: str, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.05)


def command_lines() -> dict[int, str]:
    lines = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                lines[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return lines


def engines(model_path: Path) -> list[int]:
    """Processes that serve `model_path`, which each test names for itself."""
    return [
        pid
        for pid, line in command_lines().items()
        if "llamacpp_launcher" in line and str(model_path) in line
    ]


def supervisors(state: Path) -> list[int]:
    return [
        pid
        for pid, line in command_lines().items()
        if "eyas.server.supervisor" in line and str(state) in line
    ]


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """The model under a name of this test's own, so that its engine processes can be told from all others."""
    path = tmp_path / "own.gguf"
    path.symlink_to(model_file().absolute())
    return path


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state folder; whatever a test leaves there is stopped."""
    path = tmp_path / "state"
    yield path
    for pid in supervisors(path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    eventually(lambda: not supervisors(path) and not engines(tmp_path), "the test's server stops")


HOLDER = """
import logging, sys, time
import msgspec
from eyas.config import AccessSettings
from eyas.engines.llamacpp import LlamaCpp, ServerOptions
from eyas.server.lease import hold
logging.basicConfig(level=logging.INFO, format="%(message)s")
access = msgspec.json.decode(sys.argv[1], type=AccessSettings)
options = {k: v for k, v in access.server.engine.items() if k != "name"}
with hold(access, LlamaCpp(ServerOptions(**options), access.model), logging.getLogger()) as lease:
    print("held", *lease.urls, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def holder(settings: AccessSettings) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lease until its stdin ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, msgspec.json.encode(settings).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def urls_of(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        assert process.stderr is not None
        pytest.fail(process.stderr.read())
    return line.split()[1:]


# --- sharing -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.lists(st.integers(0, 300), min_size=1, max_size=12))
def test_shares_waste_nothing_and_exceed_nothing(ceiling: int, demands: list[int]) -> None:
    shares = fair_share(ceiling, demands)
    assert sum(shares) == min(ceiling, sum(demands))
    assert all(0 <= share <= demand for share, demand in zip(shares, demands, strict=True))
    hungry = [share for share, demand in zip(shares, demands, strict=True) if share < demand]
    if hungry:
        assert max(shares) - min(hungry) <= 1
    assert shares == fair_share(ceiling, demands)


class Silent(Engine):
    """An engine whose servers are always fine; for tests that are about clients only."""

    name = "silent"

    def launch(self, python: str) -> list[Launch]:
        raise AssertionError("nothing may be started here")

    def explain(self, log: str) -> str | None:
        return None

    def inspect(self, url: str, key: str | None) -> dict[str, Any]:
        return {"engine": self.name}

    def tokenizer(self, url: str, key: str | None) -> Any:
        raise NotImplementedError

    async def generate(self, session: Any, url: str, request: Any) -> Any:
        raise NotImplementedError


class Sized(Silent):
    """Its servers differ in size, by address. Those of size 0 are away."""

    model_fields = ("size",)

    def __init__(self, **sizes: int) -> None:
        super().__init__({}, MODEL)
        self.sizes = {f"http://{name}": size for name, size in sizes.items()}
        self.looks = 0
        self.settings: dict[str, Any] = {}  # of all of them

    def inspect(self, url: str, key: str | None) -> dict[str, Any]:
        if not self.sizes[url]:
            raise Retry(f"nobody at {url[-1]}")
        return {"engine": self.name, "size": self.sizes[url], **self.settings}

    def identify(self, url: str, key: str | None) -> dict[str, Any] | None:
        self.looks += 1
        told = {name: value for name, value in self.settings.items() if name != "accelerator"}
        return {"size": size, **told} if (size := self.sizes[url]) else None

    def capacity(self, manifest: Mapping[str, Any]) -> Pool | None:
        return Pool(tokens=1000 * manifest["tp_size"]) if "tp_size" in manifest else None


class Doomed(Silent):
    """Its server ends at once, and its settings were questionable."""

    def launch(self, python: str) -> list[Launch]:
        return [Launch(argv=[python, "-c", "pass"], env={}, url=URL)]

    def inspect(self, url: str, key: str | None) -> dict[str, Any]:
        raise Retry("connection")

    def warnings(self, in_flight: int) -> list[str]:
        return [f"model.kv_dtype: rounds {in_flight}", "server.engine.x: slow"]


LARGE = """
import os, pathlib, signal, sys, time
if os.fork():
    time.sleep(600)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = bytearray(400_000_000)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""


class Large(Silent):
    """Its server is a process that ends at once and one that does so only when killed, and then takes a moment."""

    def __init__(self, pid: Path) -> None:
        super().__init__({}, MODEL)
        self.pid = pid

    def launch(self, python: str) -> list[Launch]:
        return [Launch(argv=[python, "-c", LARGE, str(self.pid)], env={}, url=URL)]

    def inspect(self, url: str, key: str | None) -> dict[str, Any]:
        if not self.pid.exists():
            raise Retry("connection")
        return super().inspect(url, key)


@contextlib.contextmanager
def client(state: Path, ceiling: int = 8) -> Iterator[Lease]:
    settings = access(state, "none", url=URL, concurrency=ceiling)
    with hold(settings, Silent({}, MODEL), LOG) as lease:
        yield lease


def pause() -> None:
    time.sleep(0.21)


def test_one_client_alone_gets_what_it_can_use(tmp_path: Path) -> None:
    with client(tmp_path) as lease:
        assert lease.shares.share({URL: 0}, 3) == 3
        pause()
        assert lease.shares.share({URL: 3}, 100) == 8


def test_a_client_that_joins_waits_until_the_others_have_drained(tmp_path: Path) -> None:
    with client(tmp_path) as first, client(tmp_path) as second:
        assert first.shares.share({URL: 0}, 100) == 8
        assert second.shares.share({URL: 0}, 100) == 0
        pause()
        assert first.shares.share({URL: 8}, 100) == 4
        pause()
        assert second.shares.share({URL: 0}, 100) == 0
        pause()
        assert first.shares.share({URL: 6}, 100) == 4
        pause()
        assert second.shares.share({URL: 0}, 100) == 2
        pause()
        assert first.shares.share({URL: 4}, 100) == 4
        assert second.shares.share({URL: 2}, 100) == 4


def test_idle_share_is_lent_and_a_client_that_leaves_gives_all_back(tmp_path: Path) -> None:
    with client(tmp_path) as first:
        with client(tmp_path) as second:
            assert second.shares.share({URL: 0}, 1) == 1
            assert first.shares.share({URL: 0}, 100) == 7
        pause()
        assert first.shares.share({URL: 7}, 100) == 8


def test_two_clients_that_start_at_once_never_exceed_the_ceiling(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        leases = [stack.enter_context(client(tmp_path)) for _ in range(6)]
        granted: list[int] = []
        threads = [
            threading.Thread(target=lambda lease=lease: granted.append(lease.shares.share({URL: 0}, 100)))
            for lease in leases
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(granted) <= 8


def test_the_dead_keep_no_share(tmp_path: Path) -> None:
    with client(tmp_path) as lease:
        folder = next(tmp_path.glob("*/clients"))
        beat = Heartbeat(settings="", outstanding={URL: 5}, granted=5, demand=5)
        gone = subprocess.run(
            [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
        )
        dead = folder / f"{socket.gethostname()}.{int(gone.stdout)}.aa.json"
        stale = folder / "elsewhere.1.bb.json"
        fresh = folder / "elsewhere.2.cc.json"
        for path in (dead, stale, fresh):
            write_private(path, beat)
        old = time.time() - STALE - 1
        os.utime(stale, (old, old))
        assert lease.shares.share({URL: 0}, 100) == 3
        assert [path.name for path in sorted(folder.glob("elsewhere*"))] == [fresh.name]
        assert not dead.exists()


def test_of_more_clients_than_requests_each_has_its_turn() -> None:
    served = [sum(fair_share(3, [10, 50, 7, 100, 10], turn)[i] for turn in range(5)) for i in range(5)]
    assert served == [3] * 5
    assert all(sum(fair_share(3, [10, 50, 7, 100, 10], turn)) == 3 for turn in range(5))


def in_lanes(state: State, lane: str | None) -> contextlib.AbstractContextManager[Shares]:
    """A client of a server with room for 6 long requests and 20 others."""

    @contextlib.contextmanager
    def opened() -> Iterator[Shares]:
        server = ServerConfig(engine={"name": "x"}, concurrency=20, lanes={"long": LaneConfig(concurrency=6)})
        with Client(state, "", lane) as client:
            yield Shares(client, server)

    return opened()


def test_a_lane_has_a_ceiling_of_its_own(tmp_path: Path) -> None:
    state = State(tmp_path)
    with in_lanes(state, "long") as long, in_lanes(state, "long") as longer, in_lanes(state, None) as short:
        long.move(URL, lambda gate, *_: msgspec.structs.replace(gate, limit=1000, looked=time.time()))
        assert long.share({URL: 0}, 100) == 6
        assert longer.share({URL: 0}, 100) == 0
        pause()
        assert long.share({URL: 6}, 100) == 3
        assert short.share({URL: 0}, 100) == 20


def test_lanes_share_what_the_servers_gate_lets_through(tmp_path: Path) -> None:
    state = State(tmp_path)
    with in_lanes(state, "long") as long, in_lanes(state, None) as short:
        long.move(URL, lambda gate, *_: msgspec.structs.replace(gate, limit=10, looked=time.time()))
        assert long.share({URL: 0}, 100) == 6
        assert short.share({URL: 0}, 100) == 4
        pause()
        assert long.share({URL: 6}, 100) == 5
        # Two servers let through twice as much; one in doubt lets through nothing.
        other = URL + "1"
        long.move(other, lambda gate, *_: msgspec.structs.replace(gate, limit=10, looked=time.time()))
        pause()
        assert short.share({URL: 4, other: 0}, 100) == 14
        pause()
        assert short.share({}, 100) == 0


def test_a_gate_is_everybodys_and_sees_what_all_have_in_flight(tmp_path: Path) -> None:
    state = State(tmp_path)
    seen = []

    def move(gate: Gate, outstanding: int, ceiling: int, _now: float) -> Gate:
        seen.append((outstanding, ceiling))
        return msgspec.structs.replace(gate, limit=gate.limit - 1, looked=time.time())

    with in_lanes(state, "long") as long, in_lanes(state, None) as short:
        long.share({URL: 2}, 100)
        short.share({URL: 5, "http://other": 3}, 100)
        assert long.move(URL, move).limit == 15
        gate = short.gate(URL)
        assert gate is not None and gate.limit == 15
        assert seen == [(7, 26)]


def test_a_gate_of_an_earlier_run_is_forgotten(tmp_path: Path) -> None:
    state = State(tmp_path)
    with in_lanes(state, None) as shares:
        now = time.time()
        shares.move(URL, lambda gate, *_: msgspec.structs.replace(gate, limit=1, looked=now))
        assert shares.share({URL: 0}, 100) == 1
        shares.move(URL, lambda gate, *_: msgspec.structs.replace(gate, limit=1, looked=now - 61))
        pause()
        assert shares.share({URL: 0}, 100) == 16


def test_a_server_is_looked_at_by_one_client_at_a_time(tmp_path: Path) -> None:
    state = State(tmp_path)
    with in_lanes(state, "long") as long, in_lanes(state, None) as short:
        assert [client.due(URL, 60.0) for client in (long, short, long)] == [True, False, False]


def test_a_full_disk_does_not_look_like_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(tmp_path)
    with Client(state, "") as beating:
        old = time.time() - 5

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("eyas.server.shares.write_private", full)
        os.utime(beating.path, (old, old))
        eventually(lambda: time.time() - beating.path.stat().st_mtime < 2, "the heartbeat goes on", 5)


# --- somebody else's server --------------------------------------------------------------------------------------


def test_a_missing_key_variable_is_named(tmp_path: Path) -> None:
    settings = access(tmp_path, "none", url="http://127.0.0.1:9", api_key_env="EYAS_NO_SUCH_KEY")
    with (
        pytest.raises(EyasError, match=r"server\.api_key_env: .*EYAS_NO_SUCH_KEY"),
        hold(settings, Silent({}, MODEL), LOG),
    ):
        pass


@pytest.mark.parametrize("key", ["sk-1\n", "sk-1\r\nX-Other: 1", " sk-1", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("EYAS_ODD_KEY", key)
    settings = access(tmp_path, "none", url="http://127.0.0.1:9", api_key_env="EYAS_ODD_KEY")
    with (
        pytest.raises(
            EyasError, match=r"^server\.api_key_env: .*EYAS_ODD_KEY .*export the key alone$"
        ) as told,
        hold(settings, Silent({}, MODEL), LOG),
    ):
        pass
    assert key.strip() not in str(told.value)


def test_servers_of_two_models_are_not_mixed(tmp_path: Path) -> None:
    settings = access(tmp_path, "none", url=["http://a", "http://b"])
    with (
        pytest.raises(EyasError, match=r"server\.url: .*different models \(size 1 and 2\)"),
        hold(settings, Sized(a=1, b=2), LOG),
    ):
        pass


def test_a_server_that_comes_back_as_another_model_is_refused(tmp_path: Path) -> None:
    servers = Sized(a=1, b=1)
    with hold(access(tmp_path, "none", url=["http://a", "http://b"]), servers, LOG) as lease:
        assert lease.healthy("http://b")
        servers.sizes["http://b"] = 2
        assert lease.healthy("http://a")
        with pytest.raises(EyasError, match=r"http://b came back with another model \(size 2, it was 1\)"):
            lease.healthy("http://b")


def test_one_server_that_generates_is_enough_and_the_others_may_come_later(tmp_path: Path) -> None:
    servers = Sized(a=0, b=1, c=0)
    urls = ["http://a", "http://b", "http://c"]
    with hold(access(tmp_path, "none", url=urls, start_timeout=600.0), servers, LOG) as lease:
        assert sorted(lease.urls) == urls and lease.urls[0] == "http://b"
        assert lease.absent == {"http://a": "nobody at a", "http://c": "nobody at c"}
        assert not lease.healthy("http://a") and "http://a" not in lease.manifests
        servers.sizes |= {"http://a": 1, "http://c": 2}
        assert lease.healthy("http://a")
        with pytest.raises(EyasError, match=r"http://b and http://c hold different models \(size 1 and 2\)"):
            lease.healthy("http://c")


def test_servers_that_come_at_once_are_all_kept(tmp_path: Path) -> None:
    names = [f"{n:03}" for n in range(200)]
    servers = Sized(a=1, **dict.fromkeys(names, 0))
    urls = [f"http://{name}" for name in ["a", *names]]
    with hold(access(tmp_path, "none", url=[*urls, "http://a/"], start_timeout=600.0), servers, LOG) as lease:
        assert sorted(lease.urls) == sorted(urls), "each address once"
        servers.sizes = dict.fromkeys(urls, 1)
        threads = [threading.Thread(target=lease.healthy, args=(url,)) for url in urls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(lease.manifests) == len(urls)
        assert lease.server("http://a").manifest["processes"] == len(urls)


def test_a_server_that_hangs_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    class Hanging(Sized):
        def inspect(self, url: str, key: str | None) -> dict[str, Any]:
            if url == "http://a":
                end.wait()
            return super().inspect(url, key)

    monkeypatch.setattr(eyas.server.lease, "STRAGGLERS", 0.1)
    with hold(access(tmp_path, "none", url=["http://a", "http://b"]), Hanging(a=1, b=1), LOG) as lease:
        assert lease.urls == ["http://b", "http://a"] and list(lease.manifests) == ["http://b"]
    end.set()


def test_where_nothing_answers_each_address_and_its_cause_is_named(tmp_path: Path) -> None:
    settings = access(tmp_path, "none", url=["http://a", "http://b"], start_timeout=0.5)
    with pytest.raises(EyasError) as caught, hold(settings, Sized(a=0, b=0), LOG):
        pass
    assert str(caught.value) == (
        "server.url: nothing generated within 0.5 s at http://a (nobody at a), http://b (nobody at b); "
        "start a server or correct the address"
    )


def test_answers_name_the_manifest_of_the_server_that_gives_them(tmp_path: Path) -> None:
    """Servers of one manifest are one; one with other settings is another from then on, whoever finds it out."""
    servers = Sized(a=1, b=1)
    servers.settings = {"tp_size": 4}
    urls = ["http://a", "http://b"]
    with hold(access(tmp_path, "none", url=urls), servers, LOG) as lease:
        both = lease.server("http://a")
        assert lease.server("http://b") == both
        assert both.manifest == {
            **{"engine": "silent", "size": 1, "tp_size": 4, "processes": 2},
            "capacity": {"tokens": 8000, "max_running": None, "conservativeness": 1.0},
        }
        servers.settings = {"tp_size": 8, "accelerator": "H200"}
        lease.recognise("http://b")
        old, new = map(lease.server, urls)
        assert len({both.id, old.id, new.id}) == 3
        assert (old.manifest["tp_size"], old.manifest["processes"]) == (4, 1)
        assert (new.manifest["tp_size"], new.manifest["accelerator"]) == (8, "H200")
        assert new.manifest["capacity"]["tokens"] == 8000
        pool = lease.capacity()
        assert pool is not None and pool.tokens == 12_000
        assert lease.healthy("http://a")
        assert lease.server("http://a") == lease.server("http://b") != new


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_server_that_comes_back_with_other_settings_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: str
) -> None:
    servers = Sized(**dict.fromkeys(names, 1))
    servers.settings = {"engine_version": "x 1", "tp_size": 4, "accelerator": None}
    caplog.set_level(logging.WARNING)

    def warned() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    with hold(access(tmp_path, "none", url=[f"http://{name}" for name in names]), servers, LOG) as lease:
        assert lease.healthy("http://a") and lease.healthy("http://a")
        assert not warned(), "it is as it was"
        servers.settings = {"engine_version": "x 2", "tp_size": 4, "accelerator": "H200"}
        assert lease.healthy("http://a") and lease.healthy("http://a")
        assert warned() == [
            "http://a came back with other settings (accelerator None → H200, engine_version x 1 → x 2); "
            "answers from now on are kept under its new manifest"
        ]
        servers.settings["tp_size"] = 8
        assert lease.healthy("http://a")
        assert [text.partition(";")[0] for text in warned()] == [
            "http://a came back with other settings (tp_size 4 → 8)"
        ]


def test_a_look_at_a_servers_model_is_good_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Sized(a=1, b=1)
    with hold(access(tmp_path, "none", url=["http://a", "http://b"]), servers, LOG) as lease:
        monkeypatch.setattr(eyas.server.lease, "LOOK_INTERVAL", 3600.0)
        for url in ("http://a", "http://b", "http://a"):
            lease.recognise(url)
        assert servers.looks == 2
        monkeypatch.setattr(eyas.server.lease, "LOOK_INTERVAL", 0.0)
        servers.sizes["http://a"] = 2
        with pytest.raises(EyasError, match=r"http://a came back with another model \(size 2, it was 1\)"):
            lease.recognise("http://a")
        monkeypatch.setattr(Sized, "identify", lambda *_: None)  # it does not tell
        lease.recognise("http://a")


def test_an_address_where_nothing_answers_is_an_error_in_the_end(tmp_path: Path) -> None:
    settings = access(tmp_path, "none", url="http://127.0.0.1:9", start_timeout=3.0)
    with (
        pytest.raises(
            EyasError,
            match=r"server\.url: nothing generated within 3 s at http://127.0.0.1:9 \(connection: ",
        ),
        hold(settings, engine_of(settings), LOG),
    ):
        pass


@pytest.mark.engine
def test_a_server_of_ones_own_is_inspected_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_TEST_KEY", KEY)
    with running(engine()) as url:
        settings = access(tmp_path, url=[url + "/"], api_key_env="EYAS_TEST_KEY")
        with hold(settings, engine_of(settings), LOG) as lease:
            assert (lease.urls, lease.key) == ([url], KEY)
            assert lease.server(url).manifest["slots"] == 2
            assert lease.healthy()
            assert not supervisors(tmp_path)
        engine().inspect(url, KEY)
    assert not lease.healthy()


# --- a server of our own -----------------------------------------------------------------------------------------


@pytest.mark.engine
def test_many_starters_share_one_server_and_it_stops_when_idle(state: Path, own_model: Path) -> None:
    settings = access(
        state, str(own_model), engine={"name": "llamacpp", "model_file": str(own_model), "processes": 2}
    )
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(holder(settings)) for _ in range(3)]
        urls = [urls_of(process) for process in holders]
        assert urls[0] == urls[1] == urls[2]
        assert len(set(urls[0])) == 2
        assert len(engines(own_model)) == 2
        assert len(supervisors(state)) == 1

        endpoint = State(state).endpoint
        assert endpoint.stat().st_mode & 0o777 == 0o600
        key = msgspec.json.decode(endpoint.read_bytes(), type=Endpoint).key
        assert len(key) > 30
        assert not [line for line in command_lines().values() if key in line]
        assert key not in State(state).log.read_text(errors="replace")
        with hold(settings, engine_of(settings), LOG) as lease:
            assert lease.key == key
            (server,) = {lease.server(url).id: lease.server(url).manifest for url in lease.urls}.values()
            assert key not in json.dumps(server)
            assert server["processes"] == 2
            assert lease.healthy()
        for process in holders[1:]:
            process.communicate(timeout=10)
        time.sleep(IDLE + 1)
        assert len(engines(own_model)) == 2
        holders[0].communicate(timeout=10)
    eventually(lambda: not engines(own_model) and not supervisors(state), "an idle server stops", GONE)
    assert not endpoint.exists()
    assert not list(State(state).clients.iterdir())


def test_a_server_has_let_go_of_everything_when_the_next_may_start(state: Path, tmp_path: Path) -> None:
    """Else the next finds the port taken, or the GPUs' memory."""
    settings = access(state, "none")
    with hold(settings, Large(tmp_path / "pid"), LOG):
        pass
    while State(state).supervised():
        pass
    assert not (Path("/proc") / (tmp_path / "pid").read_text()).exists()


@pytest.mark.engine
@pytest.mark.fault
def test_kill_minus_nine_of_the_holder_leaves_no_server(state: Path, own_model: Path) -> None:
    with holder(access(state, str(own_model))) as process:
        urls_of(process)
        process.kill()
        process.wait()
        assert engines(own_model)
        eventually(lambda: not engines(own_model) and not supervisors(state), "the server stops", GONE)
    assert not State(state).endpoint.exists()


@pytest.mark.engine
@pytest.mark.fault
def test_kill_minus_nine_of_the_supervisor_takes_the_engine_along_and_the_next_holder_starts_anew(
    state: Path, own_model: Path
) -> None:
    settings = access(state, str(own_model))
    with holder(settings):
        eventually(lambda: bool(engines(own_model)), "the engine is started")
        # While it loads it cannot read its stdin: only the kernel can end it.
        os.kill(supervisors(state)[0], signal.SIGKILL)
        eventually(lambda: not engines(own_model), "a loading engine dies with its supervisor", 3)
    with hold(settings, engine_of(settings), LOG) as lease:
        os.kill(supervisors(state)[0], signal.SIGKILL)
        eventually(lambda: not engines(own_model), "the engine dies with its supervisor", 3)
        with pytest.raises(EyasError, match=r"server\.log"):
            lease.healthy()
        assert State(state).endpoint.exists()
        with hold(settings, engine_of(settings), LOG) as again:
            assert again.healthy()


@pytest.mark.engine
@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_starter_that_dies_while_loading_leaves_no_server(
    state: Path, own_model: Path, number: int
) -> None:
    with holder(access(state, str(own_model), idle_timeout=600.0)) as process:
        eventually(lambda: bool(engines(own_model)), "the engine is started")
        process.send_signal(number)
        process.wait(10)
        eventually(lambda: not engines(own_model) and not supervisors(state), "the server stops", GONE)


@pytest.mark.engine
@pytest.mark.fault
def test_a_terminal_that_closes_or_sends_ctrl_c_does_not_reach_the_server(
    state: Path, own_model: Path
) -> None:
    settings = access(state, str(own_model))
    with hold(settings, engine_of(settings), LOG) as lease:
        pid = supervisors(state)[0]
        assert os.getsid(pid) != os.getsid(0)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            os.kill(pid, number)
        time.sleep(0.5)
        assert lease.healthy()


@pytest.mark.engine
@pytest.mark.fault
def test_a_crashed_engine_comes_back_at_its_address_a_bounded_number_of_times(
    state: Path, own_model: Path
) -> None:
    settings = access(state, str(own_model), restarts=1)
    with hold(settings, engine_of(settings), LOG) as lease:
        first = engines(own_model)
        # The supervisor must have heard that the server was ready.
        time.sleep(0.5)
        os.kill(first[0], signal.SIGSEGV)

        def back() -> bool:
            return bool(engines(own_model)) and engines(own_model) != first and lease.healthy()

        eventually(back, "the engine is restarted")
        os.kill(engines(own_model)[0], signal.SIGKILL)
        eventually(lambda: not supervisors(state), "the supervisor gives up", GONE)
        with pytest.raises(EyasError, match=r"memory.*server\.log"):
            lease.healthy()


@pytest.mark.engine
@pytest.mark.fault
def test_a_crash_while_loading_is_one_clear_sentence_for_all_who_wait(state: Path, tmp_path: Path) -> None:
    (tmp_path / "own.gguf").write_bytes(b"garbage" * 1000)
    settings = access(state, str(tmp_path / "own.gguf"), restarts=5)
    with pytest.raises(EyasError) as caught, hold(settings, engine_of(settings), LOG):
        pass
    message = str(caught.value)
    assert message.startswith("server.engine.model_file: the file is not a GGUF model; ")
    assert message.endswith(f"{state}/server.log")
    assert "\n" not in message
    eventually(lambda: not supervisors(state), "the supervisor ends", GONE)
    assert not State(state).endpoint.exists()


@pytest.mark.engine
def test_what_is_wrong_before_the_start_is_said_before_the_start(state: Path, tmp_path: Path) -> None:
    missing = access(state, str(tmp_path / "none.gguf"))
    with (
        pytest.raises(EyasError, match=r"server\.engine\.model_file"),
        hold(missing, engine_of(missing), LOG),
    ):
        pass
    with socket.create_server(("127.0.0.1", 0)) as taken:
        section = {"name": "llamacpp", "model_file": str(model_file()), "port": taken.getsockname()[1]}
        settings = access(state, engine=section)
        with (
            pytest.raises(EyasError, match=r"server\.engine\.port"),
            hold(settings, engine_of(settings), LOG),
        ):
            pass
    no_env = access(state, env="/no/such/python")
    with (
        pytest.raises(EyasError, match=r"server\.env: /no/such/python"),
        hold(no_env, engine_of(no_env), LOG),
    ):
        pass
    assert not supervisors(state)


@pytest.mark.engine
def test_a_server_of_other_settings_is_replaced_only_if_nobody_uses_it(state: Path, own_model: Path) -> None:
    one = access(state, str(own_model), idle_timeout=60.0)
    other = access(
        state, idle_timeout=IDLE, engine={"name": "llamacpp", "model_file": str(own_model), "slots": 1}
    )
    with hold(one, engine_of(one), LOG) as lease:
        first = engines(own_model)
        with (
            pytest.raises(EyasError, match=r"server\.state: .*other settings"),
            hold(other, engine_of(other), LOG),
        ):
            pass
        assert lease.healthy()
    with hold(other, engine_of(other), LOG) as lease:
        assert lease.server(lease.urls[0]).manifest["slots"] == 1
        assert first[0] not in engines(own_model)


def test_a_cluster_job_without_gpus_starts_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = access(tmp_path, "none", start_timeout=0.5)
    caplog.set_level(logging.INFO)
    with pytest.raises(EyasError, match="snakemake serve"), hold(settings, Silent({}, MODEL), LOG):
        pass
    assert "waiting up to 0.5 s for `snakemake serve --cores 1`" in caplog.text
    assert not list(tmp_path.glob("server.log"))


def test_a_server_that_only_its_own_host_can_reach_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = access(tmp_path, "none")
    from eyas.server.lease import _Started

    started = _Started(settings, Silent({}, MODEL), LOG)
    write_private(
        State(tmp_path).endpoint, Endpoint(["http://127.0.0.1:9"], "k", started.settings, "gpu01", 1)
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with (
        pytest.raises(EyasError, match=r"server\.engine\.host: .*gpu01"),
        hold(settings, Silent({}, MODEL), LOG),
    ):
        pass


SERVE = HOLDER.replace("from eyas.server.lease import hold", "from eyas.server.serve import serve").partition(
    "with hold"
)[0]


@pytest.mark.engine
def test_serve_holds_a_server_until_it_is_told_to_end(state: Path, own_model: Path) -> None:
    settings = access(state, str(own_model))
    program = SERVE + "serve(access, LlamaCpp(ServerOptions(**options), access.model), logging.getLogger())"
    with subprocess.Popen(
        [sys.executable, "-c", program, msgspec.json.encode(settings).decode()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "SLURM_JOB_ID": "7"},
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "serving at http://127.0.0.1:" in line and str(State(state).endpoint) in line
        with hold(settings, engine_of(settings), LOG) as lease:
            assert lease.urls[0] in line
        process.terminate()
        assert process.wait(10) == 0
    eventually(lambda: not engines(own_model), "the server stops", GONE)


def test_what_speaks_against_the_settings_is_said_once_when_the_server_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = access(tmp_path, "none", concurrency=5, lanes={"long": LaneConfig(concurrency=2)})
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(EyasError, match="the server ended"),
        hold(settings, Doomed({}, MODEL), LOG),
    ):
        pass
    assert caplog.messages == ["model.kv_dtype: rounds 7", "server.engine.x: slow"]
