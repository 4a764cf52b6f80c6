"""How fast a server with continuous batching decodes, by what runs on it.

A decoding step takes `base * running^exponent + per_token * resident` ms: weights are read once for all requests, ever more of
them where experts are chosen by token, and the KV cache is read once a step. Prompts that are read in take their time
from decoding. Fitted to a server's own points; where they are few, the published curve of Kimi-K2.6 on eight RTX PRO 6000 speaks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from eyas.capacity import Lengths, running
from eyas.plugins import Pool

# Sd of what is not known of a server before it is measured: logarithms of base and per_token, and the exponent itself.
PRIOR_SD = (1.5, 0.15, 0.5)
POINT_SD = 0.08  # of a point's log rate about the curve
ROUNDS = 50  # of Gauss and Newton, at most


class Step(Struct, frozen=True, kw_only=True):
    """base: ms of a step with one request. per_token: ms for each resident token of KV cache, its bytes by memory bandwidth.

    The defaults fit 13 published points (facts in tests/test_speed.py) within 11 %; per_token is FP8 over 1.792 TB/s.
    """

    base: float = 11.0
    exponent: float = 0.345
    per_token: float = 1.96e-5

    def milliseconds(self, requests: float, resident: float) -> float:
        """Of one step that gives each of `requests` a token; resident: tokens in the KV cache, of all of them together."""
        return float(self.base * requests**self.exponent + self.per_token * resident)

    def tokens_per_second(self, requests: float, resident: float) -> float:
        """Output tokens, while no prompt is read in."""
        return 1000 * requests / self.milliseconds(requests, resident)


class Point(Struct, frozen=True, kw_only=True):
    """A measured rate. resident: tokens in the KV cache, of all running requests together."""

    running: float
    resident: float
    tokens_per_second: float


class Server(Struct, frozen=True, kw_only=True):
    """One server. prefill: prompt tokens/s, which decoding stands still for."""

    pool: Pool
    step: Step = Step()
    prefill: float = 7_000.0


class Served(Struct, frozen=True, kw_only=True):
    """What a server does with requests of given lengths. pushed_out: whether the KV cache overflows now and then (retraction)."""

    running: float
    tokens_per_second: float
    pushed_out: bool


def fit(points: Sequence[Point], prior: Step | None = None) -> Step:
    """The likeliest step given the points and a prior; without points the prior. Points with no request are left out."""
    prior = prior or Step()
    used = [one for one in points if one.running >= 1 and one.tokens_per_second > 0]
    centre = np.array([np.log(prior.base), prior.exponent, np.log(prior.per_token)])
    at = centre.copy()
    requests = np.array([one.running for one in used])
    resident = np.array([one.resident for one in used])
    measured = np.log([1000 * one.running / one.tokens_per_second for one in used])
    for _ in range(ROUNDS):
        decode = np.exp(at[0]) * requests ** at[1]
        read = np.exp(at[2]) * resident
        total = decode + read
        slopes = np.column_stack([decode / total, decode / total * np.log(requests), read / total]) / POINT_SD
        rows = np.vstack([slopes, np.diag(1 / np.array(PRIOR_SD))])
        lack = np.concatenate([(measured - np.log(total)) / POINT_SD, (centre - at) / PRIOR_SD])
        change = np.linalg.lstsq(rows, lack, rcond=None)[0]
        at += np.clip(change, -1, 1)
        if np.abs(change).max() < 1e-9:
            break
    return Step(base=float(np.exp(at[0])), exponent=float(at[1]), per_token=float(np.exp(at[2])))


def served(server: Server, lengths: Lengths, in_flight: int) -> Served:
    """How many of `in_flight` requests run, and the rate in output tokens/s that they make."""
    found = running(server.pool, lengths, in_flight)
    each = lengths.prompt + lengths.resident
    seconds = server.step.milliseconds(found.about, found.about * each) / 1000 / found.about
    seconds += lengths.prompt / max(lengths.output, 1.0) / server.prefill
    return Served(
        running=found.about,
        tokens_per_second=1 / seconds,
        pushed_out=found.about * each * (1 + 1 / found.about**0.5) > server.pool.tokens,
    )
