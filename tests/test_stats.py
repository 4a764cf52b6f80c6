"""The numbers of one dataset, and that they always add up."""

import dataclasses
import itertools
import json
import random
import statistics
import tracemalloc

import msgspec
import numpy as np
import pytest
from made_results import train_row, verdict, write_dataset

from eyas.config import StatsSettings
from eyas.errors import EyasError
from eyas.recordfile import write_records
from eyas.records import Outcome
from eyas.stats import Ledger, Tally, bin_edges, read_stats, spread, stats
from eyas.tables import write_table
from eyas.train import SCHEMA
from eyas.verdicts import write_verdicts

VERDICTS = [
    verdict("a", 10),
    verdict("b", 20, marks=["long line"]),
    verdict("c", 40, truncated=True, reasoning_state="truncated_in_reasoning"),
    verdict("d", 100, reasons=("repeats itself", "empty answer"), truncated=True, marks=["cut"]),
    verdict("e", 30, reasons=("empty answer",), constrained=True),
]
OTHERS = (
    Outcome(key="f", turn=0, sample=0, status="refused", reason="prompt too long"),
    Outcome(key="g", turn=0, sample=0, status="failed", reason="timeout"),
    Outcome(key="h", turn=0, sample=0, status="not_needed"),
)


@pytest.fixture
def folder(tmp_path):
    return write_dataset(tmp_path / "B1", VERDICTS, others=OTHERS)


def run(folder, samples=1):
    names = ("prompts.json", "outcomes.jsonl.zst", "verdicts.parquet", "train.parquet", "stats.json")
    return stats(StatsSettings(dataset="B1", samples=samples), *(folder / name for name in names))


def test_counts_rows_and_tokens(folder):
    result = run(folder)
    assert result.planned == 8
    assert result.outcomes == {"answered": 5, "refused": 1, "failed": 1, "not_needed": 1, "not_reached": 0}
    assert result.outcome_reasons == {"refused": {"prompt too long": 1}, "failed": {"timeout": 1}}
    assert result.accepted == Tally(rows=3, tokens=70)
    assert result.rejected == Tally(rows=2, tokens=130)
    assert result.rejected_for == {
        "empty answer": Tally(rows=2, tokens=130),
        "repeats itself": Tally(rows=1, tokens=100),
    }
    assert result.marked_for == {"long line": Tally(rows=1, tokens=20)}
    assert result.finish == {"length": Tally(rows=2, tokens=140), "stop": Tally(rows=3, tokens=60)}
    assert result.truncated_share == 0.4
    assert result.constrained == Tally(rows=1, tokens=30)
    assert result.reasoning_states == {
        "closed": Tally(rows=4, tokens=160),
        "truncated_in_reasoning": Tally(rows=1, tokens=40),
    }


def test_describes_lengths(folder):
    lengths = [10, 20, 40, 100, 30]
    tokens = run(folder).tokens
    output = tokens["output"].all
    assert (output.n, output.total, output.min, output.max) == (5, 200, 10, 100)
    assert (output.mean, output.median) == (40, 30)
    assert output.sd == round(statistics.stdev(lengths), 3)
    assert list(output.quantiles) == ["p5", "p10", "p25", "p75", "p90", "p95", "p99"]
    assert output.quantiles["p75"] == 40
    assert tokens["output"].accepted.total == 70
    assert tokens["prompt"].all.mean == 50
    assert tokens["reasoning"].all.total + tokens["answer"].all.total == 200


@pytest.mark.parametrize("seed", range(20))
def test_lengths_are_described_as_numpy_describes_them(seed):
    """Quantiles from how often each length occurs are those of the lengths one by one, whatever their number."""
    draw = random.Random(seed)
    lengths = [int(draw.lognormvariate(5, 1.2)) for _ in range(draw.choice([2, 3, 7, 100, 999]))]
    told = spread(np.bincount(lengths))
    assert (told.n, told.total, told.min, told.max) == (
        len(lengths),
        sum(lengths),
        min(lengths),
        max(lengths),
    )
    assert told.median == statistics.median(lengths)
    assert (told.mean, told.sd) == (
        round(statistics.fmean(lengths), 3),
        round(statistics.stdev(lengths), 3),
    )
    percents = [int(name[1:]) for name in told.quantiles]
    assert list(told.quantiles.values()) == pytest.approx(np.percentile(lengths, percents), abs=0.00051)


def test_acceptance_by_length_covers_every_response(folder):
    result = run(folder)
    assert [(b.low, b.high, b.accepted, b.rejected) for b in result.by_length] == [
        (8, 16, 1, 0),
        (16, 32, 1, 1),
        (32, 64, 1, 0),
        (64, 128, 0, 1),
    ]
    for bins in (result.by_length, result.histogram):
        assert sum(one.accepted for one in bins) == 3
        assert sum(one.rejected for one in bins) == 2
        assert all(one.high == following.low for one, following in itertools.pairwise(bins))


def test_bin_edges_cut_each_octave_alike():
    assert bin_edges(20, parts=4) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24]
    assert bin_edges(15, parts=1) == [0, 1, 2, 4, 8, 16]
    assert bin_edges(0, parts=1) == [0, 1]


def test_the_file_is_typed_sorted_and_the_same_every_time(folder):
    first = run(folder)
    text = (folder / "stats.json").read_bytes()
    assert read_stats(folder / "stats.json") == first
    assert list(json.loads(text)) == sorted(json.loads(text))
    run(folder)
    assert (folder / "stats.json").read_bytes() == text


def test_the_fit_is_that_of_the_accepted_answers(folder):
    fit = run(folder).fit
    assert (fit.rows, fit.reasoning_tokens, fit.answer_tokens) == (3, 28, 42)
    assert fit.coverage == {"16000": 1, "32000": 1} and fit.cuts[0].rows_cut == 0


def test_a_dataset_without_answers_has_no_means(tmp_path):
    result = run(write_dataset(tmp_path / "B1", [], others=OTHERS))
    assert result.answered == 0
    assert result.truncated_share is None
    assert result.tokens["output"].all.mean is None
    assert result.histogram == []
    assert read_stats(tmp_path / "B1" / "stats.json") == result


def test_one_answer_has_no_deviation(tmp_path):
    output = run(write_dataset(tmp_path / "B1", VERDICTS[:1])).tokens["output"].all
    assert (output.mean, output.sd) == (10, None)


def test_samples_and_turns_multiply(tmp_path):
    verdicts = [
        verdict(key, 10, turn=turn, sample=sample)
        for key, turns in (("a", 2), ("b", 1))
        for turn in range(turns)
        for sample in range(3)
    ]
    assert run(write_dataset(tmp_path / "B1", verdicts), samples=3).planned == 9


def test_a_sample_that_is_missing_everywhere_does_not_balance(tmp_path):
    """What was planned is told by the config, not by the outcomes that it is compared with."""
    verdicts = [verdict(key, 10, sample=sample) for key in "abc" for sample in range(3)]
    with pytest.raises(EyasError, match="12 answers are planned, but 9 have an outcome"):
        run(write_dataset(tmp_path / "B1", verdicts), samples=4)


def report(folder, **changes):
    path = folder / "prompts.json"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | changes))


def outcomes(folder, *rows):
    write_records(folder / "outcomes.jsonl.zst", rows)


ANSWERED = tuple(Outcome(key=v.key, turn=0, sample=0, status="answered") for v in VERDICTS)


@dataclasses.dataclass
class Case:
    """A way to break the books, and what the error must say."""

    spoil: object
    says: tuple[str, ...]


CASES = {
    "source rows lost": Case(lambda f: report(f, rows_read=99), ("99", "11", "prompts.json")),
    "a turn that nobody counts": Case(
        lambda f: report(f, turns=9), ("9 turns are in use", "8 have outcomes", "outcomes.jsonl.zst")
    ),
    "a prompt without outcome": Case(
        lambda f: outcomes(f, *ANSWERED, *OTHERS[1:]), ("8 prompts", "7 have outcomes", "outcomes.jsonl.zst")
    ),
    "a sample that nobody planned": Case(
        lambda f: outcomes(f, Outcome(key="a", turn=0, sample=1, status="answered"), *ANSWERED, *OTHERS),
        ("8 answers are planned", "9 have an outcome", "outcomes.jsonl.zst"),
    ),
    "an outcome twice": Case(
        lambda f: outcomes(f, *ANSWERED, *OTHERS, OTHERS[-1]), ("8 answers are planned", "9 have an outcome")
    ),
    "an outcome again behind others": Case(
        lambda f: outcomes(f, *ANSWERED, *OTHERS, OTHERS[0]), ("8 prompts are in use", "9 have outcomes")
    ),
    "an outcome again behind others, in place of one": Case(
        lambda f: outcomes(f, *ANSWERED, *OTHERS[:-1], OTHERS[0]),
        ("8 prompts have outcomes", "not those of", "prompts.json", "delete", "outcomes.jsonl.zst"),
    ),
    "a verdict lost": Case(
        lambda f: write_verdicts(f / "verdicts.parquet", VERDICTS[1:]),
        ("5 outcomes are `answered`", "4 have a verdict", "verdicts.parquet"),
    ),
    "a verdict on another answer": Case(
        lambda f: write_verdicts(f / "verdicts.parquet", [*VERDICTS[1:], verdict("z", 10)]),
        ("5 answers are judged", "not those of", "outcomes.jsonl.zst", "delete", "verdicts.parquet"),
    ),
    "verdicts in another order": Case(
        lambda f: write_verdicts(f / "verdicts.parquet", VERDICTS[::-1]),
        ("5 answers are judged", "in another order", "verdicts.parquet"),
    ),
    "rejected without a reason": Case(
        lambda f: write_verdicts(
            f / "verdicts.parquet", [msgspec.structs.replace(VERDICTS[0], accepted=False), *VERDICTS[1:]]
        ),
        ("5 verdicts exist", "4 are accepted", "verdicts.parquet"),
    ),
    "tokens of no sort": Case(
        lambda f: write_verdicts(
            f / "verdicts.parquet", [msgspec.structs.replace(VERDICTS[0], answer_tokens=1), *VERDICTS[1:]]
        ),
        ("200 output tokens", "195 are reasoning or answer"),
    ),
    "a training row lost": Case(
        lambda f: write_table(f / "train.parquet", SCHEMA, [train_row("B1", VERDICTS[0])]),
        ("3 answers are accepted", "1 are training rows", "train.parquet"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_books_that_do_not_balance_stop_the_run(folder, name):
    CASES[name].spoil(folder)
    with pytest.raises(EyasError) as error:
        run(folder)
    message = str(error.value)
    assert message.startswith("B1: the books do not balance: ")
    assert "delete " in message
    for part in CASES[name].says:
        assert part in message
    assert not (folder / "stats.json").exists()


def test_the_books_take_no_memory_for_a_prompt():
    rows = 20_000
    outcomes = (Outcome(key=f"{n:016x}-0", turn=0, sample=0, status="answered") for n in range(rows))
    tracemalloc.start()
    try:
        ledger = Ledger.of(outcomes)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (ledger.conversations, ledger.turns, ledger.rows) == (rows, rows, rows)
    assert most < rows


@pytest.mark.parametrize("name", ["prompts.json", "verdicts.parquet", "train.parquet"])
def test_a_cut_file_is_named(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(EyasError, match=f"{name}: .*delete it and run again"):
        run(folder)
