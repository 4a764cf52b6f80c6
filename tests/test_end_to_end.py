"""The whole pipeline on the real model: training rows are exactly the ids that crossed the socket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
import yaml
from pipeline import PROFILE, ROOT
from real_model import KEY, MODEL, engine, model_file, running
from recorder import Recorder, Wire, check_rows, recorded

from eyas.recordfile import read_records
from eyas.records import TrainRow
from eyas.tables import read_table

pytestmark = [pytest.mark.engine, pytest.mark.workflow]
IDENTICAL = 16


def generations(recorder: Recorder) -> Wire:
    """Every answered generation. Probes ask for one token and for the whole reply."""
    return Wire(
        (tuple(json.loads(request)["prompt"]), tuple(json.loads(reply)["tokens"]))
        for request, reply in recorder.exchanges()
        if b'"response_fields"' in request
    )


def write_config(folder: Path, url: str) -> None:
    """The shipped run, two prompts a dataset, and a dataset of sixteen identical prompts."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["server"] |= {"url": url, "api_key_env": "EYAS_TEST_KEY", "concurrency": 4}
    config["server"]["engine"]["model_file"] = str(model_file())
    config["defaults"]["rows"] = 2
    config["defaults"]["sampling"]["max_new_tokens"] = 128
    row = json.dumps({"instruction": "Say hello to the 🌍 in Greek.", "response": "old"}) + "\n"
    (folder / "identical.jsonl").write_text(row * IDENTICAL)
    config["datasets"]["identical"] = {
        "source": {"name": "magicoder"},
        "files": ["identical.jsonl"],
        "rows": None,
        "sampling": {"temperature": 1.5, "max_new_tokens": 16, "grammar": None},
        "checks": {
            name: {"policy": "mark"}
            for name in ("reasoning", "length", "degenerate", "unicode", "empty_answer")
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Recorder]]:
    folder = tmp_path_factory.mktemp("end to end")
    served = engine(msgspec.structs.replace(MODEL, context=1024), slots=4)
    with running(served) as url, recorded(url) as recorder:
        write_config(folder, recorder.url)
        command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
        done = subprocess.run(
            [*command, "--workflow-profile", str(PROFILE), "--cores", "2"],
            cwd=folder,
            env={**os.environ, "EYAS_TEST_KEY": KEY},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        yield folder, recorder


def datasets(folder: Path) -> list[str]:
    return list(yaml.safe_load((folder / "config.yaml").read_text())["datasets"])


def test_every_training_row_is_the_ids_sent_plus_the_ids_that_came_back(run: tuple[Path, Recorder]) -> None:
    folder, recorder = run
    rows = [
        row
        for name in datasets(folder)
        for row in read_table(folder / "results" / name / "train.parquet", TrainRow)
    ]
    assert len(rows) >= 16
    check_rows(rows, generations(recorder))


def test_every_answer_on_the_wire_is_a_response(run: tuple[Path, Recorder]) -> None:
    folder, recorder = run
    files = [folder / "results" / name / "responses.jsonl.zst" for name in datasets(folder)]
    responses = Counter(
        (tuple(r["prompt_ids"]), tuple(r["output_ids"])) for file in files for r in read_records(file, dict)
    )
    assert responses == generations(recorder)


def test_sixteen_identical_prompts_give_sixteen_rows(run: tuple[Path, Recorder]) -> None:
    rows = list(read_table(run[0] / "results" / "identical" / "train.parquet", TrainRow))
    assert len({row.id for row in rows}) == len({row.primary_id for row in rows}) == IDENTICAL
    assert len({row.metadata.group for row in rows}) == 1
    assert len({tuple(row.input_ids) for row in rows}) > 1, "each is an answer of its own"


def test_the_mix_and_its_export_hold_the_same_rows_once(run: tuple[Path, Recorder]) -> None:
    folder, _ = run
    per_dataset = {
        row.id: row
        for name in datasets(folder)
        for row in read_table(folder / "results" / name / "train.parquet", TrainRow)
    }
    mixed = [
        row
        for side in ("train", "eval")
        for row in read_table(folder / f"results/train/{side}.parquet", TrainRow)
    ]
    assert {row.id: row for row in mixed} == per_dataset and len(mixed) == len(per_dataset)
    exported = [
        row
        for side in ("train", "eval")
        for row in read_records(folder / f"results/train/exports/tokens/{side}.jsonl.zst", TrainRow)
    ]
    assert exported == mixed


def test_the_books_balance_on_the_real_run(run: tuple[Path, Recorder]) -> None:
    summary = json.loads((run[0] / "results/summary/summary.json").read_text())
    total = summary["total"]
    assert total["planned"] == 2 * 8 + IDENTICAL
    assert total["responses"] == total["accepted"] + total["rejected"] == total["planned"]
    rows = sum(
        pq.read_metadata(run[0] / "results" / name / "train.parquet").num_rows for name in datasets(run[0])
    )
    assert total["accepted"] == rows
