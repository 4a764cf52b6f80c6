"""The generate stage without Snakemake: settings, paths and prompts for a fake server."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_llamacpp import make_model
from helpers import prompt

from eyas.config import AccessSettings, GenerateSettings, Stages, load
from eyas.errors import EyasError
from eyas.generate import Paths, generate
from eyas.recordfile import read_records, write_records
from eyas.records import Outcome, Response

FAKE = Path(__file__).with_name("fake_llamacpp.py")
ENGINE = Path(__file__).with_name("fake_engine.py")


@dataclass
class Stage:
    """One dataset's generation in `folder`. `server`, `dataset` and `model` are laid over the config's sections."""

    folder: Path
    texts: list[str]
    name: str = "alpha"
    server: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    audit: dict[str, Any] | None = None
    plugin: Path = ENGINE

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "tiny.gguf").exists():
            make_model(self.folder / "tiny.gguf")
        (self.folder / "data.jsonl").touch()
        write_records(self.paths.prompts, [prompt(f"k{n}", text) for n, text in enumerate(self.texts)])

    @property
    def paths(self) -> Paths:
        base = self.folder / self.name
        return Paths(
            prompts=base / "prompts.jsonl.zst",
            journal=self.folder / "journal" / self.name,
            responses=base / "responses.jsonl.zst",
            outcomes=base / "outcomes.jsonl.zst",
            timing=base / "timing.parquet",
            servers=base / "servers.json",
            progress=base / f"{self.name}.status.json",
            audit=base / "audit.jsonl",
        )

    def settings(self, url: str | list[str] | None) -> tuple[GenerateSettings, AccessSettings, Stages]:
        config = load(
            {
                "model": {
                    "id": "fake",
                    "quantisation": "Q4_1",
                    "context": 2048,
                    "reasoning": {"name": "tags", "opened_by_prompt": True, "prefill": "<think>\n"},
                    **self.model,
                },
                "server": {
                    "engine": {"name": "fake", "model_file": str(self.folder / "tiny.gguf")},
                    "url": url,
                    "state": str(self.folder / "state"),
                    "concurrency": 8,
                    "start_timeout": 30,
                    "retries": 8,
                    **self.server,
                },
                "datasets": {
                    self.name: {
                        "source": {"name": "magicoder"},
                        "files": ["data.jsonl"],
                        "sampling": {"max_new_tokens": 400},
                        **self.dataset,
                    }
                },
                "audit": self.audit,
                "plugins": [str(self.plugin)],
            }
        )
        stages = Stages(config)
        return stages.generate(self.name), stages.access(), stages

    def run(self, url: str | list[str] | None) -> None:
        settings, access, stages = self.settings(url)
        generate(settings, access, self.paths, stages.registry)

    def start(self, url: str | list[str] | None) -> tuple[threading.Thread, list[BaseException]]:
        """`run` in a thread, and what it raised."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self.run(url)
            except EyasError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread, errors

    def responses(self) -> list[Response]:
        return list(read_records(self.paths.responses, Response))

    def outcomes(self) -> list[Outcome]:
        return list(read_records(self.paths.outcomes, Outcome))


@dataclass
class Served:
    """A fake server that runs: where, what it recorded, and its process."""

    url: str
    record: Path
    process: subprocess.Popen[str]

    def lines(self) -> list[str]:
        return self.record.read_text().splitlines() if self.record.exists() else []


@contextmanager
def fake_server(folder: Path, *arguments: str) -> Iterator[Served]:
    folder.mkdir(exist_ok=True)
    if not (folder / "tiny.gguf").exists():
        make_model(folder / "tiny.gguf")
    record = folder / "requests.jsonl"
    command = [
        sys.executable,
        str(FAKE),
        "--model",
        str(folder / "tiny.gguf"),
        "--record",
        str(record),
        *arguments,
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Served(process.stdout.readline().strip(), record, process)
    finally:
        process.kill()
        process.wait()
