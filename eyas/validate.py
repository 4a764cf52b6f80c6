"""The validate stage: every response gets a verdict; none is changed or dropped."""

from __future__ import annotations

from pathlib import Path

from eyas.config import ValidateSettings
from eyas.judge import Judge
from eyas.plugins import Registry
from eyas.recordfile import read_records
from eyas.records import Response
from eyas.verdicts import read_verdicts, write_verdicts

__all__ = ["Judge", "read_verdicts", "validate"]


def validate(settings: ValidateSettings, responses: Path, out: Path, registry: Registry) -> int:
    """Judges `responses` (responses.jsonl.zst) into `out` (verdicts.parquet), in order, and returns how many."""
    judge = Judge(settings.reasoning, settings.checks, registry)
    return write_verdicts(out, map(judge.judge, read_records(responses, Response)))
