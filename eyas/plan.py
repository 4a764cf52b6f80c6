"""The plan stage: how long the whole run will take on this server, known before the hours are spent.

Reads what the pilots saw (eyas.pilot), makes of it what eyas.projection wants, and tells the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from eyas.capacity import running, together
from eyas.config import PlanSettings
from eyas.errors import EyasError
from eyas.hours import FULL_SHARE, throughput
from eyas.pilot_report import Observation, PilotReport, read_pilot
from eyas.plugins import Pool
from eyas.projection import Answers, Drift, Machine, Observed, Store, project, windows_of
from eyas.recordfile import atomic
from eyas.report.plan import Done, Plan, markdown, page
from eyas.whatif import Now, binding, lengths_of, levers, step_of

# Bytes on disk per token: journal 15, which stores plainly, and responses 7; training row, mix and export 4 each (docs/benchmarks.md).
RESPONSE_BYTES, TRAIN_BYTES = 22.0, 12.0
SIXTEEN_BITS = ("bfloat16", "bf16", "float16", "fp16", "f16", "auto")  # of a KV cache that FP8 would halve

Floats = npt.NDArray[np.float64]


def plan(settings: PlanSettings, pilots: Sequence[Path], out: Path) -> Plan:
    """Writes plan.json, plan.md and plan.html to `out`. Raises EyasError where the pilots do not tell enough."""
    made = make(settings, [read_pilot(path) for path in pilots])
    _write(out / "plan.json", msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
    _write(out / "plan.md", markdown(made).encode())
    _write(out / "plan.html", page(made, settings.model).encode())
    return made


def _write(path: Path, content: bytes) -> None:
    with atomic(path) as temporary:
        temporary.write_bytes(content)


def make(settings: PlanSettings, reports: Sequence[PilotReport]) -> Plan:
    """The plan that `reports` allow."""
    servers = reports[-1].servers
    if others := [one.dataset for one in reports if one.servers.keys() != servers.keys()]:
        raise EyasError(
            f"the pilots of {', '.join(others)} were made on another server than that of {reports[-1].dataset}; "
            f"run `snakemake plan --cores 1 --forcerun pilot`"
        )
    timed = [one for report in reports for one in report.observations if one.timed]
    if not timed:
        raise EyasError(
            "no pilot has asked anything, so the speed is unknown; run `snakemake plan --cores 1 --forcerun pilot`"
        )
    _check(reports)
    now = _now(settings, reports, timed)
    full = _filled(now, len(timed))
    windows = now.windows
    if not windows.queued.any():
        windows = replace(windows, queued=windows.running >= windows.running.max())
    # What waits in the server's queue does not run.
    at_once = running(now.pool, lengths_of(now.observed), now.in_flight).about if now.pool else np.inf
    now = replace(now, windows=replace(windows, running=np.minimum(windows.running, at_once * now.servers)))
    now = replace(now, machine=msgspec.structs.replace(now.machine, exponent=step_of(now).exponent))
    return Plan(
        servers=sorted(servers),
        done=_done(reports),
        pilot_minutes=_busy(timed) / 60,
        queue_full=full,
        binding=binding(now),
        projection=project(now.observed, now.windows, now.machine, now.store, now.drift),
        levers=levers(now),
    )


def _check(reports: Sequence[PilotReport]) -> None:
    """Raises EyasError for a dataset of which nothing can be told."""
    for report in reports:
        kinds = {one.kind for one in report.observations}
        if "answer" in kinds:
            continue
        cause = "no finished answer; raise plan.minutes and run `snakemake plan --cores 1 --forcerun pilot`, which goes on from here"
        if not kinds and report.without_answer:
            cause = (
                f"no answer: all {report.without_answer} that it planned are refused or not reached; "
                f"see logs/pilot/{report.dataset}.log, ask more prompts (plan.prompts), or leave the dataset out"
            )
        raise EyasError(f"{report.dataset}: the pilot has {cause}")


def _busy(timed: Sequence[Observation]) -> float:
    """Seconds with one of them in flight: a run may have gone on after a night."""
    begun, ended = [one.started for one in timed], [one.finished for one in timed]
    return throughput(begun, ended, [0] * len(timed)).run.seconds


def _done(reports: Sequence[PilotReport]) -> Done:
    """What is there of the whole run. Where datasets were asked side by side, their time counts once."""
    spans = [span for one in reports for span in one.journalled.busy]
    begun, ended = [begin for begin, _ in spans], [end for _, end in spans]
    return Done(
        at=min(one.journalled.at for one in reports),
        answers=sum(one.journalled.answers for one in reports),
        output_tokens=sum(one.journalled.output_tokens for one in reports),
        hours=throughput(begun, ended, [0] * len(begun)).run.seconds / 3600,
    )


def _filled(now: Now, asked: int) -> bool:
    """Whether the pilot kept the servers as busy as the run will. asked: its requests."""
    windows = now.windows
    wanted = min(now.in_flight, sum(len(one.sizes) for one in now.observed))
    if now.pool is None:
        return bool(windows.queued.any()) and asked >= wanted
    each = max(now.in_flight // now.servers, 1)
    wanted = min(wanted, running(now.pool, lengths_of(now.observed), each).low * now.servers)
    return bool(windows.queued.any()) and float(windows.running.max()) >= FULL_SHARE * wanted


def _now(settings: PlanSettings, reports: Sequence[PilotReport], timed: Sequence[Observation]) -> Now:
    manifests = list(reports[-1].servers.values())
    processes = sum(manifest["processes"] for manifest in manifests)

    def column(name: str) -> Floats:
        return np.array([getattr(one, name) for one in timed], dtype=np.float64)

    return Now(
        observed=[_observed(settings, report) for report in reports],
        windows=windows_of(column("started"), column("finished"), column("output_tokens")),
        machine=Machine(
            gpus=settings.plan.gpus or sum(map(_gpus, manifests)),
            ceilings={lane or "": ceiling for lane, ceiling in ceilings(settings).items()},
        ),
        store=Store(
            response_bytes=RESPONSE_BYTES,
            train_bytes=TRAIN_BYTES,
            hidden_size=settings.plan.hidden_size,
            hidden_layers=settings.plan.hidden_layers,
        ),
        drift=Drift(sd=settings.plan.drift_sd, hours=settings.plan.drift_hours),
        pool=_pool(manifests, processes),
        servers=processes,
        in_flight=sum(ceilings(settings).values()),
        halves=all(manifest.get("kv_dtype") in SIXTEEN_BITS for manifest in manifests),
    )


def ceilings(settings: PlanSettings) -> dict[str | None, int]:
    """Ceiling of each lane that a dataset uses; None is the one without a name."""
    lanes = {one.lane for one in settings.datasets.values()}
    server = settings.server
    return {lane: server.concurrency if lane is None else server.lanes[lane].concurrency for lane in lanes}


def _pool(manifests: Sequence[Mapping[str, Any]], processes: int) -> Pool | None:
    """KV cache of one of so many processes; None if one does not tell."""
    if not all("capacity" in manifest for manifest in manifests):
        return None
    whole = together([msgspec.convert(manifest["capacity"], Pool) for manifest in manifests])
    return msgspec.structs.replace(
        whole,
        tokens=whole.tokens // processes,
        max_running=whole.max_running and whole.max_running // processes,
    )


def _gpus(manifest: Mapping[str, Any]) -> int:
    """GPUs of all processes of a manifest: SGLang has one for each rank. 0 on a CPU, and where nothing tells of ranks."""
    if "tp_size" not in manifest or manifest.get("device") == "cpu":
        return 0
    # With data-parallel attention the ranks of data parallelism are those of tensor parallelism.
    sizes = (
        ("tp_size", "pp_size") if manifest.get("enable_dp_attention") else ("tp_size", "pp_size", "dp_size")
    )
    ranks = (int(manifest.get(size) or 1) for size in sizes)
    return math.prod(ranks) * int(manifest["processes"])


# --- what the pilots saw, as the projection wants it ----------------------------------------------------------------


def _observed(settings: PlanSettings, report: PilotReport) -> Observed:
    seen = [one for one in report.observations if one.kind != "probe"]

    def column(name: str) -> Floats:
        return np.array([getattr(one, name) or 0 for one in seen], dtype=np.float64)

    planned = settings.datasets[report.dataset]
    sizes = np.sort(np.array(report.prompt_bytes, dtype=np.float64))
    # As many of the run's answers will not be had as of the pilot's; what is left out is spread over all sizes.
    had = max(round(len(sizes) * len(seen) / (len(seen) + report.without_answer)), len(seen))
    return Observed(
        dataset=report.dataset,
        sizes=sizes[np.linspace(0, len(sizes) - 1, had).round().astype(int)],
        answers=Answers(
            sizes=column("prompt_bytes"),
            prompt_tokens=column("prompt_tokens"),
            output_tokens=column("output_tokens"),
            reasoning_tokens=column("reasoning_tokens"),
            ended=np.array([one.kind == "answer" for one in seen], dtype=np.bool_),
            cut=column("truncated").astype(np.bool_),
            accepted=column("accepted").astype(np.bool_),
        ),
        max_new_tokens=planned.max_new_tokens,
        budget_tokens=planned.budget_tokens,
        done=report.journalled.answers,
        lane=planned.lane or "",
    )
