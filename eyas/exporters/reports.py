"""What became of an export: the report beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eyas.errors import EyasError

EVERY = (
    "every one"  # ExportReport.learns of trainers that cannot be told to learn one answer of a conversation
)


class LeftOut(Struct):
    """Rows that a format cannot hold."""

    rows: int = 0
    supervised_tokens: int = 0


class ExportReport(Struct, kw_only=True):
    """…report.json beside an export.

    rows: written. supervised_tokens: of these, the closing token counted only if the trainer supervises it. later_turns: rows
    that hold earlier answers besides their own; learns: which of all these the trainer learns.
    read: whether Eyas read the export as the trainer does; if not, the numbers behind it are 0. reasoning_rows: rows whose
    answer reasons; reasoning_kept: those where the trainer still sees it, after it the answer. same_ids: rows that have
    exactly their own ids; differ_for: the others by reason. same_mask: rows whose loss mask is right too, null where the
    trainer's own code makes it.
    """

    exporter: str
    options: dict[str, Any]
    rows: int
    supervised_tokens: int
    supervises_end: bool
    later_turns: int
    learns: str
    left_out: dict[str, LeftOut]
    read: bool
    reasoning_rows: int = 0
    reasoning_kept: int = 0
    reasoning_share: float | None = None
    same_ids: int = 0
    same_ids_share: float | None = None
    differ_for: dict[str, int] = msgspec.field(default_factory=dict)
    same_mask: int | None = None


def report_path(out: Path) -> Path:
    """Where the report of an export lies."""
    return out.with_name(f"{out.name}.report.json")


def read_report(out: Path) -> ExportReport:
    """The report of the export at `out`."""
    path = report_path(out)
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExportReport)
    except (OSError, msgspec.MsgspecError) as error:
        raise EyasError(f"{path}: {error}; delete it and run again to rebuild it") from None
