"""What a training row was asked, looked up in any order: earlier answers included, in flat memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from helpers import prompt, response

from eyas.config import ModelConfig
from eyas.exporters.prompts import PromptIndex
from eyas.plugins import Reasoning, registry
from eyas.recordfile import write_records
from eyas.records import Message, Prompt, Response, TrainMetadata, TrainRow, Turn

MODEL = ModelConfig(id="m", reasoning={"name": "none"})
LATER = 2  # turns behind the first


def row(key: str, turn: int, sample: int = 0) -> TrainRow:
    metadata = TrainMetadata(
        dataset="d",
        group=key,
        request=key,
        finish="stop",
        truncated=False,
        constrained=False,
        reasoning_tokens=0,
        answer_tokens=1,
    )
    return TrainRow(
        id=f"d/{key}:{turn}:{sample}",
        primary_id=f"d/{key}",
        input_ids=[1, 2],
        loss_mask=[0, 1],
        metadata=metadata,
    )


def talk(key: str, padding: str = "") -> Prompt:
    turns = [
        Turn(calls=[], messages=[Message(role="user", content=f"{key} {turn}?{padding}")])
        for turn in range(1, LATER + 1)
    ]
    return prompt(key, f"{key} 0?{padding}", turns=turns)


def answer(key: str, turn: int, sample: int = 0, padding: str = "", **changes: Any) -> Response:
    said = response(key, sample, text=f"{key} {turn} {sample}!{padding}", **changes)
    return msgspec.structs.replace(said, turn=turn)


def index(folder: Path, prompts: Iterable[Prompt], responses: Iterable[Response]) -> PromptIndex:
    files = [folder / "d" / f"{name}.jsonl.zst" for name in ("prompts", "responses")]
    for file, records in zip(files, (prompts, responses), strict=True):
        write_records(file, records)
    reasoning = registry().create("reasoning", "none", {}, "model.reasoning")
    assert isinstance(reasoning, Reasoning)
    return PromptIndex(files[:1], files[1:], MODEL, reasoning, folder / "out")


def test_rows_in_any_order_get_the_answers_of_their_own_sample(tmp_path: Path) -> None:
    """Some keys have no answer, or none to a later turn; a budget or a refusal leaves them so."""
    prompts = [talk("a"), talk("none"), talk("b"), talk("short")]
    answered = [("a", 0, 3), ("a", 1, 2), ("b", 0, 3), ("short", 0, 1)]
    responses = [answer(key, turn, sample) for key, sample, turns in answered for turn in range(turns)]
    asked = [(one.key, one.turn, one.sample) for one in responses]
    random.Random(1).shuffle(asked)
    with index(tmp_path, prompts, responses) as found:
        for key, turn, sample in asked:
            messages = found.of(row(key, turn, sample)).messages
            assert [message.content for message in messages] == [
                text
                for at in range(turn + 1)
                for text in ([f"{key} {at - 1} {sample}!"] if at else []) + [f"{key} {at}?"]
            ]
            assert [message.role for message in messages] == [*["user", "assistant"] * turn, "user"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"], "nothing is left on disk"


def test_an_answer_that_does_not_lead_on_leaves_messages_out(tmp_path: Path) -> None:
    cut = answer("a", 1, finish=msgspec.structs.replace(response().finish, type="length", matched=None))
    with index(tmp_path, [talk("a")], [answer("a", 0), cut, answer("a", 2)]) as found:
        assert [len(found.of(row("a", turn)).messages) for turn in range(3)] == [1, 3, 3]


def test_memory_holds_one_conversation_of_many(tmp_path: Path) -> None:
    padding = "so on " * 20_000  # 120 kB in each message: 144 MB in all, 0.7 MB a conversation
    keys = [f"k{n}" for n in range(200)]
    answers = (answer(key, turn, padding=padding) for key in keys for turn in range(LATER + 1))
    made = index(tmp_path, (talk(key, padding) for key in keys), answers)
    tracemalloc.start()
    try:
        with made as found:
            for key in reversed(keys):
                assert len(found.of(row(key, LATER)).messages) == 2 * LATER + 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16e6, f"{peak / 1e6:.1f} MB"
