"""Starts one native llama.cpp server through xllamacpp and stays in front of it until it is told to stop.

Run by file path with the interpreter of the engine's own environment, which holds no eyas: so it imports nothing but
the standard library and xllamacpp. The API key comes in the environment variable EYAS_API_KEY. SIGTERM, EOF on stdin
or the death of the parent end it.
"""

import argparse
import ctypes
import importlib.metadata
import os
import platform
import select
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
GGML_TYPE_F16 = 1  # ggml.h
HTTP_THREADS = 64  # one is taken by each open connection, waiting ones included; the default is slots + 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--slots", required=True, type=int, help="requests served at the same time")
    parser.add_argument(
        "--context", required=True, type=int, help="tokens per slot, prompt and answer together"
    )
    parser.add_argument("--threads", required=True, type=int)
    return parser.parse_args()


def die_with_parent() -> None:
    """A supervisor that is killed outright cannot stop us, so the kernel does; Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Of one that died before, the kernel says nothing, but our stdin has ended; `wait_for_eof` would see that only once
    # the model is loaded.
    stdin = select.poll()
    stdin.register(0, 0)  # POLLHUP is told unasked
    if stdin.poll(0):
        sys.exit("the supervisor is gone")


def cpu() -> str:
    """The processor's name: speed and, in the last bits, answers depend on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def serve(args: argparse.Namespace) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.model_alias = {Path(args.model).name}
    # /v1/models repeats the tags: the only place where the server can say what its own replies leave out.
    params.model_tags = {
        f"xllamacpp={importlib.metadata.version('xllamacpp')}",
        f"threads={args.threads}",
        f"cpu={cpu()}",
    }
    params.hostnames = [args.host]
    params.port = args.port
    params.api_keys = [os.environ.pop("EYAS_API_KEY")]
    params.n_threads_http = HTTP_THREADS
    params.n_parallel = args.slots
    params.n_ctx = args.context * args.slots
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    params.cache_type_k = params.cache_type_v = GGML_TYPE_F16
    params.cache_ram_mib = 0
    params.n_gpu_layers = 0
    params.fit_params = False
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.endpoint_props = False
    params.ui = False
    # The constructor holds the GIL while it loads, so a Python handler would not run: SIGTERM keeps its default.
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    wait_for_eof()


def wait_for_eof() -> None:
    while os.read(0, 4096):
        pass
    # No destructors: they wait for requests in progress.
    os._exit(0)


if __name__ == "__main__":
    die_with_parent()
    serve(arguments())
