"""The process that owns a server: starts the engine, restarts it when it crashes, stops it when nobody uses it.

Run by eyas.server.lease as `python -m eyas.server.supervisor STATE`, with the plan on stdin. It goes to the background
at once, in a session of its own, so neither Ctrl-C nor a closed terminal reaches it. If it is killed outright, the
engine's launchers notice: their stdin ends, and on Linux the kernel kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from eyas.server.state import Endpoint, Heartbeat, Plan, Process, State, locked, write_private

POLL = 0.25  # s
STOP_GRACE = 10.0  # s between SIGTERM and SIGKILL, and as long for what was killed to be gone
RESTART_PAUSE = 1.0  # s before a crashed process is started again
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class _Running:
    """One engine process and its group."""

    def __init__(self, process: Process, restarts: int) -> None:
        self.process = process
        self.restarts_left = restarts
        self.start()

    def start(self) -> None:
        # From the main thread only: PR_SET_PDEATHSIG fires when the thread that started a process ends.
        self.popen = subprocess.Popen(
            self.process.argv, stdin=subprocess.PIPE, env=self.process.env, process_group=0
        )

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def kill(self) -> None:
        """Kills the group and waits until none of it is left: a large process keeps its port and memory for a while."""
        self.signal_group(signal.SIGKILL)
        self.popen.wait()
        deadline = time.monotonic() + STOP_GRACE
        with contextlib.suppress(ChildProcessError):  # there is none any more
            while time.monotonic() < deadline:
                if os.waitpid(-self.popen.pid, os.WNOHANG) == (0, 0):
                    time.sleep(0.01)

    def ending(self) -> str:
        code = self.popen.returncode
        return f"ended by signal {-code}" if code < 0 else f"ended with status {code}"


class Supervisor:
    """Runs one plan to its end."""

    def __init__(self, state: State, plan: Plan) -> None:
        self.state, self.plan = state, plan
        self.running: list[_Running] = []
        self.ready = False
        self.stopping = False

    def offer(self) -> None:
        """Tells clients where the server is (or will be)."""
        urls = [process.url for process in self.plan.processes]
        endpoint = Endpoint(urls, self.plan.key, self.plan.settings, socket.gethostname(), os.getpid())
        write_private(self.state.endpoint, endpoint)

    def run(self) -> None:
        """Until nobody uses the server, it crashes too often, or SIGTERM."""
        try:
            for process in self.plan.processes:
                self.running.append(_Running(process, self.plan.restarts))
            used = time.monotonic()
            while not self.stopping:
                users = self._users()
                if users:
                    used = time.monotonic()
                    self.ready = self.ready or any(user.ready for user in users)
                # A server that still loads serves only those who wait for it.
                elif not self.ready or time.monotonic() - used > self.plan.idle_timeout:
                    self.state.endpoint.unlink(missing_ok=True)
                    # A client writes its heartbeat before it reads the endpoint, so one of us two sees the other.
                    if not self._users():
                        say("nobody uses the server any more")
                        break
                    self.offer()
                try:
                    os.utime(self.state.endpoint)
                except FileNotFoundError:
                    self.offer()
                if not all(self._keep(running) for running in self.running):
                    break
                time.sleep(POLL)
        finally:
            self._stop()

    def _users(self) -> list[Heartbeat]:
        live = self.state.live_clients().values()
        return [client for client in live if client.settings == self.plan.settings]

    def _keep(self, running: _Running) -> bool:
        """Restarts a crashed process; False if that is not to be."""
        if running.popen.poll() is None:
            return True
        running.kill()
        say(f"{running.process.url} {running.ending()}{'' if self.ready else ' while loading'}")
        if not self.ready or running.restarts_left == 0:
            return False
        running.restarts_left -= 1
        say(f"restarting it; {running.restarts_left} restarts are left")
        time.sleep(RESTART_PAUSE)
        running.start()
        return True

    def _stop(self) -> None:
        self.state.endpoint.unlink(missing_ok=True)
        for running in self.running:
            running.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE
        for running in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.popen.wait(max(0.0, deadline - time.monotonic()))
            # Also after a clean end: the group may hold processes that the leader left behind.
            running.kill()
        say("stopped")


def say(text: str) -> None:
    # A full disk must not end the server.
    with contextlib.suppress(OSError):
        print(f"[eyas] {text}", flush=True)


def adopt_orphans() -> None:
    """Processes whose parent ends become children of this one, which can wait for their end; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def supervise(state: State, plan: Plan, started: int) -> None:
    """`started` is a pipe that is closed after one byte once clients can find the server."""
    supervisor = Supervisor(state, plan)

    def stop(_number: int, _frame: object) -> None:
        supervisor.stopping = True

    # Handlers rather than SIG_IGN, which the engine would inherit. SGLang's processes send SIGQUIT to their parent.
    signal.signal(signal.SIGTERM, stop)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda _number, _frame: None)
    adopt_orphans()
    with locked(state.supervisor_lock):
        supervisor.offer()
        os.write(started, b"+")
        os.close(started)
        supervisor.run()


def main() -> None:
    """Returns in the foreground process once the one in the background is there."""
    state = State(Path(sys.argv[1]))
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        sys.exit(0 if os.read(reading, 1) else "the supervisor did not start")
    os.close(reading)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    supervise(state, plan, writing)


if __name__ == "__main__":
    main()
