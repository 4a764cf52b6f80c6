"""Answers that fell into a loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from eyas.plugins import Check, Register, Split, hookimpl
from eyas.records import Response

if TYPE_CHECKING:
    from eyas.lengths import Array

# Tokens at the end that must recur before a period is tried in full.
PROBE = 8
PERIODIC, FEW_NGRAMS = "repeats with a short period", "few distinct n-grams"


class DegenerateOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """How much repetition is too much."""

    max_period: Annotated[
        int,
        Meta(
            ge=1,
            description="Longest repeated passage looked for, in tokens. 512 covers loops of whole paragraphs.",
        ),
    ] = 512
    min_repeats: Annotated[
        int,
        Meta(
            ge=2,
            description="How often the passage must stand at the end, without any change. Choruses and refrains seldom stand there four times in a row.",
        ),
    ] = 4
    min_tokens: Annotated[
        int,
        Meta(
            ge=2,
            description="How many tokens the repetition must cover at the end. Table rules, rows of zeros and laughter are shorter than 128; a loop runs on to the limit.",
        ),
    ] = 128
    window: Annotated[
        int,
        Meta(
            ge=16,
            description="Last tokens in which distinct n-grams are counted; shorter answers are not judged. In 512 a matrix or list in an ordinary answer is diluted by the text around it.",
        ),
    ] = 512
    ngram: Annotated[
        int,
        Meta(
            ge=1,
            description="Length of an n-gram, in tokens. Four tell a sentence apart from its vocabulary.",
        ),
    ] = 4
    min_distinct: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Least share of distinct n-grams in the window. 420 answers of SmolLM2-135M have 0.6 to 1, long lists and tables of similar lines 0.25 to 0.8, a loop that changes a word now and then below 0.1.",
        ),
    ] = 0.1


class Degenerate(Check):
    """Finds answers that fell into a loop, by repetition of token ids: exact at the end, or nearly so in the last part.

    It cannot know that a repetition was asked for ("write it a hundred times"); set the policy `mark` for datasets
    where that happens.
    """

    name = "degenerate"
    Options = DegenerateOptions
    options: DegenerateOptions

    def faults(self, response: Response, split: Split) -> Iterable[str]:
        ids = response.inner
        if self._is_periodic(ids):
            yield PERIODIC
        if self._has_few_ngrams(ids):
            yield FEW_NGRAMS

    def _is_periodic(self, ids: Array) -> bool:
        """Whether the end of `ids` repeats. Only distances at which the last few tokens stand too can be periods."""
        total, least = len(ids), self.options.min_tokens
        if total < least:
            return False
        # At least half of the repetition lies behind its first period.
        probed = min(PROBE, (least + 1) // 2)
        # Searched as bytes: a hundredth of the time that a loop over tokens takes.
        window = ids[-(self.options.max_period + probed) :].tobytes()
        last = at = len(window) - probed * ids.itemsize
        probe = window[last:]
        while (at := window.rfind(probe, 0, at + len(probe) - 1)) >= 0:
            if at % ids.itemsize:
                continue
            period = (last - at) // ids.itemsize
            covered = max(self.options.min_repeats * period, least)
            if covered > total:
                return False
            tail = ids[-covered:]
            if (tail[period:] == tail[:-period]).all():
                return True
        return False

    def _has_few_ngrams(self, ids: Array) -> bool:
        """Whether the window at the end holds few n-grams."""
        total, size = len(ids), self.options.ngram
        ngrams = self.options.window - size + 1
        if total < self.options.window:
            return False
        least = self.options.min_distinct * ngrams
        # Each distinct token but those of the last n-gram begins a distinct n-gram of its own, so this bound often settles
        # it, and mostly within the last quarter.
        for part in (self.options.window // 4, self.options.window):
            if len(set(ids[-part:].tolist())) - size + 1 >= least:
                return False
        last = ids[-self.options.window :].tolist()
        return len(set(zip(*(last[shift : shift + ngrams] for shift in range(size)), strict=True))) < least


@hookimpl
def register_checks(register: Register) -> None:
    register(Degenerate)
