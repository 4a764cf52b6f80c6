"""The verdicts of `eyas doctor`, kept in the folder of the server's lease for `generate` to heed: one for each config."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from msgspec import Struct

from eyas.config import AccessSettings
from eyas.errors import EyasError
from eyas.server.state import write_private

FOLDER = "doctor"


class Verdict(Struct, frozen=True):
    """reasons: empty for GO. at: Unix time in s."""

    reasons: list[str]
    at: float


def place(access: AccessSettings) -> Path:
    """Where the verdict on the config of `access` lies. Relative to the working directory, as journal and results are."""
    return Path(access.server.state) / FOLDER / f"{access.config}.json"


def keep(access: AccessSettings, reasons: list[str]) -> None:
    """Replaces the verdict."""
    path = place(access)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, Verdict(reasons, time.time()))


def heed(access: AccessSettings) -> None:
    """Raises EyasError after a NO-GO for this very config, unless the config says to go on."""
    try:
        verdict = msgspec.json.decode(place(access).read_bytes(), type=Verdict)
    except (FileNotFoundError, msgspec.MsgspecError):
        return
    if verdict.reasons and not access.server.ignore_doctor:
        raise EyasError(
            f"`eyas doctor` said NO-GO ({verdict.reasons[0]}); mend it and run `eyas doctor` again, or set server.ignore_doctor: true"
        )
