"""What crosses the socket between Eyas and a server, kept byte by byte, and training rows compared with it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from eyas.records import TrainRow

# How often (ids sent, ids that came back) of a finished answer crossed the socket.
Wire = Counter[tuple[tuple[int, ...], tuple[int, ...]]]


@dataclasses.dataclass
class Recorder:
    """Raw bytes of both directions of every connection, taken between Eyas and the server at `target`."""

    target: str
    streams: list[tuple[bytearray, bytearray]] = dataclasses.field(default_factory=list)
    url: str = ""

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = urlsplit(self.target)
        try:
            upstream = await asyncio.open_connection(address.hostname, address.port)
        except OSError:  # the server is away
            writer.close()
            return
        sent, received = bytearray(), bytearray()
        self.streams.append((sent, received))
        await asyncio.gather(_copy(reader, upstream[1], sent), _copy(upstream[0], writer, received))

    def exchanges(self) -> Iterator[tuple[bytes, bytes]]:
        """The bodies of every request and of its reply, read without Eyas' help; those that came whole."""
        for sent, received in list(self.streams):
            yield from zip(_bodies(bytes(sent)), _bodies(bytes(received)), strict=False)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
    try:
        while data := await reader.read(65536):
            record += data
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


def _bodies(stream: bytes) -> Iterator[bytes]:
    """The bodies of the HTTP messages in one direction of a connection; all carry a Content-Length or have none."""
    while b"\r\n\r\n" in stream:
        head, _, rest = stream.partition(b"\r\n\r\n")
        fields = [line.partition(b":") for line in head.lower().split(b"\r\n")[1:]]
        assert not any(name == b"transfer-encoding" for name, _, _ in fields)
        length = next((int(value) for name, _, value in fields if name == b"content-length"), 0)
        if len(rest) < length:
            return
        yield rest[:length]
        stream = rest[length:]


@contextmanager
def recorded(target: str) -> Iterator[Recorder]:
    """A recorder in front of `target`, which may be away now and then."""
    recorder, loop = Recorder(target), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(recorder.connection, "127.0.0.1", 0))
    recorder.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield recorder
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def check_rows(rows: Iterable[TrainRow], wire: Wire) -> None:
    """Each training row is the ids sent and then the ids that came back, and the mask is 1 on these alone."""
    for row in rows:
        prompt = row.loss_mask.index(1)
        output = len(row.input_ids) - prompt
        assert row.loss_mask == [0] * prompt + [1] * output, row.id
        assert wire[tuple(row.input_ids[:prompt]), tuple(row.input_ids[prompt:])] >= 1, row.id
        assert output == row.metadata.reasoning_tokens + row.metadata.answer_tokens, row.id
