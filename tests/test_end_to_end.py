"""The whole pipeline on the real model: training rows are exactly the ids that crossed the socket."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pyarrow.parquet as pq
import pytest
import yaml
from pipeline import PROFILE, ROOT
from real_model import KEY, MODEL, engine, model_file, running

from eyas.recordfile import read_records
from eyas.records import TrainRow
from eyas.tables import read_table

pytestmark = [pytest.mark.engine, pytest.mark.workflow]
IDENTICAL = 16


@dataclasses.dataclass
class Recorder:
    """Raw bytes of both directions of every connection, taken between Eyas and the server."""

    target: str
    streams: list[tuple[bytearray, bytearray]] = dataclasses.field(default_factory=list)
    url: str = ""

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = urlsplit(self.target)
        upstream = await asyncio.open_connection(address.hostname, address.port)
        sent, received = bytearray(), bytearray()
        self.streams.append((sent, received))
        await asyncio.gather(_copy(reader, upstream[1], sent), _copy(upstream[0], writer, received))

    def generations(self) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(ids sent, ids that came back) of every answered generation, read from the wire without Eyas' help."""
        found: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
        for sent, received in self.streams:
            for request, reply in zip(_bodies(bytes(sent)), _bodies(bytes(received)), strict=False):
                # Probes ask for one token and for the whole reply.
                if b'"response_fields"' in request:
                    found[tuple(json.loads(request)["prompt"]), tuple(json.loads(reply)["tokens"])] += 1
        return found


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
    try:
        while data := await reader.read(65536):
            record += data
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


def _bodies(stream: bytes) -> Iterator[bytes]:
    """The bodies of the HTTP messages in one direction of a connection; all carry a Content-Length or have none."""
    while b"\r\n\r\n" in stream:
        head, _, rest = stream.partition(b"\r\n\r\n")
        fields = [line.partition(b":") for line in head.lower().split(b"\r\n")[1:]]
        assert not any(name == b"transfer-encoding" for name, _, _ in fields)
        length = next((int(value) for name, _, value in fields if name == b"content-length"), 0)
        yield rest[:length]
        stream = rest[length:]


@contextmanager
def recorded(target: str) -> Iterator[Recorder]:
    recorder, loop = Recorder(target), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(recorder.connection, "127.0.0.1", 0))
    recorder.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield recorder
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


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
    wire = recorder.generations()
    rows = [
        row
        for name in datasets(folder)
        for row in read_table(folder / "results" / name / "train.parquet", TrainRow)
    ]
    assert len(rows) >= 16
    for row in rows:
        prompt = row.loss_mask.index(1)
        output = len(row.input_ids) - prompt
        assert row.loss_mask == [0] * prompt + [1] * output
        assert wire[tuple(row.input_ids[:prompt]), tuple(row.input_ids[prompt:])] >= 1, row.id
        metadata = row.metadata
        assert output == metadata.reasoning_tokens + metadata.answer_tokens


def test_every_answer_on_the_wire_is_a_response(run: tuple[Path, Recorder]) -> None:
    folder, recorder = run
    files = [folder / "results" / name / "responses.jsonl.zst" for name in datasets(folder)]
    responses = Counter(
        (tuple(r["prompt_ids"]), tuple(r["output_ids"])) for file in files for r in read_records(file, dict)
    )
    assert responses == recorder.generations()


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
