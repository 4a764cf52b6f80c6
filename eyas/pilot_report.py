"""What a pilot saw: results/plan/<dataset>.pilot.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from eyas.errors import EyasError
from eyas.records import Record


class Observation(Record, frozen=True):
    """One answer that was asked for.

    kind: `answer` is the run's own; `probe` was asked for its speed alone, and may have been cut off like a running one;
    `running` was not finished when the pilot was stopped, and output_tokens is what it had by then at the usual speed.
    reasoning_tokens, accepted, truncated: null where nobody looked. timed: it was asked by this pilot, or by a run like it, and so tells the speed; others were in the journal before, from whatever server
    under whatever load. started, finished: Unix time in s; for `running`, finished is when it was stopped.
    """

    kind: Literal["answer", "probe", "running"]
    key: str
    turn: int
    sample: int
    timed: bool
    started: float
    finished: float
    prompt_bytes: int
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int | None = None
    accepted: bool | None = None
    truncated: bool | None = None


class Journalled(Record, frozen=True):
    """How much of the whole run is answered, by the pilot and before it.

    busy: begin and end, in Unix s, of stretches of time with one of these answers in flight, in order and apart; of answers that were adopted nobody
    knows when they were asked. at: when it was counted, Unix time in s.
    """

    at: float
    answers: int
    output_tokens: int
    busy: list[list[float]]


class PilotReport(Record, frozen=True):
    """What the pilot of a dataset saw.

    prompt_bytes: for each answer that the whole run plans, the size of its conversation's first prompt, messages and tools
    as JSON. without_answer: of those that the pilot planned, how many are refused or not reached. servers: manifests, by
    id, of who was asked now, and so whose speed it is.
    """

    dataset: str
    prompt_bytes: list[int]
    without_answer: int
    journalled: Journalled
    servers: dict[str, dict[str, Any]]
    observations: list[Observation]


def read_pilot(path: Path) -> PilotReport:
    """A pilot's report, typed. Raises EyasError for a file that is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PilotReport)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EyasError(f"{path}: {error}; delete it and run `snakemake plan --cores 1` again") from None
