"""Code digests: they hold what decides a stage's output, all of it, and nothing else."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pipeline import CONFIG

from eyas import digest
from eyas.config import DATASET_STAGES, PARAMS_LIMIT, Stages, canonical, load
from eyas.digest import TRANSPORT, closure, code_digest, code_digests, parts
from eyas.errors import EyasError
from eyas.plugins import BUILTINS, registry

STAGES = (*DATASET_STAGES, "mix", "export", "summary")
# Modules that a stage imports only while it runs.
LATE = {stage: ["eyas.sources.files"] for stage in STAGES}
LATE["generate"] += ["eyas.asking", "eyas.server.lease"]
# What only transport modules import.
BEHIND_TRANSPORT = {
    "eyas.admission",
    "eyas.server",
    "eyas.server.gpus",
    "eyas.server.shares",
    "eyas.server.state",
}
ON_DEMAND = {
    "eyas.lengths",
    "eyas.ranked",
    "eyas.remote_tokenizer",
}  # the latter for tokenizers of some kinds alone


def stages(*plugins: Path, **budgeted: Any) -> Stages:
    config = copy.deepcopy(CONFIG) | {"plugins": [str(path) for path in plugins]}
    config["server"] = {"engine": {"name": "llamacpp", "model_file": "m.gguf"}}
    config["datasets"] = {
        "plain": {"source": {"name": "glaive"}, "files": ["x"]},
        "budgeted": {"source": {"name": "magicoder"}, "files": ["x"], "budget_tokens": 9, **budgeted},
    }
    return Stages(load(config))


def forget() -> None:
    for cached in (digest.imports, digest.closure, digest.module_digest, registry):
        cached.cache_clear()


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package in another folder, where the digests now look for it."""
    package = tmp_path / "elsewhere" / "eyas"
    shutil.copytree(digest.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(digest, "PACKAGE", package)
    forget()
    yield package
    forget()


def every_digest(of: Stages) -> dict[str, str]:
    """The digests of all jobs, by stage and dataset."""
    found = {stage: code_digest(of, stage) for stage in ("stats", "train", "mix", "summary")}
    found["export"] = code_digest(of, "export", exporter="tokens")
    for stage in ("prompts", "generate", "validate"):
        found |= {f"{stage} {dataset}": code_digest(of, stage, dataset) for dataset in of.config.datasets}
    return found


@pytest.mark.parametrize(
    ("stage", "dataset"), [*((stage, "plain") for stage in STAGES), ("generate", "budgeted")]
)
def test_a_digest_holds_all_that_a_fresh_interpreter_imports(stage: str, dataset: str) -> None:
    made = stages()
    exporter = "tokens" if stage == "export" else None
    selected = [
        made.registry.find(kind, name, stage).cls.__module__
        for kind, name in made.plugins(stage, dataset, exporter)
    ]
    names = [f"eyas.{stage}", *selected, *LATE[stage]]
    code = f"import sys, json, {', '.join(names)}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name for name in json.loads(done.stdout) if name.split(".")[0] == "eyas"}
    held, strangers = parts(made, stage, dataset, exporter)
    assert imported - TRANSPORT - BEHIND_TRANSPORT - ON_DEMAND == held - ON_DEMAND
    assert not strangers and not (held & set(BUILTINS)) - set(selected)


@pytest.mark.parametrize("entry", sorted(TRANSPORT))
def test_no_transport_entry_is_superfluous(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [closure(f"eyas.{stage}") for stage in STAGES]
    monkeypatch.setattr(digest, "TRANSPORT", TRANSPORT - {entry})
    forget()
    assert [closure(f"eyas.{stage}") for stage in STAGES] != before
    monkeypatch.undo()
    forget()


def test_the_folder_of_the_code_is_in_no_digest(copied: Path) -> None:
    there = every_digest(stages())
    digest.PACKAGE = Path(digest.__file__).parent
    forget()
    assert every_digest(stages()) == there


ALL = set(every_digest(stages()))


@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("mix.py", {"mix", "summary"}),
        ("stats.py", {"stats", "summary"}),
        ("prompts.py", {"prompts plain", "prompts budgeted", "stats", "summary"}),
        ("render.py", {"generate plain", "generate budgeted", "export"}),
        ("sources/glaive.py", {"prompts plain"}),
        ("checks/length.py", {"validate plain", "validate budgeted", "generate budgeted"}),
        ("exporters/tokens.py", {"export"}),
        ("exporters/modelopt.py", set()),
        ("report/report.html.j2", {"summary"}),
        ("records.py", ALL),
        ("engines/llamacpp.py", set()),
        ("server/lease.py", set()),
        ("errors.py", set()),
        ("cli/status.py", set()),
    ],
)
def test_an_edit_makes_exactly_these_stale(copied: Path, file: str, stale: set[str]) -> None:
    before = every_digest(stages())
    with (copied / file).open("a") as edited:
        edited.write("\n# An edit.\n")
    forget()
    after = every_digest(stages())
    assert {job for job in before if before[job] != after[job]} == stale


CHECK = """
from eyas import hookimpl
from eyas.checks import length

class Mine(length.Length):
    \"\"\"A stranger's check.\"\"\"
    name = "mine"

@hookimpl
def register_checks(register):
    register(Mine)
"""


def test_a_plugin_file_counts_by_its_bytes_and_with_what_it_imports(tmp_path: Path, copied: Path) -> None:
    plugin = tmp_path / "mine.py"

    def digests(text: str = CHECK, **settings: Any) -> dict[str, str]:
        plugin.write_text(text)
        forget()
        return every_digest(stages(plugin, checks=settings))

    def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
        return {job for job in one if one[job] != other[job]}

    off = {"length": {"policy": "off"}, "mine": {"policy": "off"}}
    users = {"validate plain", "validate budgeted", "generate budgeted"}
    assert differing(digests(), digests(CHECK + "#")) == users
    assert differing(digests(**off), digests(CHECK + "#", **off)) == {"validate plain"}
    on = off | {"mine": {"policy": "mark"}}
    before = digests(**on)
    with (copied / "checks/length.py").open("a") as edited:
        edited.write("#")
    assert differing(before, digests(**on)) == users


def test_the_manifest_gets_the_digest_of_every_job() -> None:
    made = stages()
    expected = {
        stage: {name: code_digest(made, stage, name) for name in made.config.datasets}
        for stage in DATASET_STAGES
    }
    expected |= {
        "mix": {"train": code_digest(made, "mix")},
        "export": {"tokens": code_digest(made, "export", exporter="tokens")},
    }
    assert json.loads(code_digests(made)) == expected
    assert expected["prompts"]["plain"] != expected["prompts"]["budgeted"], "their sources differ"


def test_the_summary_has_the_settings_of_every_job_and_equal_ones_once() -> None:
    made = stages(sampling={"grammar": "x" * 3_000})
    summary = made.summary()
    for stage in DATASET_STAGES:
        for name in made.config.datasets:
            assert summary.job(stage, name) == msgspec.to_builtins(getattr(made, stage)(name))
    assert summary.job("mix", "train") == msgspec.to_builtins(made.mix())
    assert summary.job("export", "tokens") == msgspec.to_builtins(made.export("tokens"))
    assert len(canonical(summary)) < sum(
        len(canonical(getattr(made, stage)(name)))
        for stage in DATASET_STAGES
        for name in made.config.datasets
    )
    texts = [json.dumps(value, sort_keys=True) for value in summary.values]
    assert len(texts) == len(set(texts))


def test_datasets_with_long_settings_of_their_own_still_fit_the_summary() -> None:
    """Each fits its own jobs; together they would not fit the command line of one."""
    config = copy.deepcopy(CONFIG)
    grammars = {f"d{n:02}": f"root ::= {n} " + "é" * 20_000 for n in range(20)}
    config["datasets"] = {
        name: {"source": {"name": "glaive"}, "files": ["x"], "sampling": {"grammar": grammar}}
        for name, grammar in grammars.items()
    }
    made = Stages(load(config))
    summary = made.summary()
    assert len(canonical(summary).encode()) < PARAMS_LIMIT / 2
    for name, grammar in grammars.items():
        canonical(made.generate(name))
        assert summary.job("generate", name)["sampling"]["grammar"] == {
            "sha256": hashlib.sha256(grammar.encode()).hexdigest(),
            "characters": len(grammar),
        }


def test_settings_that_are_too_long_for_a_command_line_name_the_text_to_shorten() -> None:
    made = stages(sampling={"grammar": "x" * PARAMS_LIMIT})
    canonical(made.generate("plain"))
    with pytest.raises(EyasError, match=r"datasets\.budgeted: .*64,000.*`sampling\.grammar`"):
        canonical(made.generate("budgeted"))
