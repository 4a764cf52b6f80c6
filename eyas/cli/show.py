"""`eyas show`: one conversation as a person would read it."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.cli import add_directory, again, enter
from eyas.errors import EyasError
from eyas.report.words import number, visible

if TYPE_CHECKING:
    from eyas.records import Message, Outcome, Prompt, Response, Verdict

RESULTS = Path("results")
BOLD, DIM, GREEN, RED, BLUE = "1", "2", "32", "31", "36"
NEAR = 3  # keys that an unknown one is told
ALIKE = 20_000  # keys that are looked through for them


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "show", help="print one conversation: prompt, reasoning, answer, finish, verdict and reasons"
    )
    parser.add_argument("dataset", metavar="DATASET")
    parser.add_argument(
        "key", metavar="KEY", help="of the prompt; its start is enough where no other key begins so"
    )
    parser.add_argument("--turn", type=int, help="only this turn; the first is 0")
    parser.add_argument("--sample", type=int, help="only this sample; the first is 0")
    parser.add_argument("--ids", action="store_true", help="print the token ids too")
    add_directory(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    enter(arguments)
    folder = RESULTS / arguments.dataset
    if not (folder / "prompts.jsonl.zst").is_file():
        known = sorted(path.parent.name for path in RESULTS.glob("*/prompts.jsonl.zst"))
        first = f"run `{again(arguments, 'prompts')}` first"
        raise EyasError(f"{folder}: no prompts there; {_hint(arguments.dataset, known) or first}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack letters
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    prompt = find(folder / "prompts.jsonl.zst", arguments.key)
    for style, text in lines(folder, prompt, arguments.turn, arguments.sample, ids=arguments.ids):
        print(f"\x1b[{style}m{text}\x1b[0m" if coloured and style and text else text)


def find(path: Path, key: str) -> Prompt:
    """The prompt of that key, or of the only key that begins so."""
    from eyas.recordfile import read_records
    from eyas.records import Prompt

    begins: list[Prompt] = []
    keys = []
    for prompt in read_records(path, Prompt):
        if prompt.key == key:
            return prompt
        keys.append(prompt.key)
        if prompt.key.startswith(key):
            begins.append(prompt)
    if len(begins) == 1:
        return begins[0]
    if begins:
        some = ", ".join(one.key for one in begins[:NEAR])
        raise EyasError(
            visible(
                f"{path.parent.name}: {len(begins):,} keys begin with {key!r}: {some}, …; give more of it"
            )
        )
    some = ", ".join([*keys[:NEAR], *["…"] * (len(keys) > NEAR)])
    there = f"it has {len(keys):,} prompts{': ' * bool(keys)}{some}"
    raise EyasError(
        visible(f"{path.parent.name}: no prompt has the key {key!r}; {_hint(key, keys) or there}")
    )


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known[:ALIKE], n=NEAR, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else ""


Line = tuple[str, str]  # style and text


def lines(folder: Path, prompt: Prompt, turn: int | None, sample: int | None, *, ids: bool) -> Iterator[Line]:
    """The conversation: what was asked, each answer to it with its verdict, and how it went on."""
    from eyas.records import Outcome, Response
    from eyas.verdicts import read_verdicts

    def chosen(records: Iterator[Any]) -> dict[tuple[int, int], Any]:
        found = {(one.turn, one.sample): one for one in records if one.key == prompt.key}
        return {
            (at, number): one
            for (at, number), one in sorted(found.items())
            if turn in (None, at) and sample in (None, number)
        }

    outcomes: dict[tuple[int, int], Outcome] = chosen(_records(folder / "outcomes.jsonl.zst", Outcome))
    responses: dict[tuple[int, int], Response] = chosen(_records(folder / "responses.jsonl.zst", Response))
    judged = folder / "verdicts.parquet"
    verdicts: dict[tuple[int, int], Verdict] = chosen(read_verdicts(judged) if judged.is_file() else iter(()))
    origin = prompt.origin
    yield BOLD, visible(f"{folder.name} {prompt.key}")
    yield DIM, visible(f"{origin.file} row {origin.row:,}, read as {origin.source}")
    if prompt.tools:
        yield from _head(BLUE, "tools")
        for tool in prompt.tools:
            yield "", visible(json.dumps(tool, ensure_ascii=False))
    for at in range(len(prompt.turns) + 1):
        for message in prompt.turns[at - 1].messages if at else prompt.messages:
            yield from _message(message)
        units = [unit for unit in outcomes if unit[0] == at]
        for unit in units:
            if unit in responses:
                yield from _answer(unit, responses[unit], verdicts.get(unit), ids=ids)
            else:
                one = outcomes[unit]
                why = f": {one.reason}" if one.reason else ""
                yield from _head(
                    RED, f"turn {unit[0]}, sample {unit[1]}: {one.status.replace('_', ' ')}{why}"
                )
        if not outcomes and (turn, sample) == (None, None):
            yield from _head(DIM, "not answered yet")
            return
    if (turn, sample) != (None, None) and not outcomes:
        raise EyasError(
            f"{folder.name} {visible(prompt.key)} has no such turn or sample; leave out --turn and --sample to see all"
        )


def _records(path: Path, kind: type[Any]) -> Iterator[Any]:
    from eyas.recordfile import read_records

    return read_records(path, kind) if path.is_file() else iter(())


def _head(style: str, text: str) -> Iterator[Line]:
    yield "", ""
    yield style, visible(f"── {text} ──")


def _text(text: str) -> Iterator[Line]:
    for line in text.split("\n"):
        yield "", visible(line)


def _message(message: Message) -> Iterator[Line]:
    named = f" {message.name}" if message.name else ""
    yield from _head(BLUE, f"{message.role}{named}")
    yield from _text(message.content)
    for call in message.tool_calls or []:
        yield "", visible(f"calls {call}")


def _ended_by(response: Response) -> str:
    """The stop token as people know it, and its id."""
    matched = response.finish.matched
    text = next((text for text, token in response.added_tokens.items() if token == matched), None)
    return repr(matched) if text is None else f"{text} (token {matched})"


def _answer(
    unit: tuple[int, int], response: Response, verdict: Verdict | None, *, ids: bool
) -> Iterator[Line]:
    from eyas.report.examples import parts

    turn, sample = unit
    judged = "not judged yet"
    if verdict is not None:
        judged = "accepted" if verdict.accepted else f"rejected: {'; '.join(verdict.reasons)}"
    style = DIM if verdict is None else GREEN if verdict.accepted else RED
    yield from _head(style, f"turn {turn}, sample {sample}: {judged}")
    facts = [f"{number(len(response.output_ids))} tokens"]
    if verdict is not None:
        facts += [
            f"{number(verdict.reasoning_tokens)} reasoning ({verdict.reasoning_state.replace('_', ' ')})",
            f"{number(verdict.answer_tokens)} answer",
        ]
    facts.append(
        f"cut at the limit of {number(response.effective_max_new)}"
        if response.finish.type == "length"
        else f"ended by {_ended_by(response)}"
    )
    if response.constrained:
        facts.append("shaped by a grammar, so off-policy")
    if verdict is not None and verdict.marks:
        facts.append(f"marks: {'; '.join(verdict.marks)}")
    yield DIM, visible(", ".join(facts))
    thought, answer = parts(response.text, response.text_ends, verdict.reasoning_tokens if verdict else 0)
    if thought:
        yield from _head(BLUE, "reasoning")
        yield from _text(thought)
    yield from _head(BLUE, "answer")
    yield from _text(answer.strip("\n") or "(empty)")
    if ids:
        for name, numbers in (("prompt_ids", response.prompt_ids), ("output_ids", response.output_ids)):
            yield from _head(DIM, f"{name}, {number(len(numbers))}")
            yield "", " ".join(map(str, numbers))
