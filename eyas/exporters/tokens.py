"""Token rows: the only export that needs no tokenizer and loses nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from eyas.plugins import Exporter, Reading, Register, hookimpl
from eyas.records import TrainRow


class MaskOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What the loss mask covers."""

    supervise_end: Annotated[
        bool,
        Meta(
            description="Whether the token that ends an answer is supervised, as SpecForge and speculators do it themselves."
        ),
    ] = True


class Masked(Exporter):
    """An exporter whose loss mask Eyas writes."""

    Options: ClassVar[type[Struct]] = MaskOptions
    options: MaskOptions

    @property
    def supervises_end(self) -> bool:
        return self.options.supervise_end

    def mask(self, row: TrainRow) -> list[int]:
        """The loss mask of `row`; an answer that was cut has no end token."""
        if self.options.supervise_end or row.metadata.finish != "stop":
            return row.loss_mask
        return [*row.loss_mask[:-1], 0]


class Tokens(Masked):
    """JSON lines of id, primary_id, input_ids, loss_mask, metadata, as SpecForge (online) and speculators read them."""

    # Fields: SpecForge specforge/data/prompt_builder.py (_prompt_from_record) and speculators docs/cli/response_regeneration.md;
    # both take equal-length integer lists with a mask of 0 and 1, and ignore or drop other columns.
    name: ClassVar[str] = "tokens"
    suffix: ClassVar[str] = "jsonl.zst"

    def write(self, rows: Iterable[Any], path: Path) -> int:
        from eyas.recordfile import write_records

        return write_records(path, (replace(row, loss_mask=self.mask(row)) for row in rows))

    def read(self, path: Path) -> Iterator[Reading]:
        from eyas.recordfile import read_records

        for row in read_records(path, TrainRow):
            yield Reading(ids=row.input_ids, mask=row.loss_mask)


@hookimpl
def register_exporters(register: Register) -> None:
    register(Tokens)
