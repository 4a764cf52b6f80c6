"""All datasets in one table, and a manifest that says what made them."""

import hashlib
import json
import re
import shutil
import subprocess
import sys

import msgspec
import pytest
from made_results import SHA, START, stages, verdict, write_dataset, write_training_set
from markupsafe import Markup
from pipeline import ROOT, Run, checkout, fake_server

from eyas.config import DATASET_STAGES, StatsSettings, canonical
from eyas.digest import code_digests
from eyas.errors import EyasError
from eyas.records import Outcome
from eyas.report.charts import Drawing
from eyas.report.figures import Summary
from eyas.report.markdown import table
from eyas.stats import Tally, stats
from eyas.summary import named, portable, summarise
from eyas.timing import Timing, TimingWriter

MANIFESTS = {"server-1": {"engine": "llamacpp", "model_path": "/data/models/tiny.gguf"}, "server-9": {}}
FILES = ("report.html", "summary.json", "summary.md", "manifest.json")
REFUSED = Outcome(key="y", turn=0, sample=0, status="refused", reason="prompt too long")
FAILED = Outcome(key="z", turn=0, sample=0, status="failed", reason="timeout")


def add_dataset(results, name, verdicts, **options):
    folder = write_dataset(results / name, verdicts, **options)
    stats(
        StatsSettings(dataset=name, samples=1),
        *(
            folder / file
            for file in ("prompts.json", "outcomes.jsonl.zst", "verdicts.parquet", "train.parquet")
        ),
        folder / "stats.json",
    )
    servers = {"server-1": MANIFESTS["server-1"]} if verdicts else {}
    (folder / "servers.json").write_text(json.dumps(servers))


@pytest.fixture(autouse=True)
def no_charts(monkeypatch):
    """They have tests of their own, and take a second to draw."""
    monkeypatch.setattr("eyas.report.charts.draw", lambda title, about, *_: Drawing(title, about, Markup()))


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
    add_dataset(results, "A", a, others=(REFUSED, FAILED))
    add_dataset(results, "B", b, start=START + 10)
    write_training_set(results)
    benchmarks = tmp_path / "logs" / "benchmarks"
    for file, line in [
        ("generate/A", "12.5\t0:00:12\t100.5"),
        ("generate/B", "7.5\t0:00:07\t-"),
        ("generate/removed", "999\t0:16:39\t999"),
        ("mix", "1.0\t0:00:01\tNA"),
        ("export/train.train.tokens.jsonl.zst", "2.0\t0:00:02\t50"),
        ("export/train.eval.tokens.jsonl.zst", "1.0\t0:00:01\t60"),
        ("export/train.eval.removed.json", "999\t0:16:39\t999"),
        ("export/A.train.tokens.jsonl.zst", "999\t0:16:39\t999"),
        ("serve", "999\t0:16:39\t999"),
        ("summary", "999\t0:16:39\t999"),
    ]:
        path = benchmarks / f"{file}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"s\th:m:s\tmax_rss\n{line}\n")
    return tmp_path


def budgets(**tokens):
    return {name: {"budget_tokens": budget} for name, budget in tokens.items()}


def summarised(run, datasets=None, **sections):
    made = stages(datasets or budgets(A=1000, B=2000), **sections)
    return summarise(
        made.summary(),
        run / "results",
        sorted((run / "results/train/exports/tokens").glob("*.jsonl.zst")),
        run / "logs" / "benchmarks",
        MANIFESTS,
        json.loads(code_digests(made)),
        run / "out",
    )


def manifest_of(run, datasets=None, **sections):
    summarised(run, datasets, **sections)
    return json.loads((run / "out" / "manifest.json").read_bytes())


def test_it_says_how_many_requests_really_ran_and_what_bound_them(run):
    server = next(iter(summarised(run).servers))
    assert summarised(run).capacity == {}, "the server told nothing of its capacity"
    told = {"capacity": {"tokens": 200, "max_running": None, "conservativeness": 1.0}}
    manifests = {server: {**(MANIFESTS.get(server) or {}), **told}}
    made = stages(budgets(A=1000, B=2000))
    exports = sorted((run / "results/train/exports/tokens").glob("*.jsonl.zst"))
    code = json.loads(code_digests(made))
    summary = summarise(made.summary(), run / "results", exports, run / "logs", manifests, code, run / "out")
    peak = summary.servers[server].peak_in_flight
    assert summary.capacity[server].startswith(f"{peak} in flight, about ")
    assert summary.capacity[server] in (run / "out" / "summary.md").read_text()
    assert "200 tokens" in (run / "out" / "report.html").read_text()


def test_a_server_that_came_back_with_other_settings_is_told_apart(run):
    """B's first answer was the last of the old server."""
    (run / "results/B/timing.parquet").unlink()
    with TimingWriter(run / "results/B/timing.parquet") as timing:
        for at, (server, tokens) in enumerate([("server-1", 1000), ("server-9", 500)]):
            begin = START + 10 + 10 * at
            numbers = {"started": begin, "finished": begin + 10, "prompt_tokens": 10, "output_tokens": tokens}
            timing.write(Timing(request=f"r{at}", attempt=1, server=server, used=True, **numbers))
    summary = summarised(run)
    paces = {
        server: (rates.run.seconds, rates.run.tokens_per_second) for server, rates in summary.servers.items()
    }
    assert paces == {"server-1": (20, 100), "server-9": (10, 50)}
    assert list(manifest_of(run)["servers"]) == ["server-1", "server-9"]
    assert "<code>server-9</code>" in (run / "out/report.html").read_text()


def test_turns_that_were_not_reached_are_told_with_their_reasons(run):
    assert "turns of these prompts" not in (summarised(run), (run / "out" / "summary.md").read_text())[1]
    why = "the answer before it was cut at the limit"
    ended = Outcome(key="a", turn=1, sample=0, status="not_reached", reason=why)
    shutil.rmtree(run / "results" / "A")
    add_dataset(run / "results", "A", [verdict("a", 100), verdict("b", 200)], others=(ended,))
    summary = summarised(run)
    part = summary.datasets["A"]
    assert (part.prompts, part.turns, part.planned, part.not_reached) == (2, 3, 3, 1)
    assert (summary.total.turns, summary.total.not_reached_for) == (5, {why: 1})
    text = (run / "out" / "summary.md").read_text()
    assert "- of 5 planned answers, to 5 turns of these prompts: 4 answered" in text
    assert why in (run / "out" / "report.html").read_text()
    assert re.search(rf"## Not reached.*\n\n.*\n.*\n\| {why} +\| +1 \|", text)


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
    assert (total.prompts, total.responses, total.accepted, total.rejected) == (8, 6, 4, 2)
    assert (total.planned, total.refused, total.failed) == (8, 1, 1)
    assert (total.refused_for, total.failed_for) == ({"prompt too long": 1}, {"timeout": 1})
    assert (total.source_rows, total.not_taken, total.skipped) == (14, 2, 4)
    assert total.skipped_for == {"no user turn": 4}
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
    partly = summarised(run, budgets(A=1000, B=None))
    assert partly.datasets["B"].budget_use is None
    assert partly.total.budget_tokens is None


def test_stages_are_those_of_this_run(run):
    """Neither the server that was held, nor datasets and exports of another run, nor the last summary's own time."""
    found = summarised(run).stages
    assert list(found) == ["generate", "mix", "export"]
    used = found["generate"]
    assert (used.jobs, used.seconds, used.peak_memory_mb) == (2, 20, 100.5)
    assert found["mix"].peak_memory_mb is None
    assert (found["export"].jobs, found["export"].seconds, found["export"].peak_memory_mb) == (2, 3, 60)


def test_without_benchmarks_there_are_no_stages(run):
    shutil.rmtree(run / "logs")
    assert summarised(run).stages == {}
    assert all((run / "out" / name).exists() for name in FILES)


def test_a_run_that_gives_rows_warns_of_nothing(run):
    assert summarised(run).warnings == []
    assert "Warning" not in (run / "out" / "summary.md").read_text()


def test_a_dataset_without_answers_is_a_warning_and_stops_nothing(run):
    refused = [
        msgspec.structs.replace(REFUSED, key=key, reason=reason)
        for key, reason in (("a", "drops\na tool"), ("b", "prompt too long"), ("c", "prompt too long"))
    ]
    add_dataset(run / "results", "C", [], others=(*refused, FAILED))
    summary = summarised(run, budgets(A=None, B=None, C=None))
    assert summary.datasets["C"].tokens_per_second is None
    assert summary.total.responses == 6
    (warning,) = summary.warnings
    assert warning.startswith(
        "C: no prompt was answered, so there is nothing to train on. Of 4 planned answers: "
        "3 refused (2 × prompt too long, 1 × drops a tool), 1 failed (1 × timeout). "
    )


def test_a_dataset_of_which_all_was_rejected_is_a_warning(run):
    verdicts = [verdict(str(n), 10, reasons=("empty answer", f"reason {n}")) for n in range(9)]
    add_dataset(run / "results", "C", verdicts)
    (warning,) = summarised(run, budgets(A=None, B=None, C=None)).warnings
    assert warning.startswith("C: no answer was accepted, so there is nothing to train on. ")
    assert "9 rejected by a check (9 × empty answer, 1 × reason 0, " in warning
    assert "1 × reason 3, …)" in warning and "reason 4" not in warning, "a terminal is not flooded"


def test_a_run_without_any_answer_says_so_before_everything_else_and_in_the_terminal(run):
    """Through the program that the rule calls."""
    results = run / "results"
    shutil.rmtree(results)
    for name in "AB":
        add_dataset(results, name, [], others=(REFUSED,))
    exports = write_training_set(results)
    made = stages(budgets(A=None, B=None))
    command = [sys.executable, "-P", str(ROOT / "scripts" / "summary.py"), "--settings"]
    command += [canonical(made.summary()), "--code", code_digests(made), "--exports", *map(str, exports)]
    command += ["--out", str(results / "summary/summary.json"), "--log", str(run / "logs/summary.log")]
    (results / "summary").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    says = (
        "no prompt was answered, so there is nothing to train on. "
        "Of 2 planned answers: 2 refused (2 × prompt too long)"
    )
    assert done.stderr.startswith(f"eyas summary: warning: {says}")
    assert f"WARNING {says}" in (run / "logs" / "summary.log").read_text()
    text = (results / "summary" / "summary.md").read_text()
    assert text.startswith(f"# Summary\n\n> Warning: {says}")
    assert "2 refused" in text
    assert json.loads((results / "summary" / "summary.json").read_bytes())["warnings"][0].startswith(says)


def test_reasons_stand_in_the_tables_each_under_its_own_word(run):
    summarised(run)
    sections = dict(re.findall(r"^## (.*)\n\n((?:\|.*\n)+)", (run / "out" / "summary.md").read_text(), re.M))
    cells = {
        head: [[cell.strip() for cell in line.strip("|").split("|")] for line in rows.splitlines()[2:]]
        for head, rows in sections.items()
    }
    assert cells["Source rows skipped"] == [["no user turn", "4"]]
    assert cells["Refused: the prompt cannot be asked"] == [["prompt too long", "1"]]
    assert cells["Failed: no answer after the last retry"] == [["timeout", "1"]]
    assert cells["Rejected: answered, and a check found fault"] == [
        ["empty answer", "2", "900"],
        ["repeats itself", "1", "500"],
    ]


def test_what_marks_would_cost_and_acceptance_by_length_are_told(run):
    verdicts = [
        verdict("a", 100, marks=["cut at the limit"], truncated=True),
        verdict("b", 120, marks=["cut at the limit", "too loud"]),
        verdict("c", 900, reasons=("no reasoning",), marks=["too loud"]),
        verdict("d", 40),
    ]
    add_dataset(run / "results", "C", verdicts)
    summary = summarised(run, budgets(A=None, B=None, C=None))
    one = summary.datasets["C"]
    marks = {"cut at the limit": Tally(rows=2, tokens=220), "too loud": Tally(rows=1, tokens=120)}
    assert one.marked_for == summary.total.marked_for == marks, "of accepted answers alone"
    assert [(b.low, b.high, b.accepted, b.rejected) for b in one.by_length if b.accepted + b.rejected] == [
        (32, 64, 1, 0),
        (64, 128, 2, 0),
        (512, 1024, 0, 1),
    ]
    total = {b.low: (b.accepted, b.rejected) for b in summary.total.by_length}
    assert (total[64], total[512]) == ((3, 0), (1, 1))
    assert [b.low for b in summary.total.by_length] == [32, 64, 128, 256, 512]
    text = (run / "out" / "summary.md").read_text()
    assert re.search(
        r"## Marked: .*\n\n.*\n.*\n\| cut at the limit \| +2 \| +220 \|\n\| too loud +\| +1 \|", text
    )
    assert re.search(r"## Acceptance by length\n\n.*\n.*\n\| 32 to 63 +\| +1 \| +100.0% \|", text)
    assert "Acceptance by length" in (run / "out/report.html").read_text()


def test_a_policy_that_rejects_cut_answers_says_what_it_costs(run):
    verdicts = [verdict("a", 100), verdict("b", 300, reasons=("cut at the limit",), truncated=True)]
    add_dataset(run / "results", "C", verdicts)
    (warning,) = summarised(run, budgets(A=None, B=None, C=None)).warnings
    assert warning.startswith(
        "C: rejecting answers that are cut at the limit costs 1 of 2 answers and 300 of 400 output tokens (75.0%), "
    )
    assert "`checks.length.policy: mark` keeps them" in warning


def test_adopted_answers_are_told_of_and_are_in_no_rate(run):
    before = summarised(run)
    add_dataset(
        run / "results", "C", [verdict("a", 70), verdict("b", 7)], server="server-2", start=0.0, seconds=0.0
    )
    adopted = {"file": "other.jsonl", "sha256": SHA}
    made = stages(budgets(A=None, B=None, C=None))
    summary = summarise(
        made.summary(),
        run / "results",
        sorted((run / "results/train/exports/tokens").glob("*.jsonl.zst")),
        run / "logs" / "benchmarks",
        {**MANIFESTS, "server-2": {"adopted": adopted}},
        json.loads(code_digests(made)),
        run / "out",
    )
    assert summary.total.throughput == before.total.throughput
    assert summary.servers == before.servers
    assert summary.total.responses == before.total.responses + 2
    assert [msgspec.to_builtins(one) for one in summary.adopted] == [
        {"server": "server-2", **adopted, "rows": 2, "tokens": 77}
    ]
    line = "Adopted from other.jsonl (abababab): 2 answers, 77 output tokens."
    assert line in (run / "out" / "summary.md").read_text()
    assert "other.jsonl" in (run / "out" / "report.html").read_text()
    manifest = json.loads((run / "out" / "manifest.json").read_bytes())
    assert manifest["servers"]["server-2"] == {"adopted": adopted}


def test_the_manifest_has_the_tokenizers_files_and_the_plugins_of_strangers(run, monkeypatch):
    assert manifest_of(run)["tokenizer"] is None, "it is in the weight file"
    monkeypatch.chdir(run)
    (run / "tiny").mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (run / "tiny" / name).write_text(name)
    (run / "mine.py").write_text(
        "from eyas import hookimpl\nfrom eyas.plugins import Check\n\n"
        "class Mine(Check):\n    name = 'mine'\n    def faults(self, response, split):\n        return []\n\n"
        "@hookimpl\ndef register_checks(register):\n    register(Mine)\n"
    )
    model = {"id": "org/tiny", "tokenizer": "tiny", "reasoning": {"name": "tags"}}
    manifest = manifest_of(run, model=model, plugins=[str(run / "mine.py")])
    assert manifest["tokenizer"] == {
        name: hashlib.sha256(name.encode()).hexdigest() for name in ("chat_template.jinja", "tokenizer.json")
    }
    digest = hashlib.sha256((run / "mine.py").read_bytes()).hexdigest()[:16]
    assert manifest["plugins"] == [{"kind": "check", "name": "mine", "from": "mine.py", "digest": digest}]
    off = {name: {"budget_tokens": 1, "checks": {"mine": {"policy": "off"}}} for name in "AB"}
    assert manifest_of(run, off, plugins=[str(run / "mine.py")])["plugins"] == [], "it decides nothing"


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
        "8",
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
    manifest = manifest_of(run)
    assert manifest["model"]["id"] == "org/tiny"
    assert manifest["servers"] == {"server-1": {"engine": "llamacpp", "model_path": "tiny.gguf"}}
    assert {"msgspec", "pandas", "pyarrow", "snakemake"} <= set(manifest["packages"])
    assert manifest["sources"]["A"] == {
        "source": "glaive",
        "revision": "abc123",
        "files": [{"name": "part-0.jsonl", "rows": 9, "sha256": SHA}],
        "evaluation": [],
    }
    outputs = manifest["outputs"]
    assert outputs["A/outcomes.jsonl.zst"]["rows"] == 6
    assert outputs["A/verdicts.parquet"]["rows"] == 4
    digest = hashlib.sha256((run / "results" / "A" / "stats.json").read_bytes()).hexdigest()
    assert outputs["A/stats.json"] == {"sha256": digest, "rows": None, "stage": "stats"}
    jobs = manifest["jobs"]
    for path, file in outputs.items():
        folders = path.split("/")[:-1]
        assert set(jobs[file["stage"]][folders[-1]]) == {"code", "settings"}, path


def test_the_manifest_has_settings_and_code_of_every_job(run):
    datasets = budgets(A=1000, B=None)
    made, jobs = stages(datasets), manifest_of(run, datasets)["jobs"]
    code = json.loads(code_digests(made))
    assert set(jobs) == {*DATASET_STAGES, "mix", "export"}
    for stage in DATASET_STAGES:
        for name in datasets:
            settings = msgspec.to_builtins(getattr(made, stage)(name))
            assert jobs[stage][name] == {"code": code[stage][name], "settings": settings}
    assert jobs["mix"]["train"]["settings"] == msgspec.to_builtins(made.mix())
    assert jobs["export"]["tokens"] == {
        "code": code["export"]["tokens"],
        "settings": msgspec.to_builtins(made.export("tokens")),
    }


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"seed": 7}, [("prompts", "A"), ("prompts", "B"), ("mix", "train")]),
        ({"A": {"rows": 3}}, [("prompts", "A")]),
        ({"A": {"revision": "def"}}, [("prompts", "A")]),
        ({"A": {"source": {"name": "magicoder"}}}, [("prompts", "A")]),
        ({"A": {"samples": 2}}, [("generate", "A"), ("stats", "A")]),
        ({"A": {"sampling": {"temperature": 0.5}}}, [("generate", "A")]),
        ({"A": {"reasoning_required": False}}, [("generate", "A")]),
        ({"A": {"checks": {"length": {"policy": "off"}}}}, [("validate", "A")]),
        ({"B": {"checks": {"length": {"policy": "off"}}}}, [("generate", "B"), ("validate", "B")]),
        ({"mix": {"weights": {"A": 1, "B": 2}}}, [("mix", "train")]),
        ({"mix": {"eval_share": 0.5}}, [("mix", "train")]),
    ],
    ids=str,
)
def test_every_setting_that_decides_an_output_shows_in_the_manifest(run, change, where):
    before = manifest_of(run, budgets(A=None, B=9))
    datasets = budgets(A=None, B=9)
    for name in datasets:
        datasets[name] |= change.get(name, {})
    after = manifest_of(run, datasets, **{key: value for key, value in change.items() if key not in datasets})
    differing = [
        (stage, subject)
        for stage, subjects in before["jobs"].items()
        for subject in subjects
        if before["jobs"][stage][subject] != after["jobs"][stage][subject]
    ]
    assert sorted(differing) == sorted(where)


def declared():
    """The inputs of the rule, per dataset and of the training set."""
    text = (ROOT / "rules" / "summary.smk").read_text().partition("    output:")[0]
    return set(re.findall(r"results/\{dataset\}/([\w.]+)", text)), set(
        re.findall(r"results/train/([\w.]+)", text)
    )


def test_outputs_are_the_declared_inputs_without_what_equal_runs_differ_in(run):
    per_dataset, of_training_set = declared()
    outputs = set(manifest_of(run)["outputs"])
    expected = {
        f"{name}/{file}" for name in "AB" for file in per_dataset - {"timing.parquet", "servers.json"}
    }
    expected |= {f"train/{file}" for file in of_training_set}
    exports = [f"train/exports/tokens/{side}.jsonl.zst" for side in ("train", "eval")]
    assert outputs == expected | {*exports, *(f"{path}.report.json" for path in exports)}


def test_files_of_an_earlier_run_are_not_outputs(run):
    before = manifest_of(run)
    for stale in ("train/exports/removed/train.json", "A/old.parquet", "B/exports/tokens/train.jsonl.zst"):
        (run / "results" / stale).parent.mkdir(parents=True, exist_ok=True)
        (run / "results" / stale).write_text("old")
    assert manifest_of(run) == before


def test_how_answers_travelled_is_not_in_the_manifest(run):
    before = manifest_of(run)
    shutil.rmtree(run / "results" / "B")
    b = [verdict("a", 1000, constrained=True), verdict("b", 500, reasons=("empty answer", "repeats itself"))]
    add_dataset(run / "results", "B", b, start=START + 77, seconds=3.0)
    assert manifest_of(run) == before


def test_nothing_else_is_read(run):
    """Only what the rule declares; so Snakemake knows when a summary is stale."""
    before = manifest_of(run)
    per_dataset, of_training_set = declared()
    kept = {run / "results" / name / file for name in "AB" for file in per_dataset}
    kept |= {run / "results" / "train" / file for file in of_training_set}
    for path in (run / "results").rglob("*"):
        if path.is_file() and path not in kept and "exports" not in path.parts:
            path.unlink()
    assert manifest_of(run) == before


def test_the_manifest_has_no_absolute_path_and_is_the_same_elsewhere(run, tmp_path_factory):
    exports = {"tokens": {}}
    model = {
        "id": "org/tiny",
        "reasoning": {"name": "tags"},
        "template_options": {"file": "/data/my templates/x.json"},
    }
    manifest_of(run, exports=exports, model=model)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "run"
    shutil.copytree(run, elsewhere)
    manifest_of(elsewhere, exports=exports, model=model)
    text = (run / "out" / "manifest.json").read_text()
    assert (elsewhere / "out" / "manifest.json").read_text() == text
    assert str(run) not in text
    assert '"file": "x.json"' in text
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


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/data/my models/kimi", "kimi"),
        (["/a/b/", {"k": "/a/b/c"}, 7], ["b", {"k": "c"}, 7]),
        ("root ::= /[a-z]+/ /b/", "root ::= /[a-z]+/ /b/"),
        ("/[a-z]+/\n/b/c", "/[a-z]+/\n/b/c"),
        ("</think>", "</think>"),
        ("org/model", "org/model"),
    ],
)
def test_settings_keep_all_but_the_folders_of_paths(value, expected):
    assert named(value) == expected


@pytest.mark.parametrize("name", ["stats.json", "timing.parquet", "verdicts.parquet", "responses.jsonl.zst"])
def test_a_cut_file_is_named(run, name):
    path = run / "results" / "A" / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(EyasError, match=f"A/{name}: .*delete it and run again"):
        summarised(run)


@pytest.mark.workflow
def test_an_equal_run_of_another_checkout_in_another_folder_has_the_same_manifest(tmp_path):
    """And what a person must not overlook, here a dataset that was refused as a whole, reaches the terminal."""
    code = checkout(tmp_path / "code")
    first = Run(tmp_path / "one", {"alpha": 3, "beta": 2})
    first.config["datasets"]["beta"]["sampling"] = {"max_new_tokens": 2047}
    with fake_server(first) as url:
        first.config["server"]["url"] = url
        first.save()
        shown = [first.snakemake(snakefile=code / "Snakefile").stderr]
    second = Run(tmp_path / "the other", {"alpha": 3, "beta": 2})
    second.config = first.config | {"plugins": ["tests/fake_engine.py"]}
    second.save()
    shutil.copytree(first.folder / "journal", second.folder / "journal")
    code = shutil.copytree(code, tmp_path / "code of eyas")
    arguments = ["--directory", str(second.folder), "--configfile", str(second.folder / "config.yaml")]
    second.cwd = code
    shown.append(second.snakemake(*arguments, snakefile=code / "Snakefile").stderr)
    manifests = [(run.folder / "results/summary/manifest.json").read_text() for run in (first, second)]
    assert manifests[0] == manifests[1]
    assert str(tmp_path) not in manifests[0] and str(ROOT) not in manifests[0]
    for text in shown:
        assert "eyas summary: warning: beta: no prompt was answered" in text
        assert "Of 2 planned answers: 2 refused (2 × prompt and max_new_tokens exceed the context)" in text
