"""Answers that still ran when they were last seen: how long they will be, given those that ended.

Of an answer that had c tokens one knows that it will have more. The survival curve of all answers (Kaplan and Meier 1958)
says how likely each longer length is; what it leaves open beyond the longest that was seen gets a Pareto tail.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TAIL_SHARE = 0.25  # of the lengths, the longest, from which the tail's exponent is taken
TAIL_HEAVIEST, TAIL_LIGHTEST = 0.8, 4.0  # bounds of that exponent: few answers tell it badly

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def survival(tokens: Floats, ended: Bools) -> tuple[Floats, Floats]:
    """The Kaplan-Meier curve: lengths at which answers ended, rising, and the share of all answers that are longer."""
    at, ends = np.unique(tokens[ended], return_counts=True)
    at_risk = len(tokens) - np.searchsorted(np.sort(tokens), at, side="left")
    longer: Floats = np.cumprod(1 - ends / at_risk, dtype=np.float64)
    return at, longer


def tail_exponent(tokens: Floats, ended: Bools, limit: float) -> float:
    """Exponent of a Pareto tail: ends in the tail by the log-lengths lived there (Hill 1975, with censoring).

    Answers that ended at the limit count as still running there.
    """
    start = max(float(np.quantile(tokens, 1 - TAIL_SHARE)), 1.0)
    beyond = tokens >= start
    ends = int((beyond & ended & (tokens < limit)).sum())
    lived = float(np.log(np.maximum(tokens[beyond], 1.0) / start).sum())
    return float(np.clip(ends / lived if lived else TAIL_LIGHTEST, TAIL_HEAVIEST, TAIL_LIGHTEST))


def reached(tokens: Floats, ended: Bools, limit: float, points: int) -> Floats:
    """Lengths that the answers which have not ended will reach, in their order, shape (how many, points): `points` equally likely
    ones for each, above its tokens so far.

    tokens: of all answers, so far or in the end. limit: longest possible.
    """
    had = tokens[~ended][:, None]
    at, longer = survival(tokens, ended)
    now = np.concatenate([[1.0], longer])[np.searchsorted(at, had, side="right")]
    # Even steps down the share of answers that are longer than `had`; where each falls on the curve is a length.
    level = now * (np.arange(points) + 0.5) / points
    which = len(at) - np.searchsorted(longer[::-1], level, side="right")
    start = np.maximum(np.maximum(had, at[-1]), 1.0)
    share = np.maximum(level / max(longer[-1], 1e-12), 1e-12)
    beyond = start * share ** (-1 / tail_exponent(tokens, ended, limit))
    found = np.where(which < len(at), at[np.minimum(which, len(at) - 1)], beyond)
    lengths: Floats = np.minimum(np.maximum(found, had), limit)
    return lengths
