"""The whole pipeline on a real SGLang that the lease starts: real weights, thinking on, everything counted at the socket."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import real_sglang
import yaml
from pipeline import PROFILE, ROOT, TESTS, executed
from processes import command_lines_with, endpoint, eventually, files_with, steady_port
from recorder import Recorder, Wire, check_rows, recorded

from eyas.recordfile import read_records
from eyas.records import Outcome, Response, TrainRow, Verdict
from eyas.tables import read_table

pytestmark = [pytest.mark.sglang, pytest.mark.workflow]

ROWS = 2  # of each dataset
# As the grammar of config.yaml: one to three sentences, the end of reasoning, and an answer.
SENTENCE = r'[A-Z0-9"][^\n<>.!?]{6,200}[.!?]'
REASONED = rf"{SENTENCE}( {SENTENCE}){{0,2}}\n</think>\n\n[^<> \n][^<>]{{0,500}}"
STATE = Path(".eyas") / "server"
FREE = "B7_sharegpt"  # held to nothing, as in config.yaml


@dataclass
class Watch:
    """A started server's key, and what held and showed it while the server was there."""

    keys: set[bytes] = field(default_factory=set)
    modes: set[int] = field(default_factory=set)
    holders: set[Path] = field(default_factory=set)
    shown: list[str] = field(default_factory=list)
    looks: int = 0


@contextmanager
def watched(folder: Path) -> Iterator[Watch]:
    """Looks at all files of a run, and at the command lines of all processes, as long as a server runs."""
    watch, over, state = Watch(), threading.Event(), folder / STATE

    def look() -> None:
        while not over.wait(0.2):
            try:
                watch.modes.add((state / "endpoint.json").stat().st_mode & 0o777)
                key = endpoint(state)["key"].encode()
            except FileNotFoundError:
                continue
            watch.keys.add(key)
            watch.holders.update(files_with(key, folder))
            watch.shown += command_lines_with(key)
            watch.looks += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()


@dataclass
class Pipeline:
    """A run in a folder of its own."""

    folder: Path
    recorder: Recorder
    watch: Watch
    terminal: str = ""

    def snakemake(self) -> str:
        command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
        environment = {"EYAS_TEST_RECORDER": self.recorder.url, "TMPDIR": str(self.folder / "tmp")}
        done = subprocess.run(
            [*command, "--workflow-profile", str(PROFILE), "--cores", "2"],
            cwd=self.folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        self.terminal += done.stdout + done.stderr
        assert done.returncode == 0, done.stderr[-6000:]
        return done.stderr

    @property
    def datasets(self) -> list[str]:
        return list(yaml.safe_load((self.folder / "config.yaml").read_text())["datasets"])

    def result(self, dataset: str, name: str) -> Path:
        return self.folder / "results" / dataset / name

    def responses(self, dataset: str) -> list[Response]:
        return list(read_records(self.result(dataset, "responses.jsonl.zst"), Response))

    def rows(self, dataset: str) -> list[TrainRow]:
        return list(read_table(self.result(dataset, "train.parquet"), TrainRow))

    def wire(self) -> Wire:
        """Every finished answer. The probes' prompt is [0]."""
        found = Wire()
        for request, reply in self.recorder.exchanges():
            asked = json.loads(request or b"{}").get("input_ids", [0])
            if asked != [0]:
                found[tuple(asked), tuple(json.loads(reply)["output_ids"])] += 1
        return found

    def bytes(self) -> dict[str, bytes]:
        """All results but the summary, which holds times."""
        root = self.folder / "results"
        files = (path for path in root.rglob("*") if path.is_file() and path.parent != root / "summary")
        return {str(path.relative_to(root)): path.read_bytes() for path in sorted(files)}


def write_config(folder: Path, port: int) -> None:
    """The shipped run, two prompts a dataset, on SGLang, which is in an environment of its own."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    model = {name: config["model"][name] for name in ("id", "context", "tools", "reasoning")}
    config["model"] = {**model, "kv_dtype": "bf16", "tokenizer": str(real_sglang.SMOLLM2)}
    engine = real_sglang.engine_section(
        real_sglang.SMOLLM2, max_running_requests=16, max_total_tokens=12288, port=port
    )
    config["server"] = {
        "engine": {**engine, "name": "recorded"},
        "env": "env/bin/python",
        "concurrency": 16,
        "idle_timeout": 10,
    }
    config["plugins"] = [str(TESTS / "recorded_sglang.py")]
    config["defaults"]["rows"] = ROWS
    del config["defaults"]["sampling"]["grammar"]
    config["defaults"]["sampling"]["regex"] = REASONED
    config["datasets"][FREE]["sampling"] = {"regex": None}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """A finished run whose server has gone."""
    environment = Path(real_sglang.python()).parent.parent
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tmp").mkdir()
    (folder / "env").symlink_to(environment)
    port = steady_port()
    write_config(folder, port)
    with recorded(f"http://127.0.0.1:{port}") as recorder, watched(folder) as watch:
        made = Pipeline(folder, recorder, watch)
        made.snakemake()
        supervisor = str(folder / STATE).encode()
        eventually(lambda: not command_lines_with(supervisor), "the server stops when it is idle")
        yield made


def test_every_training_row_is_the_ids_sent_plus_the_ids_that_came_back(run: Pipeline) -> None:
    rows = {name: run.rows(name) for name in run.datasets}
    assert sum(map(len, rows.values())) >= ROWS * 4, "most answers of the small model are fit for training"
    for name in run.datasets:
        check_rows(rows[name], run.wire())
        lengths = {f"{name}/{r.key}:{r.turn}:{r.sample}": len(r.output_ids) for r in run.responses(name)}
        assert {row.id: sum(row.loss_mask) for row in rows[name]}.items() <= lengths.items()


def test_every_answer_on_the_wire_is_a_response(run: Pipeline) -> None:
    responses = [response for name in run.datasets for response in run.responses(name)]
    assert len(responses) >= ROWS * 8
    assert Wire((tuple(r.prompt_ids), tuple(r.output_ids)) for r in responses) == run.wire()


def test_answers_reason_in_the_form_that_they_are_held_to(run: Pipeline) -> None:
    for name in run.datasets:
        for response, verdict in zip(
            run.responses(name), read_table(run.result(name, "verdicts.parquet"), Verdict), strict=True
        ):
            assert response.constrained == (name != FREE)
            if name != FREE and response.finish.type == "stop":
                assert verdict.reasoning_state == "closed"
                assert verdict.reasoning_tokens > 5 and verdict.answer_tokens > 1


def test_the_books_balance(run: Pipeline) -> None:
    summary = json.loads((run.folder / "results/summary/summary.json").read_text())
    total, accepted = summary["total"], 0
    assert total["planned"] == total["responses"] + total["not_reached"] >= ROWS * 8
    assert total["responses"] == total["accepted"] + total["rejected"]
    for name in run.datasets:
        outcomes = list(read_records(run.result(name, "outcomes.jsonl.zst"), Outcome))
        statuses = Counter((outcome.status, outcome.turn > 0) for outcome in outcomes)
        assert statuses.pop(("answered", False)) == ROWS
        assert set(statuses) <= {("answered", True), ("not_reached", True)}
        verdicts = list(read_table(run.result(name, "verdicts.parquet"), Verdict))
        assert sum(verdict.accepted for verdict in verdicts) == len(run.rows(name))
        accepted += len(run.rows(name))
    assert total["accepted"] == accepted


def test_the_report_is_there_and_names_every_dataset(run: Pipeline) -> None:
    page = (run.folder / "results/summary/report.html").read_text()
    assert [name for name in run.datasets if name not in page] == []


def test_the_key_was_in_the_lease_file_alone_and_is_gone_with_the_server(run: Pipeline) -> None:
    """Not in logs, results, reports, the journal, what Snakemake keeps, the terminal, or on a command line."""
    assert run.watch.keys and run.watch.modes == {0o600}
    assert run.watch.looks > 20 and run.watch.shown == []
    assert run.watch.holders == {run.folder / STATE / "endpoint.json"}
    for key in run.watch.keys:
        assert any(key in bytes(sent) for sent, _ in run.recorder.streams), "it was in use"
        assert files_with(key, run.folder) == []
        assert key.decode() not in run.terminal
    for name in ("results/summary/manifest.json", "logs/generate/B1_glaive.log", STATE / "server.log"):
        assert (run.folder / name).stat().st_size, "searched, and not empty"
    assert not (run.folder / STATE / "endpoint.json").exists()


def test_a_second_run_has_nothing_to_do(run: Pipeline) -> None:
    asked = run.wire()
    assert not executed(run.snakemake())
    assert run.wire() == asked


def test_results_are_rebuilt_without_server_and_engine(run: Pipeline) -> None:
    before, streams = run.bytes(), len(run.recorder.streams)
    (run.folder / "env").unlink()
    shutil.rmtree(run.folder / "results")
    (run.folder / STATE / "server.log").unlink()
    assert executed(run.snakemake())["generate B1_glaive"] == 1
    assert run.bytes() == before
    assert len(run.recorder.streams) == streams
    assert not (run.folder / STATE / "server.log").exists(), "nobody tried to start a server"
