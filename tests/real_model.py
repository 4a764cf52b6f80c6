"""Where the real model of the engine tests lies, and how its server is started without a lease."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from eyas.config import ModelConfig
from eyas.engines.llamacpp import LlamaCpp, ServerOptions
from eyas.plugins import Launch, Retry

KEY = "a-key-for-tests"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL = ModelConfig(id="SmolLM2-135M-Instruct", sha256=SHA256, quantisation="Q4_1", context=512)


def model_file() -> Path:
    """The GGUF file, or a skip that says how to get it."""
    default = Path(__file__).parent.parent / "data" / "hub" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path = Path(os.environ.get("EYAS_TEST_MODEL", default))
    if not path.is_file():
        pytest.skip(f"no model at {path}: run `make model`, or set EYAS_TEST_MODEL")
    pytest.importorskip(
        "xllamacpp", reason="the embedded engine is not installed: pip install 'eyas[llamacpp]'"
    )
    return path


def engine(model: ModelConfig = MODEL, **options: object) -> LlamaCpp:
    return LlamaCpp(ServerOptions(**{"model_file": str(model_file()), "slots": 2, **options}), model)  # type: ignore[arg-type]


@contextlib.contextmanager
def launched(
    launch: Launch, output: IO[bytes] | int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        launch.argv,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **launch.env, "EYAS_API_KEY": KEY},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def running(engine: LlamaCpp) -> Iterator[str]:
    """The address of a server that generates."""
    launch = engine.launch(sys.executable)[0]
    with launched(launch) as process:
        deadline = time.monotonic() + 60
        while True:
            try:
                engine.inspect(launch.url, KEY)
                break
            except Retry:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        yield launch.url
