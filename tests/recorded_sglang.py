"""The engine `recorded`: SGLang as it is, asked through the recorder at $EYAS_TEST_RECORDER. An Eyas plugin file."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from eyas import hookimpl
from eyas.engines.sglang import Sglang
from eyas.plugins import Launch


class Recorded(Sglang):
    """SGLang behind the recorder of the tests, which stands before `port`."""

    name = "recorded"

    def launch(self, python: str) -> list[Launch]:
        return [replace(launch, url=os.environ["EYAS_TEST_RECORDER"]) for launch in super().launch(python)]


@hookimpl
def register_engines(register: Any) -> None:
    register(Recorded)
