"""Where a server that is started here listens, and how others reach it."""

from __future__ import annotations

import contextlib
import socket

from eyas.errors import EyasError


def free_ports(host: str, first: int, count: int) -> list[int]:
    """`count` ports of `host` to listen on: `first` and those that follow it, or any that are free if `first` is 0.

    All are held until the last is chosen, so that none is chosen twice. Raises EyasError if one is taken.
    """
    with contextlib.ExitStack() as held:
        ports = []
        for i in range(count):
            wanted = first + i if first else 0
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            probe = held.enter_context(socket.socket(family))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, wanted))
            except (OSError, OverflowError) as error:
                raise EyasError(
                    f"server.engine.port: {host}:{wanted} is taken or not ours to use ({error}); choose another port, or 0 for any that is free"
                ) from None
            ports.append(int(probe.getsockname()[1]))
    return ports


def url_of(host: str, port: int) -> str:
    """The address for clients, on this host or another, of a server that listens on `host`."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
