"""The control side of an engine and the way of the answers trust the same servers."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

CERTIFICATES = Path(__file__).parent / "data" / "tls"  # of 127.0.0.1, by openssl, for a hundred years

ASK = """
import asyncio, sys
from eyas.engines.http import Client
from eyas.plugins import Retry
from eyas.wire import Session

async def answer():
    async with Session(None) as session:
        return await session.get(sys.argv[1])

for ask in (lambda: Client(sys.argv[1], None).get("/"), lambda: asyncio.run(answer())):
    try:
        print(ask().status)
    except (Retry, OSError) as error:
        print(error)
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with a certificate of its own authority."""

    class Fine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Fine)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATES / "server.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def asked(url: str, **environment: str) -> list[str]:
    """What the two said, each a status or why there was none."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SSL_CERT")}
    done = subprocess.run(
        [sys.executable, "-c", ASK, url], env=clean | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_a_certificate_of_ones_own_authority_is_trusted_where_the_environment_names_it(url: str) -> None:
    assert asked(url, SSL_CERT_FILE=str(CERTIFICATES / "ca.pem")) == ["200", "200"]


def test_no_other_certificate_is(url: str) -> None:
    """Nor for what the library reads behind `requests`, which nobody but it heeds."""
    for environment in ({}, {"REQUESTS_CA_BUNDLE": str(CERTIFICATES / "ca.pem")}):
        control, answers = asked(url, **environment)
        assert control.startswith("connection: SSLError") and "SSL_CERT_FILE" in control
        assert "CERTIFICATE_VERIFY_FAILED" in answers
