"""Runs whose data and tokenizer come from the hub: planned without a network, fetched once, rebuilt without it."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import Hub, hub
from fake_sglang import make_model
from pipeline import Run, evol_rows, executed

from eyas.recordfile import read_records
from eyas.records import Prompt

pytestmark = pytest.mark.workflow

FILE = "hub://datasets/org/set@v1/data/train.jsonl"
MODEL = "hub://org/model@v1"
AFTER = ("generate", "validate", "stats_of_dataset", "train_of_dataset")
END = {"mix": 1, "export train": 2, "summary": 1}


class HubRun(Run):
    """alpha's file and the tokenizer are on the hub. Of the tokenizer, this engine wants only the stop ids."""

    def __init__(self, folder: Path, known: Hub) -> None:
        super().__init__(folder, {"alpha": 0})
        self.known, self.offline = known, False
        self.config["datasets"]["alpha"]["files"] = [FILE]
        self.config["model"]["tokenizer"] = MODEL
        self.save()

    def environment(self) -> dict[str, str]:
        offline = {"HF_HUB_OFFLINE": "1"} if self.offline else {}
        return {
            **super().environment(),
            "HF_ENDPOINT": self.known.url,
            "HF_HOME": str(self.folder / "home"),
            **offline,
        }


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    rows = "".join(json.dumps(row) + "\n" for row in evol_rows("alpha", 3))
    model = make_model(tmp_path_factory.mktemp("model"))
    repos = {
        "datasets/org/set": {"data/train.jsonl": rows.encode()},
        "models/org/model": {
            **{path.name: path.read_bytes() for path in model.iterdir()},
            "model.safetensors": b"w",
            "code.py": b"",
        },
    }
    with hub(repos) as served:
        yield served


@pytest.fixture(scope="module")
def finished(known: Hub, tmp_path_factory: pytest.TempPathFactory) -> HubRun:
    """A finished run, planned without a network before anything was fetched."""
    run = HubRun(tmp_path_factory.mktemp("run"), known)
    run.offline = True
    planned = run.snakemake("--dry-run")
    assert Counter(executed(planned.stdout))["fetch_from_hub"] == 2 and known.requests == []
    assert not (run.folder / "data/hub").exists()
    run.offline = False
    jobs = run.jobs()
    assert jobs == Counter(
        {
            "fetch_from_hub": 2,
            "prompts_of_dataset alpha": 1,
            **{f"{stage} alpha": 1 for stage in AFTER},
            **END,
        }
    )
    return run


@pytest.fixture
def run(finished: HubRun, tmp_path: Path) -> HubRun:
    """A copy of the finished run, without a network."""
    shutil.copytree(finished.folder, tmp_path / "copy", symlinks=True)
    copied = HubRun.__new__(HubRun)
    copied.__dict__ |= finished.__dict__ | {
        "folder": tmp_path / "copy",
        "cwd": tmp_path / "copy",
        "offline": True,
    }
    copied.record = copied.folder / "requests.jsonl"
    os.utime(copied.folder)
    return copied


def test_prompts_tell_where_on_the_hub_they_came_from(finished: HubRun) -> None:
    prompts = list(read_records(finished.folder / "results/alpha/prompts.jsonl.zst", Prompt))
    assert {prompt.origin.file for prompt in prompts} == {FILE} and len(prompts) == 3
    assert (finished.folder / "data/hub/models/org/model/v1/tokenizer.json").is_file()
    assert not list(finished.folder.rglob("*.safetensors")) and not list(finished.folder.rglob("code.py"))


def test_what_was_fetched_is_not_asked_for_again(run: HubRun) -> None:
    before = len(run.known.requests)
    assert run.jobs() == Counter()
    shutil.rmtree(run.folder / "results")
    with run.asked() as requests:
        assert run.jobs()["generate alpha"] == 1
    assert requests == [] and len(run.known.requests) == before


def test_fetch_is_a_target_of_its_own(run: HubRun) -> None:
    shutil.rmtree(run.folder / "data/hub")
    run.offline = False
    assert run.jobs("fetch") == Counter({"fetch_from_hub": 2})
    assert run.jobs() == Counter(), "the same bytes came"


def test_a_failed_fetch_names_key_and_remedy(run: HubRun) -> None:
    shutil.rmtree(run.folder / "data/hub/models")
    shutil.rmtree(run.folder / "results")
    done = run.snakemake(check=False)
    assert done.returncode == 1
    assert (
        "eyas fetch: error: model.tokenizer: model org/model has not been fetched; run `snakemake --cores 1 fetch` where"
        in done.stderr
    )


def test_a_tokenizer_with_other_bytes_makes_answers_stale_and_one_only_touched_does_not(run: HubRun) -> None:
    folder = run.folder / "model"
    shutil.copytree(run.folder / "data/hub/models/org/model/v1", folder)
    run.config["model"]["tokenizer"] = "model"
    run.save()
    stale = Counter({**{f"{stage} alpha": 1 for stage in AFTER}, **END})
    with run.asked() as requests:
        assert run.jobs() == stale, "another path"
    assert requests == [], "but the same bytes"
    (folder / "tokenizer.json").touch()
    (folder / "README.md").write_text("none of the tokenizer's")
    assert run.jobs() == Counter()
    (folder / "tokenizer.json").write_text('{"other": 1}')
    planned = executed(run.snakemake("--dry-run").stdout)
    assert planned == stale
