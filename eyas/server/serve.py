"""`serve`: holds a server in the foreground, in a terminal of its own or as a GPU job."""

from __future__ import annotations

import logging
import signal
import time

from eyas.config import AccessSettings
from eyas.errors import EyasError
from eyas.plugins import Engine
from eyas.server.lease import hold

CHECK_INTERVAL = 2.0  # s


def serve(access: AccessSettings, engine: Engine, log: logging.Logger) -> None:
    """Holds a lease until SIGINT or SIGTERM; the server then stops when no other holder has been left for
    `server.idle_timeout`.

    Raises EyasError if the server does not start, or ends for good.
    """
    if access.server.url is not None:
        raise EyasError(
            "server.url: serve starts a server of its own; remove server.url, or do without serve"
        )

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    earlier = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with hold(access, engine, log, serving=True) as lease:
            print(
                f"serving at {', '.join(lease.urls)}; other jobs find it through {lease.endpoint}", flush=True
            )
            print("it runs until Ctrl-C, whether or not a job uses it", flush=True)
            while True:
                time.sleep(CHECK_INTERVAL)
                lease.check()
    except KeyboardInterrupt:
        log.info("serve ends")
        print(
            f"serve ends; the server stops when no job has used it for {access.server.idle_timeout:g} s",
            flush=True,
        )
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
