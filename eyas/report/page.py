"""report.html: one page that needs no network, no script and no other file.

Text from data reaches the page only through the template and the charts, which escape it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eyas.report import charts, plots
from eyas.report.examples import Example
from eyas.report.figures import Summary
from eyas.report.trainers import tables
from eyas.stats import KINDS, Bin, DatasetStats


def render(
    summary: Summary,
    stats: Mapping[str, DatasetStats],
    manifest: Mapping[str, Any],
    examples: Mapping[str, Sequence[Example]],
) -> str:
    """The page as text. examples: rejected answers to read, by reason."""
    limits = {name: part.max_new_tokens for name, part in summary.datasets.items()}
    buckets = by_length(stats.values())
    return charts.render(
        "report.html.j2",
        summary=summary,
        stats=stats,
        kinds=KINDS,
        manifest=manifest,
        examples=examples,
        buckets=buckets,
        lengths=plots.lengths(stats, limits),
        course=plots.course(summary.timeline),
        shares=plots.reasoning(summary.datasets),
        acceptance=plots.acceptance(buckets),
        budgets=plots.budgets(summary.datasets),
        stages=plots.stages(summary.stages),
        trainers=tables(summary),
    )


def by_length(stats: Iterable[DatasetStats]) -> list[Bin]:
    """All datasets' responses by output tokens, in powers of two, without empty ends."""
    accepted, rejected, ends = Counter[int](), Counter[int](), {}
    for one in stats:
        for each in one.by_length:
            accepted[each.low] += each.accepted
            rejected[each.low] += each.rejected
            ends[each.low] = each.high
    return [
        Bin(low=low, high=ends[low], accepted=accepted[low], rejected=rejected[low]) for low in sorted(ends)
    ]
