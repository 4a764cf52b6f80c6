"""A few rejected answers to read, for each reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from eyas.columns import read_columns
from eyas.lengths import Array, ends_of
from eyas.recordfile import read_records
from eyas.records import Prompt, unit_id
from eyas.report.words import cut

EACH = 3  # per reason
MOST_REASONS = 12  # the commonest
PROMPT_CUT = (500, 200)  # characters shown of the start and of the end
ANSWER_CUT = (900, 500)
COLUMNS = ["key", "turn", "sample", "accepted", "reasons", "reasoning_tokens", "output_tokens"]

Unit = tuple[str, int, int]


class Example(Struct, frozen=True, kw_only=True):
    """One rejected answer. prompt: what was asked last. Long texts are cut in their middle."""

    dataset: str
    key: str
    turn: int
    sample: int
    reasons: list[str]
    output_tokens: int
    prompt: str
    reasoning: str
    answer: str

    @property
    def id(self) -> str:
        return unit_id(self.key, self.turn, self.sample)


class Said(Struct, frozen=True):
    """Of a Response, what is read here."""

    key: str
    turn: int
    sample: int
    text: str
    text_lengths: str


class _Reject(Struct, frozen=True):
    dataset: str
    row: int
    unit: Unit
    reasons: list[str]
    reasoning_tokens: int
    output_tokens: int


def examples(results: Path, datasets: Sequence[str], reasons: Iterable[str]) -> dict[str, list[Example]]:
    """For each of the first `MOST_REASONS` of `reasons`, up to three answers that were rejected for it.

    They are the first in the fixed order, of different datasets where several have one.
    """
    wanted = list(reasons)[:MOST_REASONS]
    if not wanted:
        return {}
    found = {name: _rejects(results, name, wanted) for name in datasets}
    chosen = {reason: _spread([found[name][reason] for name in datasets]) for reason in wanted}
    told: dict[tuple[str, Unit], Example] = {}
    for name in datasets:
        rejects = {one.unit: one for ones in chosen.values() for one in ones if one.dataset == name}
        told |= {(name, unit): one for unit, one in _read(results / name, rejects).items()}
    return {reason: [told[one.dataset, one.unit] for one in ones] for reason, ones in chosen.items()}


def _rejects(results: Path, dataset: str, reasons: Sequence[str]) -> dict[str, list[_Reject]]:
    """The first rejects of a dataset for each reason."""
    found: dict[str, list[_Reject]] = {reason: [] for reason in reasons}
    row = 0
    for batch in read_columns(results / dataset / "verdicts.parquet", COLUMNS):
        for values in batch.to_pylist():
            row += 1
            for reason in values["reasons"]:
                if reason in found and len(found[reason]) < EACH:
                    found[reason].append(
                        _Reject(
                            dataset=dataset,
                            row=row,
                            unit=(values["key"], values["turn"], values["sample"]),
                            reasons=values["reasons"],
                            reasoning_tokens=values["reasoning_tokens"],
                            output_tokens=values["output_tokens"],
                        )
                    )
    return found


def _spread(of_datasets: Sequence[Sequence[_Reject]]) -> list[_Reject]:
    """The first of each dataset, then the second of each, and so on, as many as are shown."""
    rounds = [ones[place] for place in range(EACH) for ones in of_datasets if place < len(ones)]
    return rounds[:EACH]


def _read(folder: Path, rejects: Mapping[Unit, _Reject]) -> dict[Unit, Example]:
    """The examples of one dataset; reads no further than it must."""
    if not rejects:
        return {}
    last = max(one.row for one in rejects.values())
    said: dict[Unit, Said] = {}
    for row, one in enumerate(read_records(folder / "responses.jsonl.zst", Said), 1):
        if (unit := (one.key, one.turn, one.sample)) in rejects:
            said[unit] = one
        if row == last:
            break
    keys = {key for key, _, _ in rejects}
    asked: dict[str, Prompt] = {}
    for prompt in read_records(folder / "prompts.jsonl.zst", Prompt):
        if prompt.key in keys:
            asked[prompt.key] = prompt
            if len(asked) == len(keys):
                break
    return {unit: _example(one, said[unit], asked[unit[0]]) for unit, one in rejects.items()}


def _example(reject: _Reject, said: Said, prompt: Prompt) -> Example:
    reasoning, answer = parts(said.text, ends_of(said.text_lengths), reject.reasoning_tokens)
    key, turn, sample = reject.unit
    asked = prompt.turns[turn - 1].messages if turn else prompt.messages
    return Example(
        dataset=reject.dataset,
        key=key,
        turn=turn,
        sample=sample,
        reasons=reject.reasons,
        output_tokens=reject.output_tokens,
        prompt=cut(asked[-1].content, *PROMPT_CUT),
        reasoning=cut(reasoning.strip("\n"), *ANSWER_CUT),
        answer=cut(answer.strip("\n"), *ANSWER_CUT),
    )


def parts(text: str, text_ends: Array, reasoning_tokens: int) -> tuple[str, str]:
    """An answer's reasoning, up to and with its closing delimiter, and what follows."""
    at = text_ends[reasoning_tokens - 1] if reasoning_tokens else 0
    return text[:at], text[at:]
