"""Numbers for people. Imports nothing heavy: `eyas status` uses it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar


class Counted(Protocol):
    @property
    def rows(self) -> int: ...


C = TypeVar("C", bound=int | Counted)


def number(value: float | None, digits: int = 0) -> str:
    """A number for people: thousands separated; a dash for nothing."""
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """A share for people."""
    return "–" if share is None else f"{share:.1%}"


def duration(seconds: float) -> str:
    """Seconds for people, in the unit that suits them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h"


def hours(value: float, most: float) -> str:
    """Hours for people, with more digits if the `most` in their column is less than one."""
    return number(value, 2 if most >= 1 else 3)


def megabytes(value: float | None) -> str:
    """Memory for people; a dash where it was not measured."""
    return "–" if value is None else f"{value:,.0f} MB"


def commonest(counts: Mapping[str, C]) -> list[tuple[str, C]]:
    """Names with their counts or tallies, the most frequent first."""
    return sorted(counts.items(), key=lambda item: (-_rows(item[1]), item[0]))


def listed(counts: Mapping[str, int | Counted], most: int | None = None) -> str:
    """Names with their counts on one line, the most frequent first, at most `most` of them; a dash for none."""
    ranked = commonest(counts)
    named = [f"{number(_rows(count))} × {' '.join(name.split())}" for name, count in ranked[:most]]
    return ", ".join([*named, "…"] if len(named) < len(ranked) else named) or "–"


def _rows(count: int | Counted) -> int:
    return count if isinstance(count, int) else count.rows
