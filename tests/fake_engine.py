"""The engine `fake`: llama.cpp's client in front of the fake server, for workflow and fault tests. An Eyas plugin file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from eyas import hookimpl
from eyas.engines.llamacpp import LlamaCpp
from eyas.plugins import Launch

FAKE = Path(__file__).with_name("fake_llamacpp.py")


class Fake(LlamaCpp):
    """The fake llama.cpp server of the tests."""

    name = "fake"

    def launch(self, python: str) -> list[Launch]:
        return [
            Launch(
                argv=[
                    python,
                    str(FAKE),
                    *launch.argv[launch.argv.index("--model") : launch.argv.index("--threads")],
                    *os.environ.get("FAKE_ARGUMENTS", "").split(),
                ],
                env={},
                url=launch.url,
            )
            for launch in super().launch(python)
        ]


@hookimpl
def register_engines(register: Any) -> None:
    register(Fake)
