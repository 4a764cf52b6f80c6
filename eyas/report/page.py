"""report.html: one page that needs no network, no script and no other file.

Text from data reaches the page only through the template and the charts, which escape it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.report import charts, plots
from eyas.report.audits import Audited
from eyas.report.examples import Example
from eyas.report.figures import Summary
from eyas.report.planned import Row
from eyas.report.trainers import tables
from eyas.stats import KINDS, DatasetStats


def render(
    summary: Summary,
    stats: Mapping[str, DatasetStats],
    manifest: Mapping[str, Any],
    examples: Mapping[str, Sequence[Example]],
    planned: Sequence[Row],
    audits: Sequence[Audited],
) -> str:
    """The page as text. examples: rejected answers to read, by reason. planned: plan and actual, empty without a plan. audits: what
    the drift audit saw, empty where it was off."""
    limits = {name: part.max_new_tokens for name, part in summary.datasets.items()}
    return charts.render(
        "report.html.j2",
        summary=summary,
        stats=stats,
        kinds=KINDS,
        manifest=manifest,
        examples=examples,
        planned=planned,
        audits=audits,
        lengths=plots.lengths(stats, limits),
        course=plots.course(summary.timeline),
        shares=plots.reasoning(summary.datasets),
        acceptance=plots.acceptance(summary.total.by_length),
        budgets=plots.budgets(summary.datasets),
        stages=plots.stages(summary.stages),
        trainers=tables(summary),
    )
