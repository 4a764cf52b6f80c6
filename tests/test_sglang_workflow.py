"""The whole pipeline on the fake SGLang: what crossed the socket is what is trained on, whatever goes wrong on the way."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import VOCABULARY, make_model
from pipeline import Run
from test_sglang import recorded, serving

from eyas.recordfile import read_records
from eyas.records import Outcome, TrainRow
from eyas.tables import read_table

pytestmark = [pytest.mark.workflow, pytest.mark.fault]
ROWS = {"alpha": 70, "beta": 50}


def model_section(model: Path) -> dict[str, Any]:
    return {
        "id": "org/byte-reasoner",
        "tokenizer": model.name,
        "kv_dtype": "bf16",
        "context": 2048,
        "tools": "system",
        "reasoning": {"name": "tags", "opened_by_prompt": True, "single_token": True},
    }


@pytest.mark.parametrize("version", ["0.5.23", "0.4.10"])
def test_ids_at_the_socket_are_the_training_rows_and_every_prompt_is_accounted_for(
    tmp_path: Path, version: str
) -> None:
    run = Run(tmp_path, ROWS)
    record, faults = tmp_path / "socket", tmp_path / "faults"
    model = make_model(tmp_path / "byte-reasoner")
    run.config["model"] = model_section(model)
    arguments = (
        "--context",
        "2048",
        "--max-running",
        "4",
        "--delay",
        "0.05",
        "--faults",
        "0.1",
        "--seed",
        "1",
    )
    files = ("--record", str(record), "--fault-log", str(faults))
    with serving(model, "--version", version, *arguments, *files) as url:
        run.config["server"] = {
            "engine": {"name": "sglang"},
            "url": url,
            "concurrency": 16,
            "retries": 9,
            # A reply that stalls is given up after 12 s.
            "slowest_rate": 100,
            "queue_wait": 8,
        }
        run.config["plugins"] = []
        run.save()
        run.snakemake()
    outcomes = [
        outcome.status
        for dataset in ROWS
        for outcome in read_records(tmp_path / "results" / dataset / "outcomes.jsonl.zst", Outcome)
    ]
    assert outcomes == ["answered"] * sum(ROWS.values())
    sent = recorded(record)
    crossed = Counter((*one["prompt"], *one["tokens"]) for one in sent)
    assert max(token for ids in crossed for token in ids) < VOCABULARY
    # The answer to a request that had been given up crosses too.
    shown = faults.read_text().splitlines()
    assert shown and len(sent) <= sum(ROWS.values()) + len(shown)
    assert len(crossed) == sum(ROWS.values())
    trained = [
        (tuple(row.input_ids), sum(row.loss_mask))
        for dataset in ROWS
        for row in read_table(tmp_path / "results" / dataset / "train.parquet", TrainRow)
    ]
    assert 0.8 * sum(ROWS.values()) < len(trained) <= sum(ROWS.values())
    tokens = {(*one["prompt"], *one["tokens"]): len(one["tokens"]) for one in sent}
    assert len(set(trained)) == len(trained) and all(tokens[ids] == count for ids, count in trained)
    if version == "0.5.23":
        assert len({one["seed"] for one in sent}) >= sum(ROWS.values()), "each request has a seed of its own"
    (server,) = json.loads((tmp_path / "results" / "alpha" / "servers.json").read_text()).values()
    assert server["engine_version"].startswith(f"sglang {version}")


def test_the_drift_audit_sees_whole_rounds(tmp_path: Path) -> None:
    run = Run(tmp_path, {"alpha": 60})
    model = make_model(tmp_path / "byte-reasoner")
    run.config["model"] = model_section(model)
    run.config["audit"] = {"prompts": 2, "minutes": 0.005}
    with serving(model, "--context", "2048", "--max-running", "4", "--delay", "0.05") as url:
        run.config["server"] = {"engine": {"name": "sglang"}, "url": url, "concurrency": 4}
        run.config["plugins"] = []
        run.save()
        run.snakemake("results/alpha/responses.jsonl.zst")
    rounds = [
        json.loads(line) for line in (tmp_path / "logs/generate/alpha.audit.jsonl").read_text().splitlines()
    ]
    assert len(rounds) > 1 and all(len(one["answers"]) == 2 for one in rounds), rounds
