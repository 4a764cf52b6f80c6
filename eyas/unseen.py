"""Lengths of answers that a small pilot has not met: three answers do not tell a tail, and no weights on them make one.

Each dataset's log lengths are taken as normal, its variance drawn together with that of all datasets (they share their
kind of spread more than their level). So a draw of a length follows Student's t about the dataset's own mean, cut at its limit.
How much such lengths count beside the answers that were seen stands in `ANSWERS`; docs/benchmarks.md has the coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ANSWERS = 10.0  # answers that the unseen ones count for, in all: most of a pilot of 3, little of one of 64
EACH = 8  # by which they are told in a draw
SD, SD_ANSWERS = 1.0, 2.0  # of log lengths, before any is seen, and for how many answers that counts
SHARED_ANSWERS = 6.0  # for how many of its own the datasets' common variance counts in each
BEYOND = 0.8  # mean of a normal beyond its middle, in standard deviations: what a cut answer still had to say

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Seen:
    """A dataset's answers: output tokens; how many answers each stands for; whether it was cut at `limit` tokens."""

    output: Floats
    parts: Floats
    cut: npt.NDArray[np.bool_]
    limit: int


def lengths(seen: Sequence[Seen], random: np.random.Generator, draws: int) -> list[Floats]:
    """Output tokens of unseen answers of each dataset, of shape (draws, EACH)."""
    variance = SD**2
    for _ in range(2):  # how far a cut answer would have gone depends on what is told
        moments = [_moments(one, variance**0.5) for one in seen]
        squares = sum(answers * own for answers, _, own in moments)
        variance = (SD_ANSWERS * SD**2 + squares) / (SD_ANSWERS + sum(n - 1 for n, _, _ in moments))
    made = []
    for one, (answers, mean, own) in zip(seen, moments, strict=True):
        freedom = SHARED_ANSWERS + answers - 1
        sum_of_squares = SHARED_ANSWERS * variance + answers * own
        sd = np.sqrt(sum_of_squares / random.chisquare(freedom, draws))[:, None]
        # Half the variance of the middle is taken off, or the mean of its exponential would be too large by it.
        middle = mean - sd**2 / answers / 2 + sd / answers**0.5 * random.standard_normal((draws, 1))
        drawn = np.exp(middle + sd * random.standard_normal((draws, EACH)))
        made.append(np.clip(np.rint(drawn), 1.0, one.limit))
    return made


def _moments(one: Seen, sd: float) -> tuple[float, float, float]:
    """Answers, and mean and variance of their log lengths. sd: of log lengths, as far as known."""
    logs = np.log(np.maximum(one.output, 1.0)) + np.where(one.cut, BEYOND * sd, 0.0)
    mean = float(np.average(logs, weights=one.parts))
    return float(one.parts.sum()), mean, float(np.average((logs - mean) ** 2, weights=one.parts))
