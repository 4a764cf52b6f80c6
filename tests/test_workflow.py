"""What runs when what changes: exact jobs and exact requests, in each way the workflow can be called.

Every row of CHANGES starts from the same finished state, changes one thing and runs snakemake for real.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pipeline import ROOT, Run, checkout, commit, evol_rows, executed, fake_server, git

from eyas.progress import read_progress
from eyas.recordfile import read_records, write_records
from eyas.records import Outcome, Response, TrainRow
from eyas.tables import read_table

pytestmark = pytest.mark.workflow

SHIPPED = "data/shipped/gamma.jsonl"
CLOSED = "http://127.0.0.1:9"
WAYS = ("plain", "directory", "path with spaces", "module")
PARENT = """
configfile: "config.yaml"
module eyas:
    snakefile: {snakefile!r}
    config: config
use rule * from eyas{names}
"""

# The jobs of one dataset in order, and what follows any new training rows.
STAGES = ("prompts_of_dataset", "generate", "validate", "train_of_dataset", "stats_of_dataset")
TAIL = Counter({"mix": 1, "export train": 2, "summary": 1})


def talks(dataset: str, count: int) -> list[dict[str, Any]]:
    """Conversations of two questions each, in the OpenAI shape."""
    said = (
        ("user", "{} question {}: why?"),
        ("assistant", "old answer"),
        ("user", "And?"),
        ("assistant", "old"),
    )
    return [
        {"messages": [{"role": role, "content": text.format(dataset, n)} for role, text in said]}
        for n in range(count)
    ]


def onward(stage: str, *datasets: str) -> Counter[str]:
    """The jobs of `datasets` from `stage` on."""
    return Counter(f"{later} {name}" for name in datasets for later in STAGES[STAGES.index(stage) :])


# --- the ways ----------------------------------------------------------------------------------------------------


class Called(Run):
    """A run in `folder` of the workflow in `code`, called in one of the WAYS.

    alpha takes the first rows of a file of 5 MB; Snakemake's own default compares such files by time alone. beta takes
    all rows of a small one, whose conversations go on. gamma's file is shipped with the workflow, and it has a budget.
    """

    def __init__(self, way: str, folder: Path, code: Path, server: Run, url: str) -> None:
        super().__init__(folder, {})
        self.way, self.code, self.record = way, code, server.record
        self.cwd = code if way == "directory" else folder
        self.add_dataset("alpha", [{**row, "response": "so on, " * 32_000} for row in evol_rows("alpha", 25)])
        self.add_dataset("beta", talks("beta", 4))
        self.config["datasets"]["beta"]["source"] = {"name": "chat"}
        self.add_dataset("gamma", evol_rows("gamma", 12))
        (code / SHIPPED).parent.mkdir(parents=True)
        (folder / "data/gamma.jsonl").rename(code / SHIPPED)
        self.config["datasets"]["alpha"]["rows"] = 3
        self.config["datasets"]["gamma"] |= {"files": [SHIPPED], "budget_tokens": 400}
        self.config["plugins"] = ["tests/fake_engine.py"]
        # One request at a time, so that none is on its way when the budget is reached.
        self.config["server"] |= {"url": url, "concurrency": 1}
        self.save()
        commit(code)

    def command(self, *arguments: str, **_options: Any) -> list[str]:
        how = {
            "plain": [],
            "directory": ["--directory", str(self.folder)],
            "path with spaces": ["--snakefile", str(self.code / "Snakefile")],
            "module": ["--workflow-profile", str(self.code / "profiles/default")],
        }
        return [sys.executable, "-m", "snakemake", "--cores", "2", *how[self.way], *arguments]

    def write_parent(self, names: str = "") -> None:
        """The workflow that uses this one as a module."""
        text = PARENT.format(snakefile=str(self.code / "Snakefile"), names=names)
        (self.folder / "Snakefile").write_text(text)

    def answers(self) -> dict[str, str]:
        """request → question, of every response in the results."""
        return {
            response.request: question(response.prompt_ids)
            for path in self.folder.glob("results/*/responses.jsonl.zst")
            for response in read_records(path, Response)
        }

    def edit(self, file: str) -> None:
        """Adds a comment to a file of the checkout."""
        with (self.code / file).open("a") as source:
            source.write("\n# An edit.\n")


def question(prompt_ids: list[int]) -> str:
    """Dataset and number of a question, from its prompt's bytes."""
    text = bytes(token - 3 for token in prompt_ids if token > 2).decode()
    match = re.search(r"(\w+) question (\w+)", text)
    assert match, text
    return f"{match[1]} {match[2]}"


class Finished:
    """A finished run, of which each test gets a copy: in the same place, with all file times."""

    def __init__(self, run: Called, top: Path) -> None:
        self._run, self.top, self._copy = run, top, top.with_name(top.name + ".finished")
        self._config = copy.deepcopy(run.config)
        self.built = run.jobs("--resources", "llm=1")
        top.rename(self._copy)

    def fresh(self) -> Called:
        shutil.rmtree(self.top, ignore_errors=True)
        subprocess.run(["cp", "-a", self._copy, self.top], check=True)
        self._run.config = copy.deepcopy(self._config)
        return self._run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, str]]:
    run = Run(tmp_path_factory.mktemp("server"), {})
    with fake_server(run) as url:
        yield run, url


@pytest.fixture(scope="module", params=WAYS)
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, server: tuple[Run, str]
) -> Finished:
    way = request.param
    top = tmp_path_factory.mktemp(way, numbered=False) / ("top" if way == "plain" else "the top")
    code = checkout(top / ("run" if way == "plain" else "code of eyas"))
    run = Called(way, code if way == "plain" else top / "a run", code, *server)
    if way == "module":
        run.write_parent()
    return Finished(run, top)


plain = pytest.mark.parametrize("finished", ["plain"], indirect=True)

# --- the table ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A change, the jobs it runs, and the generations it asks for, counted by dataset.

    undone: the jobs after the change of the config is taken back; that never asks for anything.
    """

    name: str
    make: Callable[[Called], None]
    jobs: Counter[str] = field(default_factory=Counter)
    asked: dict[str, int] = field(default_factory=dict)
    undone: Counter[str] | None = None


def touch_everything(run: Called) -> None:
    for top in {run.code, run.folder / "data"}:
        for folder, inner, files in os.walk(top):
            inner[:] = [name for name in inner if name not in (".git", ".snakemake", "results", "journal")]
            for file in files:
                os.utime(Path(folder, file))


def visit_another_branch(run: Called) -> None:
    git(run.code, "checkout", "--quiet", "-b", "other")
    for file in ("scripts/validate.py", "eyas/records.py", "eyas/checks/length.py", "rules/common.smk"):
        run.edit(file)
    (run.code / SHIPPED).write_text("{}\n")
    git(run.code, "commit", "--quiet", "--all", "-m", "other")
    git(run.code, "checkout", "--quiet", "main")


def reorder_and_spell_out(run: Called) -> None:
    alpha = run.config["datasets"]["alpha"]
    run.config["datasets"]["alpha"] = dict(reversed(alpha.items()))
    alpha = run.config["datasets"]["alpha"]
    alpha |= {"samples": 1, "sampling": {"top_p": 1.0, "temperature": 0.7}}
    alpha["checks"] = {"length": {"policy": "mark"}}
    run.config = dict(reversed(run.config.items()))
    run.config["model"] = dict(reversed(run.config["model"].items()))


def serve_differently(run: Called) -> None:
    run.config["server"] |= {"url": CLOSED, "concurrency": 3, "retries": 9, "idle_timeout": 60}
    run.config["server"]["engine"]["slots"] = 7


def strict_check(run: Called) -> None:
    for name in ("alpha", "gamma"):
        run.config["datasets"][name]["checks"] = {
            "degenerate": {"window": 16, "ngram": 1, "min_distinct": 0.8}
        }


def more_rows(run: Called) -> None:
    rows = talks("beta", 6)
    run.write_rows("beta", [*rows[:2], *rows[4:], *rows[2:4]])
    run.config["datasets"]["alpha"]["rows"] += 2


DECIDE_NOTHING: dict[str, Callable[[Called], None]] = {
    "nothing": lambda run: None,
    "another branch visited": visit_another_branch,
    "every source file touched": touch_everything,
    "key order, and defaults spelled out": reorder_and_spell_out,
    "server address and settings": serve_differently,
}


def all_that_decides_nothing(run: Called) -> None:
    for make in DECIDE_NOTHING.values():
        make(run)


CHANGES = [
    Change("all that decides nothing, at once", all_that_decides_nothing),
    Change(
        "temperature of one dataset",
        lambda run: run.config["datasets"]["alpha"].update(sampling={"temperature": 0.9}),
        onward("generate", "alpha") + TAIL,
        {"alpha": 3},
        undone=onward("generate", "alpha") + TAIL,
    ),
    Change("an edit of one stage", lambda run: run.edit("eyas/mix.py"), TAIL),
    Change(
        "threshold of a check, with and without a budget",
        strict_check,
        onward("validate", "alpha") + onward("generate", "gamma") + TAIL,
        {"gamma": 5},
    ),
    Change(
        "two rows more, by number and in the middle of a file",
        more_rows,
        onward("prompts_of_dataset", "alpha", "beta") + TAIL,
        {"alpha": 2, "beta": 2},
    ),
    Change(
        "a dataset added",
        lambda run: run.add_dataset("delta", evol_rows("delta", 2)),
        onward("prompts_of_dataset", "delta") + TAIL,
        {"delta": 2},
    ),
    Change("a dataset removed", lambda run: run.config["datasets"].pop("beta"), TAIL),
]

# Rows that say the same in every way of calling.
IN_ONE_WAY = [
    Change(
        "turns of one dataset, from the first to all",
        lambda run: run.config["datasets"]["beta"].update(turns="all"),
        onward("prompts_of_dataset", "beta") + TAIL,
        {"beta": 4},
        undone=onward("prompts_of_dataset", "beta") + TAIL,
    )
]


@plain
@pytest.mark.parametrize("name", DECIDE_NOTHING)
def test_what_decides_nothing_runs_nothing(finished: Finished, name: str) -> None:
    run = finished.fresh()
    DECIDE_NOTHING[name](run)
    run.save()
    done = run.snakemake()
    assert not executed(done.stderr), reasons(done.stderr)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_a_change_runs_exactly_what_it_makes_stale(finished: Finished, change: Change) -> None:
    try_out(change, finished)


@plain
@pytest.mark.parametrize("change", IN_ONE_WAY, ids=lambda change: change.name)
def test_another_change_runs_exactly_what_it_makes_stale(finished: Finished, change: Change) -> None:
    try_out(change, finished)


def try_out(change: Change, finished: Finished) -> None:
    run = finished.fresh()
    before, config = run.answers(), copy.deepcopy(run.config)
    change.make(run)
    run.save()
    with run.asked() as asked:
        done = run.snakemake()
    assert executed(done.stderr) == change.jobs, reasons(done.stderr)
    questions = Counter(question(generation["prompt"]) for generation in asked)
    assert questions == Counter(text for request, text in run.answers().items() if request not in before)
    assert Counter(text.split()[0] for text in questions.elements()) == change.asked
    if change.undone is not None:
        run.config = config
        run.save()
        with run.asked() as asked:
            assert run.jobs() == change.undone
        assert not asked and run.answers() == before


@plain
def test_an_exporter_added_leaves_the_training_rows_alone(finished: Finished) -> None:
    run = finished.fresh()
    run.config["exports"] = {"tokens": {}, "speculators": {}}
    run.save()
    before = {path: path.stat().st_mtime_ns for path in (run.folder / "results").rglob("*.parquet")}
    with run.asked() as asked:
        assert run.jobs() == Counter({"export_folder train": 2, "summary": 1})
    assert not asked and {path: path.stat().st_mtime_ns for path in before} == before
    made = run.folder / "results/train/exports/speculators"
    assert sorted(path.name for path in made.iterdir()) == [
        "eval",
        "eval.report.json",
        "train",
        "train.report.json",
    ]
    summary = json.loads((run.folder / "results/summary/summary.json").read_bytes())
    assert summary["exports"]["train/exports/speculators/train"]["same_ids_share"] == 1
    outputs = json.loads((run.folder / "results/summary/manifest.json").read_bytes())["outputs"]
    assert "train/exports/speculators/train/token_freq.pt" in outputs


def reasons(output: str) -> str:
    """Why each job ran, in Snakemake's words."""
    return "\n".join(re.findall(r"(?m)^(?:local)?rule .*|^    reason: .*", output))


# --- the whole ---------------------------------------------------------------------------------------------------

ALL = onward("prompts_of_dataset", "alpha", "beta", "gamma") + TAIL
# The summary tells how long the jobs took.
TIMED = {"summary/summary.json", "summary/summary.md", "summary/report.html"}


def results(run: Called) -> dict[str, bytes]:
    top = run.folder / "results"
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def test_results_come_back_byte_for_byte_without_server_and_engine(finished: Finished) -> None:
    run = finished.fresh()
    assert finished.built == ALL
    before = results(run)
    shutil.rmtree(run.folder / "results")
    for file in run.folder.glob("tiny.gguf*"):
        file.unlink()
    run.config["server"] |= {"url": CLOSED, "env": "/no/such/python"}
    run.save()
    with run.asked() as asked:
        assert run.jobs() == ALL
    after = results(run)
    assert not asked and after.keys() == before.keys()
    assert {name for name in before if before[name] != after[name]} <= TIMED
    old, new = (json.loads(files["summary/summary.json"]) for files in (before, after))
    assert {key for key in old if old[key] != new[key]} <= {"stages"}


@plain
def test_without_snakemakes_own_records_changes_go_unnoticed_until_all_is_forced(finished: Finished) -> None:
    run = finished.fresh()
    shutil.rmtree(run.folder / ".snakemake")
    assert not run.jobs()
    run.config["datasets"]["alpha"]["sampling"] = {"temperature": 0.9}
    run.save()
    assert not run.jobs()
    with run.asked() as asked:
        assert run.jobs("--forceall") == ALL
    assert Counter(question(generation["prompt"]).split()[0] for generation in asked) == {"alpha": 3}


@pytest.mark.parametrize("finished", ["plain", "directory"], indirect=True)
def test_a_moved_run_asks_for_nothing(finished: Finished) -> None:
    run = copy.copy(finished.fresh())
    moved = finished.top.rename(finished.top.with_name("moved elsewhere"))
    for place in ("folder", "code", "cwd"):
        setattr(run, place, moved / getattr(run, place).relative_to(finished.top))
    with run.asked() as asked:
        jobs = run.jobs()
    assert not asked
    # Snakemake compares inputs by path, so data shipped with a workflow that lies elsewhere is read again.
    assert jobs == (Counter() if run.way == "plain" else onward("prompts_of_dataset", "gamma") + TAIL)


@pytest.mark.parametrize("finished", ["module"], indirect=True)
def test_as_a_module_with_prefixed_rules_nothing_is_stale(finished: Finished) -> None:
    run = finished.fresh()
    run.write_parent(" as eyas_*")
    assert not run.jobs()
    assert planned(run, "--forcerun", "eyas_mix") == TAIL


@plain
def test_a_changed_book_is_caught_and_rebuilt_from_the_journal(finished: Finished) -> None:
    run = finished.fresh()
    before = results(run)
    book = run.folder / "results/alpha/outcomes.jsonl.zst"
    first, *others = read_records(book, Outcome)
    write_records(book, [msgspec.structs.replace(first, status="failed", reason="made up"), *others])
    done = run.snakemake(check=False)
    assert done.returncode and executed(done.stderr) == Counter(["stats_of_dataset alpha"])
    assert "alpha: the books do not balance: 2 outcomes are `answered`, but 3 have a verdict" in done.stderr
    book.unlink()
    with run.asked() as asked:
        run.snakemake()
    after = results(run)
    assert not asked and {name for name in before if before[name] != after[name]} <= TIMED


# --- targets -----------------------------------------------------------------------------------------------------


def planned(run: Called, *arguments: str) -> Counter[str]:
    """The jobs of a dry run."""
    return executed(run.snakemake("--dry-run", *arguments).stdout)


@plain
def test_stage_names_are_targets(finished: Finished) -> None:
    run = finished.fresh()
    shutil.rmtree(run.folder / "results")
    stages = {
        "prompts": STAGES[:1],
        "responses": STAGES[:2],
        "verdicts": STAGES[:3],
        "train": STAGES[:4],
        "stats": STAGES,
    }
    for target, expected in stages.items():
        jobs = Counter(f"{stage} {name}" for stage in expected for name in ("alpha", "beta", "gamma"))
        jobs += Counter(["mix"] if target == "train" else [])
        assert planned(run, target) == jobs, target
    assert planned(run, "summary") == ALL


@plain
def test_one_file_builds_only_what_it_needs_and_identical_prompts_stay_apart(finished: Finished) -> None:
    run = finished.fresh()
    run.add_dataset("same", evol_rows("same", 1) * 16)
    run.save()
    with run.asked() as asked:
        jobs = run.jobs("results/same/train.parquet")
    assert jobs == onward("prompts_of_dataset", "same") - Counter(["stats_of_dataset same"])
    assert len(asked) == len({generation["seed"] for generation in asked}) == 16
    rows = list(read_table(run.folder / "results/same/train.parquet", TrainRow))
    assert len({row.id for row in rows}) == len({row.primary_id for row in rows}) == 16


@plain
def test_an_evaluation_set_that_changes_rebuilds_the_prompts_that_are_held_against_it(
    finished: Finished,
) -> None:
    run = finished.fresh()
    run.add_dataset("held", evol_rows("held", 2))
    run.write_rows("bench", evol_rows("bench", 1))
    bench = {"source": {"name": "magicoder"}, "files": ["data/bench.jsonl"]}
    run.config["evaluation_sets"] = {"bench": bench}
    run.config["datasets"]["held"]["decontaminate"] = {"against": ["bench"]}
    run.save()
    assert run.jobs("prompts") == Counter(["prompts_of_dataset held"])
    run.write_rows("bench", evol_rows("held", 1))
    assert run.jobs("prompts") == Counter(["prompts_of_dataset held"])
    told = json.loads((run.folder / "results/held/prompts.json").read_text())
    assert (told["used"], told["skipped"]) == (1, {"overlaps evaluation set bench": 1})


# --- the rules ---------------------------------------------------------------------------------------------------


@plain
def test_snakemake_finds_nothing_to_lint(finished: Finished) -> None:
    finished.fresh().snakemake("--lint")


@plain
def test_the_slurm_profile_plans_the_same_jobs_and_gives_the_server_its_gpus(finished: Finished) -> None:
    run = finished.fresh()
    shutil.rmtree(run.folder / "results")
    assert planned(run, "--workflow-profile", "profiles/slurm") == ALL
    held = run.snakemake("--dry-run", "--workflow-profile", "profiles/slurm", "serve").stdout
    assert re.search(r"resources: .*\bgpu=8\b", held)


@pytest.mark.parametrize("path", sorted((ROOT / "rules").glob("*.smk")), ids=lambda path: path.stem)
def test_every_rule_that_computes_has_an_env_a_log_and_a_benchmark(path: Path) -> None:
    for rule in re.split(r"(?m)^rule ", path.read_text())[1:]:
        if "shell:" in rule:
            # A benchmark counts as an output, and `serve` has none.
            keywords = ["conda", "log", "resources", *(["benchmark"] if "output:" in rule else [])]
            for keyword in keywords:
                assert re.search(rf"(?m)^    {keyword}:$", rule), rule.split(":")[0]
            (env,) = re.findall(r'"\.\./(envs/.*)"', rule)
            assert (ROOT / env).is_file()


def test_every_dataset_of_a_run_is_seen_from_its_start(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"alpha": 5, "beta": 5, "gamma": 5})
    run.config["datasets"]["alpha"] |= {"rows": 3, "samples": 2}
    run.config["datasets"]["beta"] |= {"rows": 3, "samples": 2}
    run.save()
    for name in ("beta", "gamma"):
        (run.folder / "data" / f"{name}.jsonl").write_text("no JSON\n")
    assert run.snakemake(check=False).returncode == 1
    seen = {
        name: read_progress(run.folder / f"logs/generate/{name}.status.json")
        for name in run.config["datasets"]
    }
    assert {name: shown and (shown.state, shown.done, shown.planned) for name, shown in seen.items()} == {
        "alpha": ("done", 6, 6),
        "beta": ("pending", 0, 6),
        "gamma": ("pending", 0, 0),
    }


def test_the_reference_run_plans_itself_without_a_network(tmp_path: Path) -> None:
    """Every job of the eight datasets at full size, in an empty folder, with nothing fetched."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "snakemake", "--cores", "4", "--dry-run", "--quiet", "rules"),
            *("--snakefile", str(ROOT / "Snakefile"), "--directory", str(tmp_path)),
            *("--configfile", str(ROOT / "configs" / "kimi-k2.5.yaml")),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    counts = dict(re.findall(r"^(\w+) +(\d+)$", done.stdout + done.stderr, re.MULTILINE))
    assert {counts[rule] for rule in ("prompts_of_dataset", "generate", "validate", "train_of_dataset")} == {
        "8"
    }
    assert counts["fetch_from_hub"] == "9"
