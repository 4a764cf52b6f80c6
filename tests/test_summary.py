"""All datasets in one table, and a manifest that says what made them."""

import hashlib
import json
import re
import shutil

import msgspec
import pytest
from made_results import SHA, START, verdict, write_dataset

from eyas.config import ModelConfig, StatsSettings, SummarySettings
from eyas.errors import EyasError
from eyas.mix import MixReport, SideCounts
from eyas.records import Outcome
from eyas.report.figures import Summary
from eyas.report.markdown import table
from eyas.stats import Tally, stats
from eyas.summary import portable, summarise

MANIFESTS = {"server-1": {"engine": "llamacpp", "model_path": "/data/models/tiny.gguf"}, "server-9": {}}
FILES = ("report.html", "summary.json", "summary.md", "manifest.json")


def add_stats(folder):
    stats(
        StatsSettings(dataset=folder.name, samples=1),
        *(folder / name for name in ("prompts.json", "outcomes.jsonl.zst", "verdicts.parquet")),
        folder / "stats.json",
    )


def settings(**budgets):
    model = ModelConfig(id="org/tiny", revision="abc", reasoning={"name": "tags"})
    return SummarySettings(datasets=sorted(budgets), budgets=budgets, model=model)


@pytest.fixture
def run(tmp_path):
    """Two datasets: A was answered from 0 to 20 s, B from 10 s to 20 s."""
    results = tmp_path / "results"
    a = [
        verdict("a", 100),
        verdict("b", 200),
        verdict("c", 300, truncated=True),
        verdict("d", 400, reasons=("empty answer",)),
    ]
    b = [verdict("a", 1000, constrained=True), verdict("b", 500, reasons=("empty answer", "repeats itself"))]
    failed = Outcome(key="z", turn=0, sample=0, status="failed", reason="timeout")
    add_stats(write_dataset(results / "A", a, others=(failed,)))
    add_stats(write_dataset(results / "B", b, start=START + 10))
    (results / "train").mkdir()
    shutil.copy(results / "A" / "train.parquet", results / "train" / "train.parquet")
    sides = {"A": SideCounts(rows=3, supervised_tokens=600), "B": SideCounts(rows=1, supervised_tokens=1000)}
    none = {"A": SideCounts(), "B": SideCounts()}
    mix = MixReport(train=sides, eval=none, dropped_by_weights=none)
    (results / "train" / "mix.json").write_bytes(msgspec.json.encode(mix))
    benchmarks = tmp_path / "logs" / "benchmarks"
    for rule, name, line in [
        ("generate", "A", "12.5\t0:00:12\t100.5"),
        ("generate", "B", "7.5\t0:00:07\t-"),
        ("generate", "removed", "999\t0:16:39\t999"),
        (".", "mix", "1.0\t0:00:01\tNA"),
    ]:
        (benchmarks / rule).mkdir(parents=True, exist_ok=True)
        (benchmarks / rule / f"{name}.tsv").write_text(f"s\th:m:s\tmax_rss\n{line}\n")
    return tmp_path


def summarised(run, chosen=None):
    chosen = chosen or settings(A=1000, B=2000)
    return summarise(
        chosen, run / "results", run / "logs" / "benchmarks", MANIFESTS, {"generate": "c0de"}, run / "out"
    )


def test_parts_add_up_to_the_total(run):
    summary = summarised(run)
    assert list(summary.datasets) == ["A", "B"]
    for name in (
        "prompts",
        "planned",
        "responses",
        "accepted",
        "rejected",
        "failed",
        "output_tokens",
        "accepted_tokens",
    ):
        assert getattr(summary.total, name) == sum(
            getattr(part, name) for part in summary.datasets.values()
        ), name
    total = summary.total
    assert (total.prompts, total.responses, total.accepted, total.rejected, total.failed) == (7, 6, 4, 2, 1)
    assert (total.output_tokens, total.accepted_tokens) == (2500, 1600)
    assert total.reasoning_tokens + total.answer_tokens == total.output_tokens
    assert total.rejected_for == {
        "empty answer": Tally(rows=2, tokens=900),
        "repeats itself": Tally(rows=1, tokens=500),
    }
    assert total.truncated_share == pytest.approx(1 / 6)
    assert total.constrained == 1


def test_overlapping_datasets_are_busy_once(run):
    summary = summarised(run)
    assert [round(part.hours * 3600, 3) for part in summary.datasets.values()] == [20, 10]
    assert round(summary.total.hours * 3600, 3) == 20
    assert summary.total.tokens_per_second == pytest.approx(2500 / 20)
    assert summary.total.completions_per_minute == pytest.approx(6 / 20 * 60)
    assert summary.total.throughput.peak_in_flight == 4
    assert list(summary.servers) == ["server-1"]


def test_budget_use_counts_accepted_tokens(run):
    summary = summarised(run)
    assert (summary.datasets["A"].budget_use, summary.datasets["B"].budget_use) == (0.6, 0.5)
    assert summary.total.budget_tokens == 3000
    partly = summarised(run, settings(A=1000, B=None))
    assert partly.datasets["B"].budget_use is None
    assert partly.total.budget_tokens is None


def test_stages_come_from_the_benchmarks_of_this_run(run):
    stages = summarised(run).stages
    assert list(stages) == ["generate", "mix"]
    assert (stages["generate"].jobs, stages["generate"].seconds, stages["generate"].peak_memory_mb) == (
        2,
        20,
        100.5,
    )
    assert stages["mix"].peak_memory_mb is None


def test_a_partial_run_has_a_partial_summary(run):
    shutil.rmtree(run / "logs")
    (run / "results" / "train" / "mix.json").unlink()
    summary = summarised(run)
    assert (summary.stages, summary.mix) == ({}, None)
    assert all((run / "out" / name).exists() for name in FILES)


def test_a_dataset_without_answers_does_not_stop_the_summary(run):
    add_stats(
        write_dataset(
            run / "results" / "C", [], others=(Outcome(key="z", turn=0, sample=0, status="failed"),)
        )
    )
    summary = summarised(run, settings(A=None, B=None, C=None))
    assert summary.datasets["C"].tokens_per_second is None
    assert summary.total.responses == 6


def test_summary_json_reads_back_typed(run):
    summary = summarised(run)
    read = msgspec.json.decode((run / "out" / "summary.json").read_bytes(), type=Summary)
    assert read == summary


def test_tables_line_up_in_a_terminal(run):
    summarised(run)
    text = (run / "out" / "summary.md").read_text()
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(line) for line in block.splitlines()}) == 1
    first = text.split("\n\n")[1].splitlines()
    assert [cell.strip() for cell in first[-1].strip("|").split("|")] == [
        "total",
        "7",
        "6",
        "4",
        "2,500",
        "125.0",
        "0.006",
    ]


def test_a_cell_cannot_break_its_table():
    lines = table(["name", "n"], [["a|b\nc", "1"]]).splitlines()
    assert len(lines) == 3
    assert lines[2] == "| a\\|b c |   1 |"


def test_the_manifest_names_what_made_every_output(run):
    summarised(run)
    manifest = json.loads((run / "out" / "manifest.json").read_bytes())
    assert manifest["model"]["id"] == "org/tiny"
    assert manifest["code"] == {"generate": "c0de"}
    assert manifest["servers"] == {"server-1": {"engine": "llamacpp", "model_path": "tiny.gguf"}}
    assert {"msgspec", "pandas", "pyarrow", "snakemake"} <= set(manifest["packages"])
    assert manifest["sources"]["A"] == {
        "source": "glaive",
        "revision": "abc123",
        "files": [{"name": "part-0.jsonl", "rows": 8, "sha256": SHA}],
    }
    outputs = manifest["outputs"]
    assert {"A/responses.jsonl.zst", "B/train.parquet", "train/train.parquet", "train/mix.json"} <= set(
        outputs
    )
    assert outputs["A/outcomes.jsonl.zst"]["rows"] == 5
    assert outputs["A/verdicts.parquet"]["rows"] == 4
    digest = hashlib.sha256((run / "results" / "A" / "stats.json").read_bytes()).hexdigest()
    assert outputs["A/stats.json"] == {"sha256": digest, "rows": None}


def test_the_manifest_has_no_absolute_path_and_is_the_same_elsewhere(run, tmp_path_factory):
    summarised(run)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "run"
    shutil.copytree(run, elsewhere)
    summarised(elsewhere)
    text = (run / "out" / "manifest.json").read_text()
    assert (elsewhere / "out" / "manifest.json").read_text() == text
    assert str(run) not in text
    assert not re.search(r'"/', text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/data/models/kimi", "kimi"),
        ("--model-path=/data/kimi --port 1", "--model-path=kimi --port 1"),
        (["/a/b", {"k": "/a/b/c"}, 7], ["b", {"k": "c"}, 7]),
        ("http://127.0.0.1:30000/v1/generate", "http://127.0.0.1:30000/v1/generate"),
        ("org/model", "org/model"),
    ],
)
def test_paths_lose_their_folders(value, expected):
    assert portable(value) == expected


@pytest.mark.parametrize("name", ["stats.json", "timing.parquet", "verdicts.parquet", "responses.jsonl.zst"])
def test_a_cut_file_is_named(run, name):
    path = run / "results" / "A" / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(EyasError, match=f"A/{name}: .*delete it and run again"):
        summarised(run)
