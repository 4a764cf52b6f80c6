"""The train stage: accepted responses as training rows, `prompt_ids + output_ids` with a mask over the output."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pyarrow as pa

from eyas.config import TrainSettings
from eyas.errors import EyasError
from eyas.recordfile import read_records
from eyas.records import Prompt, Response, TrainMetadata, TrainRow, Verdict, unit_id
from eyas.tables import write_table
from eyas.verdicts import read_verdicts

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("primary_id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        (
            "metadata",
            pa.struct(
                [
                    ("dataset", pa.string()),
                    ("group", pa.string()),
                    ("request", pa.string()),
                    ("finish", pa.string()),
                    ("truncated", pa.bool_()),
                    ("constrained", pa.bool_()),
                    ("reasoning_tokens", pa.int32()),
                    ("answer_tokens", pa.int32()),
                ]
            ),
        ),
    ]
)


def train(settings: TrainSettings, prompts: Path, responses: Path, verdicts: Path, out: Path) -> int:
    """Writes train.parquet and returns its number of rows, one per accepted generation, in the fixed order."""
    return write_table(out, SCHEMA, _rows(settings.dataset, prompts, responses, verdicts))


def _rows(dataset: str, prompts: Path, responses: Path, verdicts: Path) -> Iterator[TrainRow]:
    groups = ((prompt.key, prompt.group) for prompt in read_records(prompts, Prompt))
    key, group = "", ""
    for response, verdict in _paired(responses, verdicts):
        while key != response.key:
            try:
                key, group = next(groups)
            except StopIteration:
                raise EyasError(
                    f"{responses}: {response.key!r} is not in {prompts}, or out of order; delete both and run again"
                ) from None
        if verdict.accepted:
            yield train_row(dataset, group, response, verdict)


def _paired(responses: Path, verdicts: Path) -> Iterator[tuple[Response, Verdict]]:
    judged = read_verdicts(verdicts)
    for response in read_records(responses, Response):
        verdict = next(judged, None)
        if verdict is None or (verdict.key, verdict.turn, verdict.sample) != (
            response.key,
            response.turn,
            response.sample,
        ):
            raise EyasError(f"{verdicts}: does not match {responses}; delete it and run again to rebuild it")
        yield response, verdict
    if next(judged, None) is not None:
        raise EyasError(f"{verdicts}: has more rows than {responses}; delete it and run again to rebuild it")


def train_row(dataset: str, group: str, response: Response, verdict: Verdict) -> TrainRow:
    """One generation as a training row. No shift: that is the trainer's job."""
    primary = f"{dataset}/{response.key}"
    return TrainRow(
        id=f"{dataset}/{unit_id(response.key, response.turn, response.sample)}",
        primary_id=primary,
        input_ids=[*response.prompt_ids, *response.output_ids],
        loss_mask=[*repeat(0, len(response.prompt_ids)), *repeat(1, len(response.output_ids))],
        metadata=TrainMetadata(
            dataset=dataset,
            group=group,
            request=response.request,
            finish=response.finish.type,
            truncated=verdict.truncated,
            constrained=response.constrained,
            reasoning_tokens=verdict.reasoning_tokens,
            answer_tokens=verdict.answer_tokens,
        ),
    )
