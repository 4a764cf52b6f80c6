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
import requests
import yaml
from pipeline import PROFILE, ROOT
from real_model import KEY, MODEL, engine, model_file, running
from recorder import Recorder, Wire, check_rows, recorded

from eyas.recordfile import read_records
from eyas.records import Response, TrainRow
from eyas.tables import read_table

pytestmark = [pytest.mark.engine, pytest.mark.workflow]
IDENTICAL = 16
TALKS = [
    ["What is the capital of Greece?", "What is it known for?", "Say it in Greek: 🌍"],
    ["Name a bird.\n", " Where does it live?", "Why?"],
]
# Short, and it ends, so that every turn is reached.
BRIEF = r"""
root ::= said "\n</think>\n\n" said
said ::= [A-Z] [a-z, ]{4,60} "."
"""


def generations(recorder: Recorder) -> Wire:
    """Every answered generation. Probes ask for one token and for the whole reply."""
    return Wire(
        (tuple(json.loads(request)["prompt"]), tuple(json.loads(reply)["tokens"]))
        for request, reply in recorder.exchanges()
        if b'"response_fields"' in request
    )


def tokenized(recorder: Recorder, text: str) -> list[int]:
    """The ids that the model's own server gives a text."""
    body = {"content": text, "add_special": False, "parse_special": True}
    reply = requests.post(f"{recorder.url}/tokenize", json=body, headers={"Authorization": f"Bearer {KEY}"})
    ids: list[int] = reply.json()["tokens"]
    return ids


def write_config(folder: Path, url: str) -> None:
    """The shipped run, two prompts a dataset, a dataset of sixteen identical prompts, and one of conversations."""
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
    recorded = [
        [
            turn
            for text in talk
            for turn in ({"from": "human", "value": text}, {"from": "gpt", "value": "old"})
        ]
        for talk in TALKS
    ]
    rows = [
        {"id": f"talk{n}", "conversations": [{"from": "system", "value": "Be brief."}, *turns]}
        for n, turns in enumerate(recorded)
    ]
    (folder / "talks.json").write_text(json.dumps(rows))
    config["datasets"]["talks"] = {
        "source": {"name": "sharegpt"},
        "files": ["talks.json"],
        "turns": "all",
        "sampling": {"grammar": BRIEF},
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


def test_each_turn_is_asked_with_the_models_own_answers_in_its_template(run: tuple[Path, Recorder]) -> None:
    """The real tokenizer's ids of the real template; its reasoning is dropped by this template, as it is in serving."""
    folder, recorder = run
    responses = list(read_records(folder / "results" / "talks" / "responses.jsonl.zst", Response))
    assert sorted((r.key, r.turn) for r in responses) == [
        (f"talk{n}", turn) for n in (0, 1) for turn in (0, 1, 2)
    ]
    history = {f"talk{n}": "<|im_start|>system\nBe brief.<|im_end|>\n" for n in (0, 1)}
    for response in responses:
        text = TALKS[int(response.key[-1])][response.turn]
        history[response.key] += f"<|im_start|>user\n{text}<|im_end|>\n"
        asked = history[response.key] + "<|im_start|>assistant\n"
        assert response.prompt_ids == [*tokenized(recorder, asked), *tokenized(recorder, "<think>\n")]
        _, _, said = response.text.partition("</think>")
        history[response.key] += f"<|im_start|>assistant\n{said.strip()}<|im_end|>\n"
    rows = read_table(folder / "results" / "talks" / "train.parquet", TrainRow)
    assert [(row.id, row.primary_id) for row in rows] == [
        (f"talks/{r.key}:{r.turn}:0", f"talks/{r.key}") for r in responses
    ]


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
    assert total["prompts"] == 2 * 8 + IDENTICAL + len(TALKS)
    assert total["planned"] == total["turns"] >= total["prompts"] + sum(len(talk) - 1 for talk in TALKS)
    assert total["responses"] == total["accepted"] + total["rejected"]
    assert total["responses"] + total["not_reached"] == total["planned"]
    rows = sum(
        pq.read_metadata(run[0] / "results" / name / "train.parquet").num_rows for name in datasets(run[0])
    )
    assert total["accepted"] == rows
