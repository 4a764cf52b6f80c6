"""What the drift audit of a run saw, from its logs: logs/generate/<dataset>.audit.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from msgspec import Struct

from eyas.audit import Drift, Round, read_rounds


class Audited(Struct, frozen=True, kw_only=True):
    """The rounds of one dataset. prompts: of the last round. began, ended: Unix time in s, of all of them.

    tokens, reasoning: mean length of an answer and its mean share of reasoning, in the first and in the last round. steps: the
    alarms that the rounds give, in their order.
    """

    dataset: str
    rounds: int
    prompts: int
    began: float
    ended: float
    tokens: tuple[float, float]
    reasoning: tuple[float, float]
    steps: list[str]


def audits(logs: Path, datasets: Sequence[str]) -> list[Audited]:
    """By dataset; those that were not audited are left out. logs: folder of the generate jobs' logs."""
    found = [(name, list(read_rounds(logs / f"{name}.audit.jsonl"))) for name in datasets]
    return [_audited(name, rounds) for name, rounds in found if rounds]


def _audited(dataset: str, rounds: Sequence[Round]) -> Audited:
    drift = Drift()
    first, last = rounds[0], rounds[-1]
    return Audited(
        dataset=dataset,
        rounds=len(rounds),
        prompts=len(last.answers),
        began=first.began,
        ended=last.ended,
        tokens=(_tokens(first), _tokens(last)),
        reasoning=(_reasoning(first), _reasoning(last)),
        steps=[step for one in rounds for step in drift.add(one)],
    )


def _tokens(one: Round) -> float:
    return fmean(answer.output_tokens for answer in one.answers)


def _reasoning(one: Round) -> float:
    return fmean(answer.reasoning_tokens / max(answer.output_tokens, 1) for answer in one.answers)
