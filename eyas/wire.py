"""How engines ask: requests for answers, many at a time, over kept HTTP/1.1 connections.

A general client costs more than all else that a request needs (docs/benchmarks.md), so this is the least that asks: bytes
out, status and bytes in. Replies are parsed by httptools, which is llhttp, Node.js's parser. There are no redirects, no
cookies, no proxies and no compression, none of which stands between a client and its own model server.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import sys
import time
from base64 import b64encode
from collections import deque
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from eyas.errors import EyasError

CONNECT_TIMEOUT = 30.0  # s
FIXED = "Content-Type: application/json\r\n"
KEPT = 3.0  # s that an idle connection is used again; uvicorn closes its own after 5
# Replies are handed out once so many wait, and otherwise so many seconds after the last ones were; never sooner than APART.
MOST_TOGETHER, TOGETHER, APART = 32, 0.02, 0.005


class Answer(NamedTuple):
    """What a server said: HTTP status and body."""

    status: int
    body: bytes


class _Address(NamedTuple):
    """Where a URL leads. target, named: what the request line and the Host header say. login: for Basic, if it has one."""

    host: str
    port: int
    secure: bool
    target: str
    named: str
    login: str | None


@lru_cache(maxsize=1024)
def _address(url: str) -> _Address:
    """Raises EyasError for what is no address."""
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # as the resolver will; a label may be empty or too long
    except ValueError as error:
        raise _no_address(url, str(error)) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _no_address(url, "it has no http:// or no host")
    secure = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    user, at, host = parts.netloc.rpartition("@")
    if not (target + host).isascii() or any(character <= " " for character in target + host):
        raise _no_address(url, "it holds white space or letters that no address has")
    login = b64encode(unquote(user).encode()).decode() if at else None
    return _Address(parts.hostname, port or (443 if secure else 80), secure, target, host, login)


def _no_address(url: str, why: str) -> EyasError:
    return EyasError(f"server.url: {url} is no address ({why}); it looks like http://host:port")


class _Outlet:
    """Hands replies out to those who wait for them: at once while they are few, and together while they are many.

    Work on a reply at a time finds the processor's caches full of other things, and takes up to half as long again.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[Answer], Answer]] = deque()
        self._last = -math.inf  # when some were handed out, in the loop's time
        self._next: asyncio.TimerHandle | None = None

    def add(self, reply: asyncio.Future[Answer], answer: Answer) -> None:
        self._waiting.append((reply, answer))
        if len(self._waiting) in (1, MOST_TOGETHER):
            self._set()

    def _set(self) -> None:
        if self._next is not None:
            self._next.cancel()
        wait = TOGETHER if len(self._waiting) < MOST_TOGETHER else APART
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(max(0.0, self._last + wait - loop.time()), self._in_time)

    def _in_time(self) -> None:
        self._last, self._next = asyncio.get_running_loop().time(), None
        self.hand_out(MOST_TOGETHER)
        if self._waiting:
            self._set()

    def hand_out(self, most: int) -> None:
        for _ in range(min(len(self._waiting), most)):
            reply, answer = self._waiting.popleft()
            if not reply.done():
                reply.set_result(answer)


class _Connection(asyncio.Protocol):
    """One connection, with at most one request on it."""

    def __init__(self, pool: deque[_Connection], outlet: _Outlet) -> None:
        from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

        self._no_http, self._upgrade = HttpParserError, HttpParserUpgrade
        self.pool, self._outlet = pool, outlet
        self.idle_since = 0.0
        self.closed = False
        self.reply: asyncio.Future[Answer] | None = None
        self._parser: Any = HttpResponseParser(self)
        self._begin()

    def _begin(self) -> None:
        self._body: list[bytes] = []
        self._told = self._measured = False  # headers have come; they say where the body ends

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        self.reply = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self.reply

    def close(self) -> None:
        self.closed = True
        self._transport.abort()

    # --- asyncio's side ------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except self._no_http as error:
            self._fail(f"no HTTP: {error}")
            self.close()
        except self._upgrade:
            self._fail("no HTTP: the server changes to another protocol")
            self.close()

    def connection_lost(self, cause: Exception | None) -> None:
        self.closed = True
        if self._told and not self._measured and cause is None:  # such a body ends with its connection
            self._answer()
        self._fail(str(cause) if cause else "closed before the reply was whole")

    def _fail(self, why: str) -> None:
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(ConnectionResetError(why))
        self.reply = None

    # --- the parser's side ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.reply is None:  # nobody has asked for this, and whoever asks next must not get it
            self.close()

    def on_header(self, name: bytes, _value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._measured = True

    def on_headers_complete(self) -> None:
        self._told = True

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # informational; the reply follows
            self._begin()
            return
        kept = self._parser.should_keep_alive()
        self._answer()
        if kept and not self.closed:
            self.idle_since = time.monotonic()
            self.pool.append(self)
        else:
            self.close()

    def _answer(self) -> None:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        if self.reply is not None:
            self._outlet.add(self.reply, Answer(self._parser.get_status_code(), body))
        self.reply = None
        self._begin()


class Session:
    """Requests to any number of servers, on one event loop. Connections are kept, used again for a few seconds, and closed at
    the end."""

    def __init__(self, key: str | None = None) -> None:
        """key: sent as a bearer token with every request, unless its URL has a login."""
        self._bearer = f"Authorization: Bearer {key}\r\n" if key else ""
        self._idle: dict[tuple[str, int, bool], deque[_Connection]] = {}
        self._outlet = _Outlet()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        for pool in self._idle.values():
            while pool:
                pool.pop().close()

    def hand_out(self) -> None:
        """Hands out all replies that have come, to whom they are for; for one who ends."""
        self._outlet.hand_out(sys.maxsize)

    async def get(self, url: str) -> Answer:
        """Raises OSError if no whole reply comes, never TimeoutError; EyasError if the address is none."""
        return await self._ask("GET", url, b"")

    async def post(self, url: str, body: bytes) -> Answer:
        """As `get`; body: JSON."""
        return await self._ask("POST", url, body)

    async def _ask(self, method: str, url: str, body: bytes) -> Answer:
        address = _address(url)
        connection = self._kept(address) or await self._connect(address)
        login = f"Authorization: Basic {address.login}\r\n" if address.login else self._bearer
        head = f"{method} {address.target} HTTP/1.1\r\nHost: {address.named}\r\n{login}{FIXED}Content-Length: {len(body)}\r\n\r\n"
        reply = connection.ask(head.encode() + body)
        try:
            return await reply
        except BaseException:
            if connection.reply is reply:  # else it has come, and the connection is idle or another's
                connection.close()
            raise

    def _kept(self, address: _Address) -> _Connection | None:
        """The connection that was used last, as long as its server still keeps it. Older ones are closed."""
        pool = self._idle.get(address[:3])
        while pool and time.monotonic() - pool[0].idle_since >= KEPT:
            pool.popleft().close()
        while pool:
            connection = pool.pop()
            if not connection.closed:
                return connection
        return None

    async def _connect(self, address: _Address) -> _Connection:
        pool = self._idle.setdefault(address[:3], deque())
        context = _tls() if address.secure else None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(pool, self._outlet), address.host, address.port, ssl=context
                )
        except TimeoutError:
            raise ConnectionError(f"no connection within {CONNECT_TIMEOUT:.0f} s") from None
        return connection


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
