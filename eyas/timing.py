"""When each answer was made: one row per delivered reply, kept apart from the answers, which do not depend on it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from eyas.journal import Answered
from eyas.records import Record
from eyas.tables import TableWriter

SCHEMA = pa.schema(
    [
        ("request", pa.string()),
        ("attempt", pa.int32()),
        ("server", pa.string()),
        ("started", pa.float64()),
        ("finished", pa.float64()),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("used", pa.bool_()),
    ]
)


class Timing(Record, frozen=True):
    """started, finished: Unix time in s. used: the answer is in responses.jsonl.zst, not beyond the budget."""

    request: str
    attempt: int
    server: str
    started: float
    finished: float
    prompt_tokens: int
    output_tokens: int
    used: bool

    @classmethod
    def of(cls, entry: Answered, *, used: bool) -> Timing:
        """The timing of a journalled answer; tokens are counts of ids."""
        return cls(
            request=entry.reply.request,
            attempt=entry.delivery.attempt,
            server=entry.delivery.server,
            started=entry.delivery.started,
            finished=entry.delivery.finished,
            prompt_tokens=len(entry.reply.prompt_ids),
            output_tokens=len(entry.reply.output_ids),
            used=used,
        )


class TimingWriter(TableWriter[Timing]):
    """Writes timing.parquet."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, SCHEMA)
