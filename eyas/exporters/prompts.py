"""The prompts behind training rows, which come in another order and of all datasets: looked up on disk, in flat memory."""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from eyas.errors import EyasError
from eyas.recordfile import read_records, scratch
from eyas.records import Prompt, TrainRow


class PromptIndex:
    """Prompts by the rows that answer them; use as a context manager. 24 bytes of memory a prompt.

    paths: prompts.jsonl.zst of each dataset, in a folder of the dataset's name. beside: next to what the scratch file lies.
    """

    def __init__(self, paths: Sequence[Path], beside: Path) -> None:
        self._paths, self._beside = paths, beside
        self._stack = ExitStack()

    def __enter__(self) -> PromptIndex:
        with ExitStack() as stack:
            file = stack.enter_context(scratch(self._beside)) / "prompts"
            names, places = array.array("Q"), array.array("Q", [0])
            with file.open("wb") as sink:
                for path in self._paths:
                    for prompt in read_records(path, Prompt):
                        names.append(_hash(f"{path.parent.name}/{prompt.key}"))
                        places.append(places[-1] + sink.write(msgspec.json.encode(prompt)))
            self._places = np.frombuffer(places, np.uint64)
            hashes = np.frombuffer(names, np.uint64)
            self._order = np.argsort(hashes, kind="stable")
            self._hashes = hashes[self._order]
            self._file = stack.enter_context(file.open("rb"))
            self._decode = msgspec.json.Decoder(Prompt).decode
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def of(self, row: TrainRow) -> Prompt:
        """The prompt that `row` answers. Raises EyasError if no file has it."""
        name = _hash(row.primary_id)
        first, last = (
            int(np.searchsorted(self._hashes, np.uint64(name), side)) for side in ("left", "right")
        )
        for at in self._order[first:last]:
            start, end = int(self._places[at]), int(self._places[at + 1])
            self._file.seek(start)
            prompt = self._decode(self._file.read(end - start))
            if row.primary_id == f"{row.metadata.dataset}/{prompt.key}":
                return prompt
        raise EyasError(
            f"results/{row.metadata.dataset}/prompts.jsonl.zst: has no prompt {row.primary_id!r}, which a training row answers; "
            f"delete it and run again to rebuild it"
        )


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
