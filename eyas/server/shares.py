"""How the requests in flight are shared: by all jobs that ask one server, within each lane's ceiling and the server's gate.

Clients live in separate processes, perhaps on several hosts, and meet in the folder described in eyas.server.state: each
has a heartbeat there that says what it has in flight and could use, and all share the gates (eyas.admission).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from eyas.admission import Gate, new_gate
from eyas.config import ServerConfig
from eyas.errors import EyasError
from eyas.server.gpus import Gpu, look
from eyas.server.state import BEAT, STALE, Heartbeat, State, locked, write_private

TURN = 30.0  # s after which another client has what is left over
FORGOTTEN = 60.0  # s without a look, after which what a gate knows is of an earlier run
SHARE_INTERVAL = 0.2  # s for which a share is good; bounds the file operations of a busy client

Move = Callable[[Gate, int, int, float], Gate]  # (gate, outstanding, ceiling, now) → gate


def fair_share(ceiling: int, demands: Sequence[int], turn: int = 0) -> list[int]:
    """`ceiling` requests shared by water-filling: all get the same, and what one cannot use goes to the others.

    What is left over goes to each in turn, so that of more clients than requests none waits for ever.
    """
    count = len(demands)
    shares = [0] * count
    left = ceiling
    by_demand = sorted(range(count), key=lambda i: (min(demands[i], ceiling), (i - turn) % count))
    for rank, i in enumerate(by_demand):
        shares[i] = min(demands[i], left // (len(demands) - rank))
        left -= shares[i]
    return shares


def all_lanes(server: ServerConfig) -> int:
    """Most requests in flight of all lanes together."""
    return server.concurrency + sum(lane.concurrency for lane in server.lanes.values())


class Client:
    """This process's heartbeat: a file, and a thread that rewrites it each second.

    beside_server: the server runs on this host, so its GPUs are told too. They are looked at in a thread of its own, since a
    driver may hang for minutes, which must not look like death.
    """

    def __init__(self, state: State, settings: str, lane: str | None = None) -> None:
        self.state, self.lane = state, lane
        self.beside_server = False
        self.path = state.heartbeat_path()
        self._beat = Heartbeat(settings, lane=lane)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease heartbeat", daemon=True)
        self._gpus: list[Gpu] = []
        self._gpus_at = float("-inf")

    def __enter__(self) -> Client:
        try:
            self.state.clients.mkdir(parents=True, exist_ok=True)
            self.update()
        except OSError as error:
            raise EyasError(f"server.state: cannot write there ({error}); choose another folder") from error
        self._thread.start()
        threading.Thread(target=self._watch_gpus, name="GPUs", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self.path.unlink(missing_ok=True)

    def update(self, **changes: Any) -> None:
        with self._lock:
            self._beat = msgspec.structs.replace(self._beat, **changes, time=time.time())
            write_private(self.path, self._beat)

    def others(self) -> dict[str, Heartbeat]:
        live = self.state.live_clients()
        live.pop(self.path.name, None)
        return live

    def _run(self) -> None:
        while not self._stop.wait(BEAT):
            try:
                known = time.monotonic() - self._gpus_at < STALE
                self.update(gpus=self._gpus if known else [])
            except OSError:
                # A full disk must not look like death.
                with contextlib.suppress(OSError):
                    os.utime(self.path)

    def _watch_gpus(self) -> None:
        while not self._stop.wait(BEAT):
            if self.beside_server:
                self._gpus = look()
                self._gpus_at = time.monotonic()


class Shares:
    """One client's part of what may be in flight."""

    def __init__(self, client: Client, server: ServerConfig) -> None:
        self._client, self._server = client, server
        self._granted = 0
        self._granted_at = float("-inf")
        self.gpus: list[Gpu] = []  # of the server's host, as told by whoever runs there

    def share(self, outstanding: dict[str, int], demand: int) -> int:
        """How many requests this client may have in flight now; it may hold fewer than it has.

        outstanding: how many it has in flight at each server in use. demand: how many it would have in flight if it
        could, those included. What is granted is set aside for this client until it asks again, so ask at least once a
        second, also to give back. The sum over a lane's clients never exceeds the lane's ceiling, and the sum over all
        never what the gates of the servers in use let through.
        """
        if time.monotonic() - self._granted_at < SHARE_INTERVAL:
            return self._granted
        mine = self._client.path.name
        with locked(self._client.state.shares_lock):
            beats = self._client.state.live_clients()
            self.gpus = next((beat.gpus for beat in beats.values() if beat.gpus), [])
            beats[mine] = Heartbeat("", lane=self._client.lane, outstanding=outstanding, demand=demand)
            wanted = self._within_lanes(beats)
            through = sum(self._gates(list(outstanding)).values())
            names = sorted(wanted)
            parts = fair_share(through, [wanted[name] for name in names], int(time.time() // TURN))
            fair = dict(zip(names, parts, strict=True))[mine]
            taken = {name: beat.taken for name, beat in beats.items() if name != mine}
            in_lane = sum(taken[name] for name in taken if beats[name].lane == self._client.lane)
            left = min(through - sum(taken.values()), self.ceiling(self._client.lane) - in_lane)
            self._granted = max(0, min(fair, left))
            self._client.update(outstanding=outstanding, granted=self._granted, demand=demand)
        self._granted_at = time.monotonic()
        return self._granted

    def ceiling(self, lane: str | None) -> int:
        """Most requests in flight of one lane."""
        return self._server.concurrency if lane is None else self._server.lanes[lane].concurrency

    def _within_lanes(self, beats: dict[str, Heartbeat]) -> dict[str, int]:
        """What each client could use of its lane, by client."""
        wanted: dict[str, int] = {}
        for lane in {beat.lane for beat in beats.values()}:
            names = sorted(name for name, beat in beats.items() if beat.lane == lane)
            # A lane of another run's config that this one does not know is held to what it has.
            known = lane is None or lane in self._server.lanes
            ceiling = self.ceiling(lane) if known else sum(beats[name].taken for name in names)
            parts = fair_share(ceiling, [beats[name].demand for name in names], int(time.time() // TURN))
            wanted |= dict(zip(names, parts, strict=True))
        return wanted

    # --- gates -------------------------------------------------------------------------------------------------------

    def _gates(self, urls: Sequence[str]) -> dict[str, int]:
        kept, now = self._client.state.read_gates(), time.time()
        return {url: self._current(kept, url, now).limit for url in urls}

    def _current(self, kept: dict[str, Gate], url: str, now: float) -> Gate:
        """The gate that is kept, or a new one where nobody has looked for so long that the server may be another."""
        gate = kept.get(url)
        if gate is not None and now - gate.looked < FORGOTTEN:
            return gate
        return new_gate(all_lanes(self._server), now)

    def move(self, url: str, how: Move) -> Gate:
        """Changes the gate of one server, seen by all clients at once."""
        state = self._client.state
        with locked(state.shares_lock):
            now = time.time()
            gates = state.read_gates()
            gate = self._current(gates, url, now)
            beats = state.live_clients().values()
            outstanding = sum(beat.outstanding.get(url, 0) for beat in beats)
            gates[url] = how(gate, outstanding, all_lanes(self._server), now)
            write_private(state.gates, gates)
            return gates[url]

    def gate(self, url: str) -> Gate | None:
        """The gate of one server as it is now; None before the first look."""
        return self._client.state.read_gates().get(url)

    def due(self, url: str, interval: float) -> bool:
        """Whether nobody has looked at this server's load for `interval` s. The caller then looks, so it is told once."""
        state = self._client.state
        with locked(state.shares_lock):
            now = time.time()
            gates = state.read_gates()
            gate = self._current(gates, url, now)
            if now - gate.looked < interval:
                return False
            gates[url] = msgspec.structs.replace(gate, looked=now)
            write_private(state.gates, gates)
            return True
