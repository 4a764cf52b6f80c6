"""The request hash: all that decides the distribution of an answer, and nothing else."""

from __future__ import annotations

import array
import hashlib
import json
import sys
from collections.abc import Sequence

import msgspec

from eyas.config import ModelConfig, SamplingConfig

FORMAT = 4  # a change here makes every journalled answer stale

IDENTITY = ("id", "revision", "sha256", "quantisation", "weight_dtype", "kv_dtype")


class Hasher:
    """Hashes requests to one model with one set of sampling fields.

    stop_ids: at which answers end, where the client tells them; with llama.cpp they are in the weight file.
    Left out on purpose: address, engine version, tp, memory settings, context length. They do not choose tokens, or are told
    by a warning (server manifest); a prompt that would not leave room for the answer is never sent.
    """

    def __init__(self, model: ModelConfig, sampling: SamplingConfig, stop_ids: Sequence[int] = ()) -> None:
        constant = {
            "format": FORMAT,
            "model": {name: getattr(model, name) for name in IDENTITY},
            "sampling": msgspec.to_builtins(sampling),
            "stop_ids": sorted(stop_ids),
        }
        self._start = hashlib.sha256(json.dumps(constant, sort_keys=True).encode())

    def hash(self, prompt_ids: Sequence[int], sample: int, occurrence: int) -> str:
        """32 hex digits. `sample` and `occurrence` keep repeated questions apart."""
        ids = array.array("I", prompt_ids)
        if sys.byteorder == "big":
            ids.byteswap()
        digest = self._start.copy()
        digest.update(b"%d %d " % (sample, occurrence))
        digest.update(ids.tobytes())
        return digest.hexdigest()[:32]


def seed_of(request: str) -> int:
    """A 32-bit seed derived from the request hash."""
    return int(request[:8], 16)
