"""What benchmarks are compared with, so that numbers of different machines and hours can be."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import synthetic
import zstandard

from eyas.recordfile import write_records


class Reference:
    """Plain decoding, zstandard and json.loads, of the first responses: what every consumer in Python has to pay.

    Used before and after a measurement, so that both share the machine's mood. bytes: of JSON per response.
    """

    def __init__(self, path: Path, rows: int) -> None:
        self._path = path
        self._rows = write_records(path, synthetic.responses(rows))
        self.bytes = sum(len(line) for line in self._decoded()) / self._rows

    def _decoded(self) -> Iterator[bytes]:
        rest = b""
        with self._path.open("rb") as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            while chunk := reader.read(1 << 18):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines

    def seconds(self) -> float:
        """s per response, now."""
        started = time.perf_counter()
        for line in self._decoded():
            json.loads(line)
        return (time.perf_counter() - started) / self._rows
