"""The mix: shares as asked, no row twice, no prompt on both sides, the same rows whatever the machine."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from eyas.config import MixSettings
from eyas.errors import EyasError
from eyas.mix import MixReport, is_held_out, mix, order_hash, rows_in_brief
from eyas.records import TrainMetadata, TrainRow
from eyas.tables import read_table, write_table
from eyas.train import SCHEMA

Tables = dict[str, list[TrainRow]]


def row(dataset: str, n: int, tokens: int = 4, group: str | None = None) -> TrainRow:
    return TrainRow(
        id=f"{dataset}/{n}:0:0",
        primary_id=f"{dataset}/{n}",
        input_ids=[1, n, *range(tokens)],
        loss_mask=[0, 0, *[1] * tokens],
        metadata=TrainMetadata(
            dataset=dataset,
            group=group or f"{dataset}{n}",
            request="0" * 32,
            finish="stop",
            truncated=False,
            constrained=False,
            reasoning_tokens=tokens // 2,
            answer_tokens=tokens - tokens // 2,
        ),
    )


@pytest.fixture
def tables() -> Tables:
    """Three datasets of different sizes and lengths of answers; neighbours share a prompt."""
    return {
        "a": [row("a", n, 1 + n % 7, f"g{n // 3}") for n in range(600)],
        "b": [row("b", n, 40 + n % 30, f"g{n // 2}") for n in range(200)],
        "c": [row("c", n, 11, f"c{n}") for n in range(50)],
    }


class Mixed:
    """A mix and what came of it."""

    def __init__(self, folder: Path, tables: Tables, group_rows: int = 64, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(tables)
        for name in names:
            write_table(folder / f"{name}.parquet", SCHEMA, tables[name], group_rows)
        self.out = [folder / name for name in ("train.parquet", "eval.parquet", "mix.json")]
        asked = MixSettings(
            **{"datasets": names, "weights": None, "eval_share": 0.1, "seed": 0, **settings}  # type: ignore[arg-type]
        )
        self.report: MixReport = mix(asked, [folder / f"{name}.parquet" for name in names], *self.out)
        self.train, self.eval = (list(read_table(path, TrainRow)) for path in self.out[:2])

    def tokens(self) -> Counter[str]:
        counted: Counter[str] = Counter()
        for taken in self.train:
            counted[taken.metadata.dataset] += sum(taken.loss_mask)
        return counted


@pytest.fixture
def made(tmp_path: Path, tables: Tables) -> Callable[..., Mixed]:
    def make(name: str = "mix", **settings: Any) -> Mixed:
        return Mixed(tmp_path / name, settings.pop("tables", tables), **settings)

    return make


def ids(rows: list[TrainRow]) -> list[str]:
    return [taken.id for taken in rows]


def test_without_weights_every_row_is_taken_once_and_unchanged(
    made: Callable[..., Mixed], tables: Tables
) -> None:
    mixed = made()
    given = {one.id: one for rows in tables.values() for one in rows}
    assert sorted(ids(mixed.train + mixed.eval)) == sorted(given)
    assert {taken.id: taken for taken in mixed.train + mixed.eval} == given


def test_rows_of_one_prompt_are_on_one_side_across_datasets(made: Callable[..., Mixed]) -> None:
    mixed = made()
    sides = [{taken.metadata.group for taken in side} for side in (mixed.train, mixed.eval)]
    assert all(sides) and not sides[0] & sides[1]
    assert all(is_held_out(group, 0.1) for group in sides[1])


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_or_nothing_can_be_held_out(made: Callable[..., Mixed], share: float) -> None:
    mixed = made(eval_share=share)
    assert (len(mixed.train), len(mixed.eval)) == ((850, 0) if share == 0 else (0, 850))
    assert pq.read_schema(mixed.out[0]).equals(SCHEMA) and pq.read_schema(mixed.out[1]).equals(SCHEMA)


def test_the_held_out_share_is_as_asked_and_grows_without_exchange() -> None:
    groups = [f"group {n}" for n in range(20_000)]
    held = {share: {g for g in groups if is_held_out(g, share)} for share in (0.01, 0.05, 0.5)}
    for share, chosen in held.items():
        assert len(chosen) / len(groups) == pytest.approx(share, abs=0.012)
    assert held[0.01] < held[0.05] < held[0.5]


def test_rows_are_shuffled_by_seed_and_id(made: Callable[..., Mixed]) -> None:
    zero, one = made("zero"), made("one", seed=1)
    for mixed, seed in ((zero, 0), (one, 1)):
        for side in (mixed.train, mixed.eval):
            assert ids(side) == sorted(ids(side), key=lambda row_id: order_hash(seed, row_id))
    assert ids(zero.train) != ids(one.train)
    assert sorted(ids(zero.train)) == sorted(ids(one.train)), "the seed moves no row to the other side"
    first = Counter(taken.metadata.dataset for taken in zero.train[: len(zero.train) // 2])
    assert first["a"] / first["b"] == pytest.approx(3, rel=0.4)


WEIGHTS = [
    {"a": 1.0, "b": 1.0, "c": 1.0},
    {"a": 5.0, "b": 3.0, "c": 2.0},
    {"a": 1.0, "b": 100.0, "c": 1.0},
    {"a": 0.02, "b": 0.001, "c": 0.003},
    {"a": 2.0, "b": 7.0},
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_are_shares_of_supervised_tokens(
    made: Callable[..., Mixed], tables: Tables, weights: dict[str, float]
) -> None:
    mixed, everything = made(weights=weights), made("all")
    available, tokens = everything.tokens(), mixed.tokens()
    scarcest = min(weights, key=lambda name: available[name] / weights[name])
    assert tokens[scarcest] == available[scarcest], "the scarcest dataset is used up"
    for name in weights:
        wanted = available[scarcest] * weights[name] / weights[scarcest]
        longest = max(sum(one.loss_mask) for one in tables[name])
        assert wanted - 0.5 <= tokens[name] < wanted + longest
    assert set(tokens) == set(weights)
    assert len(set(ids(mixed.train))) == len(mixed.train)
    held_out = [one.id for one in everything.eval if one.metadata.dataset in weights]
    assert ids(mixed.eval) == held_out, "weights do not touch what is held out"


def test_a_dataset_without_a_weight_gives_nothing_to_either_side(made: Callable[..., Mixed]) -> None:
    everything, mixed = made("all"), made(weights={"a": 1.0, "b": 1.0})
    assert everything.report.eval["c"].rows > 0
    assert {taken.metadata.dataset for taken in mixed.train + mixed.eval} == {"a", "b"}
    assert mixed.report.train["c"].rows == mixed.report.eval["c"].rows == 0
    assert mixed.report.dropped_by_weights["c"].rows == 50


def test_what_weights_take_is_the_start_of_the_shuffle(made: Callable[..., Mixed]) -> None:
    less, more = made("less", weights={"a": 1.0, "b": 8.0}), made("more", weights={"a": 1.0, "b": 20.0})
    taken = [[i for i in ids(mixed.train) if i.startswith("a/")] for mixed in (made("all"), less, more)]
    assert 0 < len(taken[2]) < len(taken[1]) < len(taken[0])
    assert taken[1] == taken[0][: len(taken[1])] and taken[2] == taken[0][: len(taken[2])]


@pytest.mark.parametrize("weights", [None, {"a": 1.0, "b": 3.0}])
def test_the_report_counts_rows_and_tokens_by_side_and_dataset(
    made: Callable[..., Mixed], tables: Tables, weights: dict[str, float] | None
) -> None:
    mixed = made(weights=weights)
    told = json.loads(mixed.out[2].read_text())
    assert list(told) == ["train", "eval", "dropped_by_weights", "fit"]
    assert told["fit"]["total"]["rows"] == len(mixed.train)
    kept = {*ids(mixed.train), *ids(mixed.eval)}
    dropped = [one for rows in tables.values() for one in rows if one.id not in kept]
    for side, rows in (("train", mixed.train), ("eval", mixed.eval), ("dropped_by_weights", dropped)):
        for name in tables:
            own = [one for one in rows if one.metadata.dataset == name]
            assert told[side][name] == {
                "rows": len(own),
                "supervised_tokens": sum(sum(one.loss_mask) for one in own),
            }
    assert bool(dropped) == (weights is not None)


@pytest.mark.parametrize("weights", [None, {"a": 1.0, "b": 3.0, "c": 0.2}])
def test_neither_row_groups_nor_input_order_change_a_byte(
    made: Callable[..., Mixed], tables: Tables, weights: dict[str, float] | None
) -> None:
    usual = made("usual", weights=weights)
    others = [made(f"{size}", group_rows=size, weights=weights) for size in (33, 10_000)]
    backwards = {name: rows[::-1] for name, rows in tables.items()}
    others.append(made("backwards", tables=backwards, weights=weights))
    for other in others:
        for one, two in zip(usual.out, other.out, strict=True):
            assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("weights", [None, {"a": 1.0, "b": 3.0, "c": 0.2}])
def test_several_buckets_give_the_same_rows_in_the_same_order(
    made: Callable[..., Mixed], monkeypatch: pytest.MonkeyPatch, weights: dict[str, float] | None
) -> None:
    one = made("one", weights=weights)
    monkeypatch.setattr("eyas.mix.BUCKET_TOKENS", 500)
    many = made("many", weights=weights)
    assert pq.ParquetFile(many.out[0]).num_row_groups > 10
    assert (many.train, many.eval, many.report) == (one.train, one.eval, one.report)
    assert sorted(path.name for path in many.out[0].parent.iterdir()) == [
        "a.parquet",
        "b.parquet",
        "c.parquet",
        "eval.parquet",
        "mix.json",
        "train.parquet",
    ]


def test_row_groups_hold_so_many_ids_and_no_fewer_rows_than_that(
    made: Callable[..., Mixed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.mix.GROUP_IDS", 1_000)
    file = pq.ParquetFile(made("one", weights=None).out[0])
    ids = sum(map(len, file.read(["input_ids"])["input_ids"]))
    assert ids / 1_000 <= file.num_row_groups <= 1.2 * ids / 1_000 + 1


def test_a_dataset_without_rows_is_counted_and_harmless(made: Callable[..., Mixed], tables: Tables) -> None:
    mixed, without = made(tables={**tables, "d": []}), made("without")
    assert (mixed.train, mixed.eval) == (without.train, without.eval)
    assert (mixed.report.train["d"].rows, mixed.report.eval["d"].supervised_tokens) == (0, 0)


def test_a_flipped_bit_in_a_table_is_an_error_or_changes_no_row(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    write_table(source, SCHEMA, [row("a", n, 50) for n in range(200)], 64)
    whole = source.read_bytes()
    out = [tmp_path / name for name in ("train.parquet", "eval.parquet", "mix.json")]
    settings = MixSettings(datasets=["a"], weights=None, eval_share=0.1, seed=0)
    mix(settings, [source], *out)
    mixed = [path.read_bytes() for path in out]
    noticed = 0
    for place in range(100, len(whole) * 3 // 4, 97):  # the pages; the footer stands behind them
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        source.write_bytes(damaged)
        try:
            mix(settings, [source], *out)
        except EyasError as error:
            noticed += 1
            assert re.search(r"a\.parquet: damaged .*; delete it and run again", str(error))
        assert [path.read_bytes() for path in out] == mixed
    assert noticed > 20


def test_datasets_without_any_rows_give_tables_without_rows(made: Callable[..., Mixed]) -> None:
    mixed = made(tables={"a": [], "b": []})
    assert mixed.train == mixed.eval == []


def test_a_weighted_dataset_without_rows_is_an_error(made: Callable[..., Mixed], tables: Tables) -> None:
    with pytest.raises(EyasError, match=r"mix\.weights\.d: the dataset has no training rows.*leave it out"):
        made(tables={**tables, "d": []}, weights={"a": 1.0, "d": 1.0})


def test_the_mix_keeps_a_few_bytes_a_row(tmp_path: Path) -> None:
    rows = 30_000
    write_table(tmp_path / "train.parquet", SCHEMA, [row("a", n) for n in range(rows)])
    settings = MixSettings(datasets=["a"], weights=None, eval_share=0.1, seed=0)
    tracemalloc.start()
    try:
        brief = rows_in_brief(tmp_path / "train.parquet", settings)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(brief.order) == len(brief.held_out) == len(brief.supervised) == rows
    assert most < 40 * rows
