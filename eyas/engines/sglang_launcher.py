"""Starts one SGLang server with its API key hidden, and ends all its processes when it is told to stop.

Run by file path with the interpreter of the engine's own environment, which holds no eyas: so it imports nothing but
the standard library and sglang. Arguments are SGLang's own flags; the API key comes in the environment variable
EYAS_API_KEY, because every user of a machine can read a command line.

The server is a child of this process, and its schedulers are children of that. They notice a parent that dies only
after they have imported torch, so one that is killed while they load would leave them behind, each with its share of
the GPUs. Hence this process: it does nothing but wait, and kills the whole process group when its stdin ends, which
is when the supervisor is gone. If it is killed itself, the supervisor kills the group.
"""

import ctypes
import os
import runpy
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Flag as we write it -> the field of ServerArgs that tells of a newer name, and that name.
RENAMED = {"--cuda-graph-max-bs": ("cuda_graph_max_bs_decode", "--cuda-graph-max-bs-decode")}


class Secret(str):
    """An API key that does not show where settings are printed, as SGLang prints them at its start.

    It is an ordinary string to those who use it: other processes get it as one.
    """

    def __repr__(self) -> str:
        return "'hidden'"

    def __deepcopy__(self, memo: object) -> "Secret":
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def serve(key: str) -> None:
    """SGLang's own program, as `python -m sglang.launch_server` runs it, with `key` in its settings."""
    from sglang.srt import server_args

    prepare = server_args.prepare_server_args

    def prepare_with_key(argv: list[str]) -> server_args.ServerArgs:
        settings = prepare(as_this_version_has_them(argv, server_args.ServerArgs))
        settings.api_key = Secret(key)
        return settings

    server_args.prepare_server_args = prepare_with_key
    # Not under our name in sys.modules: the processes that SGLang spawns import this file as their main module.
    runpy.run_module("sglang.launch_server", run_name="__main__")


def as_this_version_has_them(argv: list[str], settings: type) -> list[str]:
    """`argv` with flags that SGLang has renamed under the name that this version knows."""
    newer = {old: new for old, (field, new) in RENAMED.items() if hasattr(settings, field)}
    return [newer.get(argument, argument) for argument in argv]


def die_with(parent: int) -> None:
    """The kernel ends this process when `parent` ends; Linux only, elsewhere the process group has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def kill_group_at_eof() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def end_as(status: int) -> None:
    """Ends this process the way the server did, for the supervisor to tell."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


def main() -> None:
    key = os.environ.pop("EYAS_API_KEY")
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    guard = os.getpid()
    server = os.fork()
    if server == 0:
        die_with(guard)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        serve(key)
        return
    threading.Thread(target=kill_group_at_eof, daemon=True).start()
    _, status = os.waitpid(server, 0)
    end_as(status)


if __name__ == "__main__":
    main()
