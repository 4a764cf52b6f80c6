"""The export stage: one training table written the way a trainer reads it, and read again as that trainer would.

The proof is of the file, not of the intention: what the exporter wrote is opened, turned into ids as the trainer does it, and
held against the training rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from eyas.config import ExportSettings, ModelConfig
from eyas.errors import EyasError
from eyas.exporters.prompts import PromptIndex
from eyas.exporters.reports import ExportReport, LeftOut, report_path
from eyas.exporters.target import Target
from eyas.plugins import Exporter, Reading, Reasoning, Registry, Told
from eyas.recordfile import atomic
from eyas.records import TrainRow, unit_place
from eyas.tables import read_table

REENCODED = "the same text has other ids"
RETOLD = "the trainer's text is another"


def export(
    settings: ExportSettings,
    train: Path,
    out: Path,
    registry: Registry,
    prompts: Sequence[Path] = (),
    responses: Sequence[Path] = (),
) -> ExportReport:
    """Writes `train` (train.parquet or eval.parquet) to `out`, and the report beside it.

    prompts: prompts.jsonl.zst of the datasets in `train`, for exporters of text. responses: responses.jsonl.zst of those
    whose conversations go on.
    """
    with ExitStack() as stack:
        rows: Callable[[], Iterator[Any]] = lambda: read_table(train, TrainRow)  # noqa: E731
        target = None
        if settings.model is not None:
            reasoning = reasoning_of(settings.model, registry)
            target = Target(settings.model, reasoning)
            index = stack.enter_context(PromptIndex(prompts, responses, settings.model, reasoning, out))
            rows = lambda: (target.tell(row, index.of(row)) for row in read_table(train, TrainRow))  # noqa: E731
        exporter = exporter_of(settings, registry, target)
        exporter.check()
        report = ExportReport(
            exporter=settings.exporter,
            options=settings.options,
            rows=0,
            supervised_tokens=0,
            supervises_end=exporter.supervises_end,
            later_turns=0,
            learns=exporter.learns,
            left_out={},
            read=False,
        )
        written = exporter.write(_fitting(rows(), exporter, report), out)
        if written != report.rows:
            raise EyasError(
                f"exporter {exporter.name!r} says that it wrote {written:,} of {report.rows:,} rows; correct the plugin"
            )
        if (readings := exporter.read(out)) is not None:
            _prove((row for row in rows() if exporter.unfit(row) is None), readings, exporter, report)
    with atomic(report_path(out)) as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return report


def exporter_of(settings: ExportSettings, registry: Registry, target: Target | None) -> Exporter:
    """The exporter with its options. target: of `settings.model`, if that is set."""
    exporter = registry.create(
        "exporter", settings.exporter, settings.options, f"exports.{settings.exporter}", target
    )
    assert isinstance(exporter, Exporter)
    return exporter


def reasoning_of(model: ModelConfig, registry: Registry) -> Reasoning:
    """The reasoning format of `model`, whose section has all options."""
    section = dict(model.reasoning)
    reasoning = registry.create("reasoning", section.pop("name"), section, "model.reasoning")
    assert isinstance(reasoning, Reasoning)
    return reasoning


def _row(item: Any) -> TrainRow:
    row: TrainRow = item.row if isinstance(item, Told) else item
    return row


def _fitting(items: Iterable[Any], exporter: Exporter, report: ExportReport) -> Iterator[Any]:
    """The rows that the format can hold; counts both sorts."""
    for item in items:
        row = _row(item)
        supervised = sum(row.loss_mask)
        if (reason := exporter.unfit(item)) is not None:
            left = report.left_out.setdefault(reason, LeftOut())
            left.rows, left.supervised_tokens = left.rows + 1, left.supervised_tokens + supervised
            continue
        report.rows += 1
        report.later_turns += unit_place(row.id)[0] > 0
        report.supervised_tokens += supervised - (
            not exporter.supervises_end and row.metadata.finish == "stop"
        )
        yield item


# --- the proof ---------------------------------------------------------------------------------------------------


def _prove(
    items: Iterable[Any], readings: Iterable[Reading], exporter: Exporter, report: ExportReport
) -> None:
    differ: Counter[str] = Counter()
    report.read = True
    try:
        for item, seen in zip(items, readings, strict=True):
            row = _row(item)
            told = item if isinstance(item, Told) else None
            same = _same(row, told, seen)
            report.same_ids += same
            if not same:
                differ[seen.note or (REENCODED if told and _is_own_text(told, seen) else RETOLD)] += 1
            reasons = (
                bool(told.reasoning and told.reasoning.strip()) if told else row.metadata.reasoning_tokens > 0
            )
            report.reasoning_rows += reasons
            report.reasoning_kept += reasons and (same or (told is not None and survives(told, seen)))
            if seen.mask is not None:
                report.same_mask = (report.same_mask or 0) + (same and _is_right(seen, row, exporter))
    except ValueError as error:
        raise EyasError(
            f"exporter {exporter.name!r} reads other rows than it wrote ({error}); correct the plugin"
        ) from error
    report.differ_for = dict(sorted(differ.items()))
    report.reasoning_share = _share(report.reasoning_kept, report.reasoning_rows)
    report.same_ids_share = _share(report.same_ids, report.rows)


def _same(row: TrainRow, told: Told | None, seen: Reading) -> bool:
    """Whether the trainer has the row's ids: all of them, and behind them at most what a template writes between turns."""
    count = len(row.input_ids)
    if seen.ids[:count] != row.input_ids:
        return False
    if len(seen.ids) == count:
        return True
    if told is None or seen.text is None:
        return False
    # The end of an answer that was cut is not the row's own, but such rows are written only if it is not learnt.
    return row.metadata.finish == "length" or _is_own_text(told, seen)


def _is_own_text(told: Told, seen: Reading) -> bool:
    """Whether the trainer's text is the row's, white space behind it aside."""
    return (
        seen.text is not None and seen.text.startswith(told.text) and not seen.text[len(told.text) :].strip()
    )


def survives(told: Told, seen: Reading) -> bool:
    """Whether the reasoning stands in the text that the trainer sees, behind what was asked, and the answer behind it."""
    assert told.reasoning is not None
    if seen.text is None:
        return False
    start = 0
    for message in told.messages:
        said = message["content"].strip()
        if (at := seen.text.find(said, start)) >= 0:
            start = at + len(said)
    at = seen.text.find(told.reasoning.strip(), start)
    return at >= 0 and seen.text.find(told.answer.strip(), at + len(told.reasoning.strip())) >= 0


def _is_right(seen: Reading, row: TrainRow, exporter: Exporter) -> bool:
    expected = list(row.loss_mask)
    if row.metadata.finish == "stop" and not exporter.supervises_end:
        expected[-1] = 0
    assert seen.mask is not None
    return seen.mask[: len(expected)] == expected and not any(seen.mask[len(expected) :])


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None
