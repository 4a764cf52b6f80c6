"""JSON lines as trainers read them: plain, not compressed; and as `datasets` hands them on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from eyas.recordfile import atomic

BUFFER = 1 << 20  # bytes


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Writes one object a line in one atomic step and returns how many."""
    encode = msgspec.json.Encoder().encode
    count = 0
    with atomic(path) as temporary, temporary.open("wb", BUFFER) as file:
        for row in rows:
            file.write(encode(row) + b"\n")
            count += 1
    return count


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    with path.open("rb", BUFFER) as file:
        yield from map(decode, file)


def with_nulls(messages: list[dict[str, Any]], keys: Iterable[str]) -> list[dict[str, Any]]:
    """Messages as Arrow has them: every key that occurs in the file is in every message, null where it was absent.

    Source: `datasets` reads the messages of a whole file into one struct type (docs: loading JSON).
    """
    return [{key: message.get(key) for key in keys} for message in messages]
