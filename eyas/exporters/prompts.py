"""The prompts behind training rows, which come in another order and of all datasets: looked up on disk, in flat memory.

What a later turn was asked holds the target's own earlier answers. They are in the responses, whatever the checks said of
them, and lead on as they did in generation.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from eyas.config import ModelConfig
from eyas.errors import EyasError
from eyas.plugins import Reasoning
from eyas.recordfile import read_records, scratch
from eyas.records import Message, Prompt, Record, Response, TrainRow, unit_place
from eyas.turns import Ended, next_turn


class _Asked(Record, frozen=True):
    """One key: what its first turn was asked, and by sample what each answer added for the turn behind it."""

    prompt: Prompt
    added: dict[int, list[list[Message]]]


class PromptIndex:
    """Prompts by the rows that answer them; use as a context manager. 24 bytes of memory a prompt, and one conversation.

    prompts: prompts.jsonl.zst of each dataset, in a folder of the dataset's name. responses: responses.jsonl.zst likewise, of
    datasets whose conversations go on. beside: next to what the scratch file lies.
    """

    def __init__(
        self,
        prompts: Sequence[Path],
        responses: Sequence[Path],
        model: ModelConfig,
        reasoning: Reasoning,
        beside: Path,
    ) -> None:
        self._prompts, self._beside = prompts, beside
        self._responses = {path.parent.name: path for path in responses}
        self._model, self._reasoning = model, reasoning
        self._stack = ExitStack()

    def __enter__(self) -> PromptIndex:
        with ExitStack() as stack:
            file = stack.enter_context(scratch(self._beside)) / "prompts"
            names, places = array.array("Q"), array.array("Q", [0])
            with file.open("wb") as sink:
                for path in self._prompts:
                    for asked in self._asked(path):
                        names.append(_hash(f"{path.parent.name}/{asked.prompt.key}"))
                        places.append(places[-1] + sink.write(msgspec.json.encode(asked)))
            self._places = np.frombuffer(places, np.uint64)
            hashes = np.frombuffer(names, np.uint64)
            self._order = np.argsort(hashes, kind="stable")
            self._hashes = hashes[self._order]
            self._file = stack.enter_context(file.open("rb"))
            self._decode = msgspec.json.Decoder(_Asked).decode
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def of(self, row: TrainRow) -> Prompt:
        """The prompt that `row` answers: its messages are all that came before, earlier answers included.

        Raises EyasError if no file has it. Where an earlier answer does not lead on, messages are missing.
        """
        name = _hash(row.primary_id)
        first, last = (
            int(np.searchsorted(self._hashes, np.uint64(name), side)) for side in ("left", "right")
        )
        for at in self._order[first:last]:
            start, end = int(self._places[at]), int(self._places[at + 1])
            self._file.seek(start)
            asked = self._decode(self._file.read(end - start))
            prompt = asked.prompt
            if row.primary_id == f"{row.metadata.dataset}/{prompt.key}":
                turn, sample = unit_place(row.id)
                added = asked.added.get(sample, [])[:turn]
                return replace(prompt, messages=sum(added, prompt.messages))
        raise EyasError(
            f"results/{row.metadata.dataset}/prompts.jsonl.zst: has no prompt {row.primary_id!r}, which a training row answers; "
            f"delete it and run again to rebuild it"
        )

    def _asked(self, path: Path) -> Iterator[_Asked]:
        """The prompts of one dataset with what their answers added. Responses are in the same order; some keys have none."""
        responses = self._responses.get(path.parent.name)
        said = groupby(read_records(responses, Response) if responses else (), key=attrgetter("key"))
        key, replies = next(said, (None, iter(())))
        for prompt in read_records(path, Prompt):
            added = {}
            if key == prompt.key:
                added = self._added(prompt, replies)
                key, replies = next(said, (None, iter(())))
            yield _Asked(prompt=replace(prompt, turns=[]), added=added)
        if key is not None:
            raise EyasError(
                f"{responses}: {key!r} is not in {path}, or out of order; delete both and run again"
            )

    def _added(self, prompt: Prompt, replies: Iterable[Response]) -> dict[int, list[list[Message]]]:
        added: dict[int, list[list[Message]]] = {}
        for sample, said in groupby(replies, key=attrgetter("sample")):
            told = prompt
            for reply, _ in pairwise(said):
                try:
                    following = next_turn(told, reply.turn, reply, self._model, self._reasoning)
                except Ended:
                    break
                added.setdefault(sample, []).append(following.messages[len(told.messages) :])
                told = following
        return added


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
