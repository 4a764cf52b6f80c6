"""What a trainer's maximum length and draft vocabulary cost, against counts by hand and a brute-force reference."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.fit import DRAFT_VOCABULARIES, MAX_LENGTHS, fit_of, mix_fit
from eyas.records import TrainMetadata, TrainRow
from eyas.tables import write_table
from eyas.train import SCHEMA


def row(
    prompt: int, reasoning: int, answer: int, dataset: str = "d", ids: list[int] | None = None
) -> TrainRow:
    output = ids or [5] * (reasoning + answer)
    return TrainRow(
        id="d/k:0:0",
        primary_id="d/k",
        input_ids=[9] * prompt + output,
        loss_mask=[0] * prompt + [1] * len(output),
        metadata=TrainMetadata(
            dataset=dataset,
            group="g",
            request="r",
            finish="stop",
            truncated=False,
            constrained=False,
            reasoning_tokens=reasoning,
            answer_tokens=answer,
        ),
    )


@pytest.fixture
def table(tmp_path: Path):
    def write(*rows: TrainRow) -> Path:
        write_table(tmp_path / "train.parquet", SCHEMA, rows)
        return tmp_path / "train.parquet"

    return write


def test_each_maximum_length_tells_rows_and_tokens_lost_by_reasoning_and_answer(table):
    fit = fit_of(
        table(row(1_000, 1_000, 48), row(1_000, 1_000, 1_000), row(2_048, 10, 10), row(100, 9_000, 20))
    )
    assert [cut.max_length for cut in fit.cuts] == [2_048, 4_096, 8_192, 16_384]
    first, second, third, last = fit.cuts
    assert (first.rows_cut, first.rows_lost, first.tokens_of_cut) == (3, 1, 2_000 + 20 + 9_020)
    assert (first.reasoning_lost, first.answer_lost) == (10 + 9_000 - 1_948, 952 + 10 + 20)
    assert (second.rows_cut, second.rows_lost) == (1, 0)
    assert (third.reasoning_lost, third.answer_lost) == (9_000 - 8_092, 20)
    assert (last.rows_cut, last.rows_lost, last.reasoning_lost, last.answer_lost) == (0, 0, 0, 0)
    assert (fit.rows, fit.reasoning_tokens, fit.answer_tokens) == (4, 11_010, 1_078)


def test_coverage_counts_supervised_tokens_only(table):
    """40,000 ids once, one id 60,000 times; the prompt's id 9 counts nothing."""
    rare = list(range(100, 40_100))
    fit = fit_of(table(row(5_000, 0, 60_000, ids=[5] * 60_000), row(5_000, 0, 40_000, ids=rare)))
    assert fit.ids == 40_001
    assert fit.coverage == {"16000": (60_000 + 15_999) / 100_000, "32000": (60_000 + 31_999) / 100_000}


def test_a_dataset_is_measured_by_the_draft_vocabulary_of_the_whole(table):
    large = [token for token in range(32_000) for _ in range(2)]
    foreign = [50_000] * 5 + [*range(60_000, 60_095)]
    found = mix_fit(table(row(1, 0, 64_000, "large", large), row(1, 0, 100, "small", foreign)))
    # The 5 times frequent id is in, the 95 that occur once are not.
    assert found.coverage_of["small"] == {"16000": 0.05, "32000": 0.05}
    assert found.coverage_of["large"]["32000"] == round(31_999 / 32_000, 6)
    assert found.total.rows == 2


def test_a_table_without_rows_has_no_shares(table):
    found = mix_fit(table())
    assert (found.total.rows, found.total.ids, found.coverage_of) == (0, 0, {})
    assert set(found.total.coverage.values()) == {None}


lengths = st.tuples(st.integers(0, 17_000), st.integers(0, 9_000), st.integers(0, 9_000))


@settings(max_examples=25, deadline=None)
@given(st.lists(lengths, max_size=4))
def test_cuts_are_what_slicing_the_rows_would_lose(tmp_path_factory, shapes):
    path = tmp_path_factory.mktemp("fit") / "train.parquet"
    rows = [row(*shape) for shape in shapes]
    write_table(path, SCHEMA, rows)
    for cut in fit_of(path).cuts:
        lost: Counter[str] = Counter()
        for (prompt, reasoning, answer), made in zip(shapes, rows, strict=True):
            kinds = ["prompt"] * prompt + ["reasoning"] * reasoning + ["answer"] * answer
            lost.update(kinds[cut.max_length :])
            if len(kinds) > cut.max_length:
                lost["rows"] += 1
                lost["gone"] += not any(made.loss_mask[: cut.max_length])
        assert (cut.reasoning_lost, cut.answer_lost) == (lost["reasoning"], lost["answer"])
        assert (cut.rows_cut, cut.rows_lost) == (lost["rows"], lost["gone"])


def test_the_sizes_are_those_that_the_docs_name():
    text = Path(__file__).parent.parent.joinpath("docs/records.md").read_text()
    assert all(f"{size:,}" in text for size in (*MAX_LENGTHS, *DRAFT_VOCABULARIES))
