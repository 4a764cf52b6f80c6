"""Training rows are the ids that were sent and came back, with a mask over what came back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from helpers import digest, prompt, response
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.config import TrainSettings
from eyas.errors import EyasError
from eyas.recordfile import write_records
from eyas.records import Finish, Prompt, Response, TrainMetadata, TrainRow, Verdict
from eyas.tables import read_table
from eyas.train import SCHEMA, train
from eyas.verdicts import write_verdicts


def verdict(answer: Response, **changes: Any) -> Verdict:
    fields: dict[str, Any] = {
        "key": answer.key,
        "turn": answer.turn,
        "sample": answer.sample,
        "accepted": True,
        "reasons": [],
        "marks": [],
        "truncated": False,
        "constrained": answer.constrained,
        "reasoning_state": "closed",
        "prompt_tokens": len(answer.prompt_ids),
        "reasoning_tokens": 3,
        "answer_tokens": len(answer.output_ids) - 3,
        "output_tokens": len(answer.output_ids),
    }
    return Verdict(**(fields | changes))


def rejected(answer: Response) -> Verdict:
    return verdict(answer, accepted=False, reasons=["empty answer"])


def made(
    folder: Path, prompts: list[Prompt], responses: list[Response], verdicts: list[Verdict]
) -> list[TrainRow]:
    files = folder / "prompts.jsonl.zst", folder / "responses.jsonl.zst", folder / "verdicts.parquet"
    write_records(files[0], prompts)
    write_records(files[1], responses)
    write_verdicts(files[2], verdicts)
    rows = train(TrainSettings(dataset="d"), *files, folder / "train.parquet")
    read = list(read_table(folder / "train.parquet", TrainRow))
    assert rows == len(read)
    return read


def test_a_row_is_prompt_and_output_with_a_mask_over_exactly_the_output(tmp_path: Path) -> None:
    answer = response("k", sample=2, prompt_ids=[1, 163606, 7], output_ids=[10, 11, 12, 13, 2])
    rows = made(tmp_path, [prompt("k", "Why?")], [answer], [verdict(answer)])
    assert rows == [
        TrainRow(
            id="d/k:0:2",
            primary_id="d/k",
            input_ids=[1, 163606, 7, 10, 11, 12, 13, 2],
            loss_mask=[0, 0, 0, 1, 1, 1, 1, 1],
            metadata=TrainMetadata(
                dataset="d",
                group=digest("Why?")[:16],
                request=digest("a"),
                finish="stop",
                truncated=False,
                constrained=False,
                reasoning_tokens=3,
                answer_tokens=2,
            ),
        )
    ]
    assert sum(rows[0].loss_mask) == rows[0].metadata.reasoning_tokens + rows[0].metadata.answer_tokens


IDS = st.lists(st.integers(0, 2**31 - 1), max_size=12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(IDS, IDS, st.booleans()), max_size=8))
def test_mask_and_ids_are_aligned_whatever_was_said(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[list[int], list[int], bool]]
) -> None:
    answers = [
        response(f"k{n}", name=str(n), prompt_ids=asked, output_ids=said, text_lengths="0" * len(said))
        for n, (asked, said, _) in enumerate(drawn)
    ]
    rows = made(
        tmp_path_factory.mktemp("train"),
        [prompt(answer.key) for answer in answers],
        answers,
        [
            verdict(answer) if good else rejected(answer)
            for answer, (_, _, good) in zip(answers, drawn, strict=True)
        ],
    )
    kept = [(asked, said) for asked, said, good in drawn if good]
    assert len(rows) == len(kept)
    for row, (asked, said) in zip(rows, kept, strict=True):
        assert row.input_ids == asked + said
        assert len(row.loss_mask) == len(row.input_ids)
        assert set(row.loss_mask) <= {0, 1}
        assert [token for token, bit in zip(row.input_ids, row.loss_mask, strict=True) if bit] == said
        assert row.loss_mask == sorted(row.loss_mask), "the answer follows the prompt, whole"


def test_what_became_of_an_answer_travels_with_it(tmp_path: Path) -> None:
    answer = response(finish=Finish(type="length"), constrained=True)
    (row,) = made(tmp_path, [prompt("k")], [answer], [verdict(answer, truncated=True)])
    assert (row.metadata.finish, row.metadata.truncated, row.metadata.constrained) == ("length", True, True)


def test_rejected_rows_are_left_out_and_the_order_stays(tmp_path: Path) -> None:
    prompts = [prompt(key, key) for key in "zamkb"]
    answers = [response(key, sample) for key in "zamkb" for sample in (0, 1)]
    verdicts = [rejected(a) if (a.key, a.sample) in (("z", 0), ("k", 1)) else verdict(a) for a in answers]
    rows = made(tmp_path, prompts, answers, verdicts)
    assert [row.id for row in rows] == [
        f"d/{a.key}:0:{a.sample}" for a, v in zip(answers, verdicts, strict=True) if v.accepted
    ]
    assert [row.metadata.group for row in rows] == [digest(row.primary_id[2:])[:16] for row in rows]


def test_prompts_without_an_answer_are_passed_over(tmp_path: Path) -> None:
    answers = [response("b"), response("d")]
    rows = made(tmp_path, [prompt(key, key) for key in "abcde"], answers, [verdict(a) for a in answers])
    assert [(row.primary_id, row.metadata.group) for row in rows] == [
        ("d/b", digest("b")[:16]),
        ("d/d", digest("d")[:16]),
    ]


@pytest.mark.parametrize("responses", [[], [response()]])
def test_a_table_without_rows_has_every_column(tmp_path: Path, responses: list[Response]) -> None:
    assert made(tmp_path, [prompt("k")], responses, [rejected(r) for r in responses]) == []
    assert pq.read_schema(tmp_path / "train.parquet").equals(SCHEMA)


@pytest.mark.parametrize(
    ("verdicts", "message"),
    [
        ([], "verdicts.parquet: does not match .*responses.jsonl.zst; delete it and run again"),
        ([verdict(response("a"))], "verdicts.parquet: does not match"),
        ([verdict(response(key)) for key in "ba"], "verdicts.parquet: does not match"),
        ([verdict(response(key, sample=1)) for key in "ab"], "verdicts.parquet: does not match"),
        ([verdict(response(key), turn=1) for key in "ab"], "verdicts.parquet: does not match"),
        ([verdict(response(key)) for key in "abc"], "verdicts.parquet: has more rows than"),
    ],
)
def test_verdicts_on_other_answers_are_an_error(
    tmp_path: Path, verdicts: list[Verdict], message: str
) -> None:
    with pytest.raises(EyasError, match=message):
        made(tmp_path, [prompt(key) for key in "abc"], [response(key) for key in "ab"], verdicts)
    assert not (tmp_path / "train.parquet").exists()


@pytest.mark.parametrize("keys", ["a", "ac", "ba", ""])
def test_an_answer_without_its_prompt_is_an_error_even_if_it_is_rejected(tmp_path: Path, keys: str) -> None:
    answers = [response(key) for key in "ab"]
    with pytest.raises(EyasError, match=r"responses.jsonl.zst: '.' is not in .*prompts.jsonl.zst, or out of"):
        made(tmp_path, [prompt(key) for key in keys], answers, [rejected(answer) for answer in answers])


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    answers = [response(f"{n}") for n in range(50)]
    for name in "ab":
        made(tmp_path / name, [prompt(f"{n}") for n in range(50)], answers, [verdict(a) for a in answers])
    assert (tmp_path / "a" / "train.parquet").read_bytes() == (tmp_path / "b" / "train.parquet").read_bytes()
