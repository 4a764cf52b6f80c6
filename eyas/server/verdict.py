"""The verdict of `eyas doctor`, kept in the folder of the server's lease for `generate` to heed."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from msgspec import Struct

from eyas.config import AccessSettings, fingerprint
from eyas.errors import EyasError
from eyas.server.state import write_private

VERDICT = "doctor.json"


class Verdict(Struct, frozen=True):
    """reasons: empty for GO. about: fingerprint of the settings that were looked at. at: Unix time in s."""

    about: str
    reasons: list[str]
    at: float


def about(access: AccessSettings) -> str:
    """What a verdict is about: the model, and the server but for how patiently it is asked."""
    server = access.server
    return fingerprint([msgspec.to_builtins(access.model), server.engine, server.url, server.env])


def keep(access: AccessSettings, reasons: list[str]) -> None:
    """Replaces the verdict."""
    folder = Path(access.server.state)
    folder.mkdir(parents=True, exist_ok=True)
    write_private(folder / VERDICT, Verdict(about(access), reasons, time.time()))


def heed(access: AccessSettings) -> None:
    """Raises EyasError after a NO-GO for these very settings, unless the config says to go on."""
    try:
        verdict = msgspec.json.decode((Path(access.server.state) / VERDICT).read_bytes(), type=Verdict)
    except (FileNotFoundError, msgspec.MsgspecError):
        return
    if verdict.reasons and verdict.about == about(access) and not access.server.ignore_doctor:
        raise EyasError(
            f"`eyas doctor` said NO-GO ({verdict.reasons[0]}); mend it and run `eyas doctor` again, or set server.ignore_doctor: true"
        )
