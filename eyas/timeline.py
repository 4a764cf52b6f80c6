"""Throughput over time, and what happened to the servers meanwhile, from timing.parquet and the server manifests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct

from eyas.hours import come_by

STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)  # s
MOST_BINS = 120
LEAST_PAUSE = 60.0  # s with nothing in flight that count as a pause
PAUSE_SHARE = 0.01  # of the whole time; a shorter one could not be seen in a chart
MOST_CHANGES = 4  # fields named when a manifest differs from the one before

Floats = npt.NDArray[np.floating[Any]]


class Event(Struct, frozen=True, kw_only=True):
    """What happened `seconds` after the first request, as a sentence."""

    seconds: float
    what: str


class Timeline(Struct, frozen=True, kw_only=True):
    """began: Unix s of the first request. width: of a bin, in s. The lists have a number for each bin, from `began` on.

    tokens_per_second: output tokens, those of a reply spread evenly over the time it took. in_flight: on average.
    asked_again: replies that took more than one attempt, by when they were finished.
    """

    began: float
    width: float
    tokens_per_second: list[float]
    in_flight: list[float]
    asked_again: list[int]
    events: list[Event]


def timeline(replies: pd.DataFrame, manifests: Mapping[str, Any]) -> Timeline | None:
    """The course of a run; None if nothing was answered.

    replies: server, started, finished (Unix s), output_tokens, attempt. manifests: by the ids in `server`.
    """
    if replies.empty:
        return None
    began = float(replies["started"].min())
    start = replies["started"].to_numpy(dtype=np.float64) - began
    # A clock may have been set back.
    end = np.maximum(replies["finished"].to_numpy(dtype=np.float64) - began, start)
    whole = float(end.max())
    width = float(
        next(
            (step for step in STEPS if whole / step <= MOST_BINS),
            86400 * math.ceil(whole / 86400 / MOST_BINS),
        )
    )
    edges = np.arange(max(math.ceil(whole / width), 1) + 1, dtype=np.float64) * width
    tokens = replies["output_tokens"].to_numpy(dtype=np.float64)
    again = end[replies["attempt"].to_numpy() > 1]
    return Timeline(
        began=began,
        width=width,
        tokens_per_second=_rounded(np.diff(come_by(edges, start, end, tokens)) / width),
        in_flight=_rounded(np.diff(come_by(edges, start, end, end - start)) / width),
        asked_again=np.histogram(np.minimum(again, edges[-1]), edges)[0].tolist(),
        events=sorted(
            [*_pauses(start, end, whole), *_servers(replies["server"].astype(str), start, manifests)],
            key=lambda event: event.seconds,
        ),
    )


def _rounded(values: Floats) -> list[float]:
    return [round(value, 2) for value in values.tolist()]


def _pauses(start: Floats, end: Floats, whole: float) -> list[Event]:
    """When nothing was in flight for long: between two sessions, or while a server was away."""
    order = np.argsort(start, kind="stable")
    begins, ends = start[order], np.maximum.accumulate(end[order])
    gaps = begins[1:] - ends[:-1]
    least = max(LEAST_PAUSE, PAUSE_SHARE * whole)
    return [
        Event(seconds=round(float(ends[at]), 1), what=f"Nothing in flight for {_lasting(float(gaps[at]))}")
        for at in np.flatnonzero(gaps >= least)
    ]


def _lasting(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _servers(server: pd.Series[str], start: Floats, manifests: Mapping[str, Any]) -> list[Event]:
    """The first request to each manifest, and in what it differs from the one before."""
    firsts = pd.Series(start).groupby(server.to_numpy()).min().sort_values(kind="stable")
    events, before = [], None
    for name, seconds in firsts.items():
        what = f"First request to server {str(name)[:8]}"
        if before is not None:
            what += f": {_changes(manifests.get(before) or {}, manifests.get(str(name)) or {})}"
        events.append(Event(seconds=round(float(seconds), 1), what=what))
        before = str(name)
    return events


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What is different, in a few words."""
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    if not names:
        return "no field of its manifest differs"
    said = [_change(name, old.get(name), new.get(name)) for name in names[:MOST_CHANGES]]
    return ", ".join([*said, f"and {len(names) - MOST_CHANGES} more"] if len(names) > MOST_CHANGES else said)


def _change(name: str, old: Any, new: Any) -> str:
    simple = all(value is None or isinstance(value, (str, int, float)) for value in (old, new))
    return f"{name} {old} → {new}" if simple and len(f"{old}{new}") <= 80 else f"{name} changed"
