"""Numbers for people. Imports nothing heavy: `eyas status` uses it too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Protocol, TypeVar


class Counted(Protocol):
    @property
    def rows(self) -> int: ...


# C0 and C1 controls, line and paragraph separators, marks and isolates of direction, surrogates.
_CONTROL = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff\\ufeff]"
)

C = TypeVar("C", bound=int | Counted)


def number(value: float | None, digits: int = 0) -> str:
    """A number for people: thousands separated; a dash for nothing."""
    return "–" if value is None else f"{value:,.{digits}f}"


def rounded(value: float) -> str:
    """A number to three digits, whole ones in full."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


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


def spoken(seconds: float) -> str:
    """A duration in a sentence: "3.8 minutes"."""
    size, unit = next(
        ((size, unit) for size, unit in ((3600, "hours"), (60, "minutes")) if seconds >= size), (1, "seconds")
    )
    return f"{seconds / size:,.1f} {unit}"


def moment(unix: float) -> str:
    """Date and time in UTC of Unix seconds, to the minute."""
    return datetime.fromtimestamp(unix, UTC).strftime("%-d %B %Y, %H:%M UTC")


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


def slug(text: str) -> str:
    """A name for an HTML id, made of small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def cut(text: str, head: int, tail: int) -> str:
    """The start and the end of a long text, in characters, and how much is missing between them."""
    left = len(text) - head - tail
    if left <= head // 4:  # not worth a gap
        return text
    return f"{text[:head]}\n[… {left:,} characters …]\n{text[-tail:]}"


def visible(text: str) -> str:
    """Text whose control characters, but for tab and line feed, can be seen and do nothing.

    Also those that turn the direction of writing, and U+2028 and U+2029, at which editors and old parsers break lines.
    """
    return _CONTROL.sub(lambda found: _sign(ord(found[0])), text)


def _sign(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\u27e8U+{code:04X}\u27e9"
