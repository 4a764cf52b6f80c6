"""The export stage: one training table written the way a trainer reads it."""

from __future__ import annotations

from pathlib import Path

from eyas.config import ExportSettings
from eyas.plugins import Exporter, Registry
from eyas.records import TrainRow
from eyas.tables import read_table


def export(settings: ExportSettings, train: Path, out: Path, registry: Registry) -> int:
    """Writes `train` (train.parquet or eval.parquet) to `out` and returns the number of rows."""
    exporter = registry.create(
        "exporter", settings.exporter, settings.options, f"exports.{settings.exporter}"
    )
    assert isinstance(exporter, Exporter)
    return exporter.write(read_table(train, TrainRow), out)
