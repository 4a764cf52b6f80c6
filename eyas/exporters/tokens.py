"""Token rows: the only export that needs no tokenizer and loses nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from eyas import hookimpl
from eyas.plugins import Exporter


class Tokens(Exporter):
    """JSON lines of id, primary_id, input_ids, loss_mask, metadata, as SpecForge (online) and speculators read them."""

    # Fields: SpecForge specforge/data/prompt_builder.py (_prompt_from_record) and speculators docs/cli/response_regeneration.md;
    # both take equal-length integer lists with a mask of 0 and 1, and ignore or drop other columns.
    name: ClassVar[str] = "tokens"
    suffix: ClassVar[str] = "jsonl.zst"

    def write(self, rows: Iterable[Any], path: Path) -> int:
        from eyas.recordfile import write_records

        return write_records(path, rows)


@hookimpl
def register_exporters(register: Any) -> None:
    register(Tokens)
