"""The HTTP client for answers: connections kept and dropped, every way a reply may end, and what is no address."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest

import eyas.wire
from eyas.errors import EyasError
from eyas.wire import Answer, Session

T = TypeVar("T")
RESET = b"reset"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers each request with the next of `replies`; one that ends in None closes the connection behind it, in RESET resets it."""

    def __init__(self, *replies: list[bytes | None]) -> None:
        self.replies = list(replies)
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = asyncio.Semaphore(0)  # a place for each connection that has ended

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                self.requests.append(head + await reader.readexactly(length))
                for part in self.replies.pop(0):
                    if part is None:
                        return
                    if part is RESET:  # as a server that is killed: the kernel drops what it still held
                        linger = struct.pack("ii", 1, 0)
                        writer.get_extra_info("socket").setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, linger
                        )
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.01)  # so that parts arrive apart
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass
        finally:
            self.closed.release()
            writer.close()


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def run(server: Server, work: Callable[[Session, str], Awaitable[T]], key: str | None = None) -> T:
    async def all_of_it() -> T:
        async with serving(server) as url, Session(key) as session:
            return await asyncio.wait_for(work(session, url), 10)

    return asyncio.run(all_of_it())


def test_a_request_says_what_it_must_and_the_reply_comes_back() -> None:
    server = Server([WHOLE])
    assert run(server, lambda session, url: session.post(f"{url}/a/b?c=d", b'{"x":1}'), "sk-1") == Answer(
        200, b"ok"
    )
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /a/b?c=d HTTP/1.1" and body == b'{"x":1}'
    assert {b"Content-Type: application/json", b"Authorization: Bearer sk-1", b"Content-Length: 7"} < set(
        lines
    )
    assert [line for line in lines if line.startswith(b"Host: 127.0.0.1:")]


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "body"),
    [
        ([b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy"], (503, b"busy")),
        ([b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 6\r\n\r\nab", b"cdef"], (200, b"abcdef")),
        ([CHUNKED, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"], (200, b"abcde")),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE], (200, b"ok")),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], (204, b"")),
        ([b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nto the ", b"end", None], (200, b"to the end")),
        ([b"HTTP/1.0 200 OK\r\n\r\nold", None], (200, b"old")),
    ],
)
def test_every_way_that_a_body_may_end(reply: list[bytes | None], body: tuple[int, bytes]) -> None:
    server = Server(reply, [WHOLE])

    async def twice(session: Session, url: str) -> list[Answer]:
        return [await session.get(url), await session.get(url)]

    assert run(server, twice) == [body, (200, b"ok")]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ([None], "closed before the reply was whole"),
        ([b"HTTP/1.1 200 OK\r\nContent-Le", None], "closed before the reply was whole"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", None], "closed before the reply was whole"),
        ([CHUNKED, b"5\r\nab", None], "closed before the reply was whole"),
        ([b"<html>\r\n\r\n"], "no HTTP"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n"], "no HTTP"),
        ([b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"], "another protocol"),
        ([b"HTTP/1.1 200 OK\r\n\r\nhalf", RESET], "reset by peer"),
    ],
)
def test_a_reply_that_is_not_whole_is_an_error(reply: list[bytes | None], why: str) -> None:
    server = Server(reply, [WHOLE])

    async def again(session: Session, url: str) -> Answer:
        with pytest.raises(ConnectionError, match=why):
            await session.get(url)
        return await session.get(url)

    assert run(server, again) == (200, b"ok")
    assert server.connections == 2


def test_connections_are_kept_and_each_has_one_request_at_a_time() -> None:
    server = Server(*[[WHOLE]] * 40)

    async def ask(session: Session, url: str) -> None:
        for _ in range(4):
            found = await asyncio.gather(*(session.post(url, b"{}") for _ in range(10)))
            assert found == [Answer(200, b"ok")] * 10

    run(server, ask)
    assert server.connections == 10


def test_what_a_server_closes_or_would_soon_close_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(
        [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"],
        [WHOLE, None],
        [WHOLE],
        [WHOLE],
    )

    async def ask(session: Session, url: str) -> None:
        for _ in range(3):
            await session.get(url)
            await asyncio.sleep(0.1)
        monkeypatch.setattr(eyas.wire, "KEPT", 0.05)
        await session.get(url)

    run(server, ask)
    assert server.connections == 4


def test_who_gives_up_leaves_no_connection_with_a_reply_to_come() -> None:
    server = Server([b"HTTP/1.1 200 OK\r\n"], [WHOLE])

    async def ask(session: Session, url: str) -> Answer:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await session.get(url)
        return await session.get(url)

    assert run(server, ask) == (200, b"ok")
    assert server.connections == 2


def test_the_end_of_a_session_closes_what_it_kept() -> None:
    server = Server([WHOLE])

    async def ask() -> None:
        async with serving(server) as url:
            async with Session() as session:
                await session.get(url)
            await asyncio.wait_for(server.closed.acquire(), 10)

    asyncio.run(ask())
    assert server.connections == 1


@pytest.mark.parametrize("late", [[WHOLE + WHOLE], [WHOLE + WHOLE[:30]], [WHOLE, WHOLE], [WHOLE, WHOLE[:30]]])
def test_bytes_that_nobody_asked_for_end_the_connection(late: list[bytes | None]) -> None:
    server = Server(late, [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes"])

    async def ask(session: Session, url: str) -> Answer:
        await session.get(url)
        await server.closed.acquire()
        return await session.get(url)

    assert run(server, ask) == (200, b"yes")
    assert server.connections == 2


def test_what_a_burst_has_opened_is_closed_while_a_trickle_goes_on() -> None:
    server = Server(*[[WHOLE]] * 9)

    async def ask(session: Session, url: str) -> None:
        await asyncio.gather(*(session.get(url) for _ in range(8)))
        (pool,) = session._idle.values()
        for connection in [*pool][:-1]:
            connection.idle_since -= eyas.wire.KEPT
        await session.get(url)
        for _ in range(7):
            await server.closed.acquire()

    run(server, ask)
    assert server.connections == 8


@pytest.mark.parametrize("key", [None, "sk-1"])
def test_a_login_in_the_url_is_sent(key: str | None) -> None:
    server = Server([WHOLE])
    run(server, lambda session, url: session.get(url.replace("//", "//me:p%40ss@")), key)
    lines = server.requests[0].split(b"\r\n")
    assert [line for line in lines if line.startswith(b"Authorization")] == [
        b"Authorization: Basic bWU6cEBzcw=="
    ]
    assert [line for line in lines if line.startswith(b"Host: 127.0.0.1:")]


def test_an_ipv6_address_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    server, called = Server([WHOLE]), []

    async def ask(session: Session, url: str) -> Answer:
        loop = asyncio.get_running_loop()
        connect, here = loop.create_connection, urlsplit(url).port

        async def divert(protocol: Callable[[], Any], host: str, port: int, ssl: None) -> object:
            called.append((host, port, ssl))
            return await connect(protocol, "127.0.0.1", here)

        monkeypatch.setattr(loop, "create_connection", divert)
        return await session.get("http://[::1]:30000/")

    assert run(server, ask) == (200, b"ok")
    assert called == [("::1", 30000, None)]
    assert b"\r\nHost: [::1]:30000\r\n" in server.requests[0]


@pytest.mark.parametrize(
    "url",
    [
        "localhost:30000",
        "ftp://h/",
        "http://",
        "http://h:port/",
        "http://h:99999",
        "http://h/a b",
        "http://ü/",
        "http://a..b/",
        f"http://{'a' * 64}.b/",
    ],
)
def test_what_is_no_address_is_said_so(url: str) -> None:
    with pytest.raises(
        EyasError, match=r"^server\.url: .* is no address \(.+\); it looks like http://host:port$"
    ):
        run(Server(), lambda session, _: session.get(url))


def test_nobody_there_and_a_host_without_a_name_are_connection_errors() -> None:
    for url in ("http://127.0.0.1:9", "http://no-such-host.invalid:1", "https://127.0.0.1:9"):
        with pytest.raises(OSError, match=r".") as caught:
            run(Server(), lambda session, _, url=url: session.get(url))  # type: ignore[misc]
        assert not isinstance(caught.value, TimeoutError)


def test_a_server_that_takes_no_connection_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eyas.wire, "CONNECT_TIMEOUT", 0.1)

    async def hang(*_args: object, **_kwargs: object) -> None:
        await asyncio.sleep(60)

    async def ask(session: Session, url: str) -> Answer:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", hang)
        return await session.get(url)

    with pytest.raises(ConnectionError, match=r"no connection within"):
        run(Server(), ask)


def handed_out(count: int, monkeypatch: pytest.MonkeyPatch, together: float) -> list[int]:
    """How many replies each turn of the event loop brings of so many that come at once."""
    monkeypatch.setattr(eyas.wire, "TOGETHER", together)
    turns: list[int] = []

    async def come() -> None:
        outlet, loop = eyas.wire._Outlet(), asyncio.get_running_loop()
        replies = [loop.create_future() for _ in range(count)]
        for reply in replies:
            outlet.add(reply, Answer(200, b""))
        seen = 0
        while seen < count:
            await asyncio.sleep(0)
            done = sum(reply.done() for reply in replies)
            turns.extend([done - seen] if done > seen else [])
            seen = done

    asyncio.run(asyncio.wait_for(come(), 10))
    return turns


def test_few_replies_are_handed_out_at_once_and_many_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    most = eyas.wire.MOST_TOGETHER
    assert handed_out(3, monkeypatch, 60.0) == [3]
    assert handed_out(2 * most, monkeypatch, 60.0) == [most, most]
    assert handed_out(2 * most + 3, monkeypatch, 0.05) == [most, most, 3]


def test_a_reply_soon_after_another_waits_for_company_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eyas.wire, "TOGETHER", 0.5)

    async def work() -> None:
        outlet, loop = eyas.wire._Outlet(), asyncio.get_running_loop()

        def come() -> asyncio.Future[Answer]:
            reply: asyncio.Future[Answer] = loop.create_future()
            outlet.add(reply, Answer(200, b""))
            return reply

        await come()
        first, given_up = come(), come()
        given_up.cancel()
        await asyncio.sleep(0.005)
        second = come()
        assert not first.done()
        await first
        assert second.done()

    asyncio.run(asyncio.wait_for(work(), 10))


def test_who_gives_up_a_reply_that_has_come_does_not_break_off_the_next_request() -> None:
    server = Server([WHOLE], [WHOLE], [b"HTTP/1.1 200 OK\r\n", b"Content-Length: 2\r\n", b"\r\nok"])

    async def work(session: Session, url: str) -> Answer:
        await session.get(url)
        given_up = asyncio.create_task(session.get(url))
        while not session._outlet._waiting:  # noqa: ASYNC110 (soon after the one before, so it waits)
            await asyncio.sleep(0)
        following = asyncio.create_task(session.get(url))
        await asyncio.sleep(0)
        given_up.cancel()
        return await following

    assert run(server, work) == Answer(200, b"ok")
    assert server.connections == 1


def test_at_the_end_all_that_has_come_is_handed_out() -> None:
    async def work() -> None:
        session, loop = Session(), asyncio.get_running_loop()
        replies = [loop.create_future() for _ in range(3 * eyas.wire.MOST_TOGETHER)]
        for reply in replies:
            session._outlet.add(reply, Answer(200, b""))
        session.hand_out()
        assert all(reply.done() for reply in replies)
        await asyncio.sleep(0.05)  # what was to hand them out finds nothing to do

    asyncio.run(work())
