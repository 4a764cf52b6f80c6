"""The summary stage: all datasets in one table, one page, and one manifest of what made them.

summary.json and what is drawn from it hold rates and hours, which depend on the run. manifest.json holds only what
follows from the journal, the config and the code: no times, no absolute paths.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from eyas.columns import read_columns
from eyas.config import SummarySettings
from eyas.errors import EyasError
from eyas.hours import Throughput, throughput
from eyas.mix import MixReport
from eyas.recordfile import atomic, read_records, read_seal
from eyas.records import Prompt
from eyas.report.figures import Part, StageUse, Summary
from eyas.report.markdown import markdown
from eyas.report.page import render
from eyas.stats import DatasetStats, Tally, read_stats

ORDER = ("prompts", "generate", "validate", "stats", "train", "export", "mix", "summary")
TIMING_COLUMNS = ["server", "started", "finished", "output_tokens", "used"]
MANIFEST_FORMAT = 1


class OutputFile(Struct, frozen=True, kw_only=True):
    """One result file. rows: null for files that are not tables."""

    sha256: str
    rows: int | None


def summarise(
    settings: SummarySettings,
    results: Path,
    benchmarks: Path,
    manifests: dict[str, Any],
    code: dict[str, str],
    out: Path,
) -> Summary:
    """Writes summary.json, summary.md, manifest.json and report.html to the folder `out`.

    benchmarks: Snakemake's benchmark files, `<rule>/<dataset>.tsv` or `<rule>.tsv`; what is missing is left out.
    manifests: server manifests by id. code: digest of the code of each stage.
    """
    stats = {name: read_stats(results / name / "stats.json") for name in settings.datasets}
    timing = {name: read_timing(results / name / "timing.parquet") for name in settings.datasets}
    parts = {
        name: part([stats[name]], [timing[name]], [settings.budgets[name]]) for name in settings.datasets
    }
    everything = pd.concat(timing.values(), ignore_index=True)
    summary = Summary(
        datasets=parts,
        total=part(list(stats.values()), list(timing.values()), list(settings.budgets.values())),
        servers={str(server): _rates(rows) for server, rows in everything.groupby("server", observed=True)},
        stages=stages(benchmarks, settings.datasets),
        mix=read_mix(results / "train" / "mix.json"),
    )
    servers = {server: manifests.get(server) for server in summary.servers}
    manifest = describe(settings, results, servers, code, stats)
    _write(out / "summary.json", _json(summary))
    _write(out / "summary.md", markdown(summary).encode())
    _write(out / "manifest.json", _json(manifest))
    _write(out / "report.html", render(summary, stats, manifest).encode())
    return summary


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2) + b"\n"


def _write(path: Path, content: bytes) -> None:
    with atomic(path) as temporary:
        temporary.write_bytes(content)


# --- the numbers -------------------------------------------------------------------------------------------------


def read_timing(path: Path) -> pd.DataFrame:
    """One row per delivered reply: server, started, finished, output_tokens, used."""
    table: pd.DataFrame = pa.Table.from_batches(read_columns(path, TIMING_COLUMNS)).to_pandas()
    return table


def read_mix(path: Path) -> MixReport | None:
    """mix.json, or None where the mix has not been made."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=MixReport)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EyasError(f"{path}: {error}; delete it and run again to rebuild it") from None


def _rates(timing: pd.DataFrame) -> Throughput:
    return throughput(*(timing[name].to_numpy() for name in ("started", "finished", "output_tokens")))


def part(
    stats: Sequence[DatasetStats], timing: Sequence[pd.DataFrame], budgets: Sequence[int | None]
) -> Part:
    """The datasets in `stats` added up; where they overlapped in time, busy time counts once.

    A budget is shown only if every one of them has one.
    """
    replies = pd.concat(timing, ignore_index=True)
    rates = _rates(replies)
    outcomes = Counter[str]()
    for one in stats:
        outcomes.update(one.outcomes)
    truncated = add(one.finish.get("length", Tally(rows=0, tokens=0)) for one in stats)
    accepted = add(one.accepted for one in stats)
    known = [budget for budget in budgets if budget is not None]
    budget = sum(known) if len(known) == len(budgets) else None
    reasons = sorted({reason for one in stats for reason in one.rejected_for})
    tokens = {kind: sum(one.tokens[kind].all.total for one in stats) for kind in stats[0].tokens}
    return Part(
        prompts=sum(one.prompts.used for one in stats),
        planned=sum(one.planned for one in stats),
        responses=outcomes["answered"],
        accepted=accepted.rows,
        rejected=sum(one.rejected.rows for one in stats),
        rejected_for={
            reason: add(one.rejected_for[reason] for one in stats if reason in one.rejected_for)
            for reason in reasons
        },
        failed=outcomes["failed"],
        refused=outcomes["refused"],
        not_needed=outcomes["not_needed"],
        not_reached=outcomes["not_reached"],
        prompt_tokens=tokens["prompt"],
        reasoning_tokens=tokens["reasoning"],
        answer_tokens=tokens["answer"],
        output_tokens=tokens["output"],
        accepted_tokens=accepted.tokens,
        unused_tokens=int(replies.loc[~replies["used"].astype(bool), "output_tokens"].sum()),
        truncated=truncated,
        truncated_share=truncated.rows / outcomes["answered"] if outcomes["answered"] else None,
        constrained=sum(one.constrained.rows for one in stats),
        budget_tokens=budget,
        budget_use=accepted.tokens / budget if budget else None,
        hours=rates.run.seconds / 3600,
        tokens_per_second=rates.run.tokens_per_second,
        completions_per_minute=rates.run.completions_per_minute,
        throughput=rates,
    )


def add(tallies: Iterable[Tally]) -> Tally:
    """The sum of tallies."""
    listed = list(tallies)
    return Tally(rows=sum(one.rows for one in listed), tokens=sum(one.tokens for one in listed))


def stages(benchmarks: Path, datasets: Sequence[str]) -> dict[str, StageUse]:
    """Time and memory per rule that has a benchmark, in the order of the pipeline."""
    found: dict[str, list[dict[str, str]]] = {}
    for path in sorted([*benchmarks.glob("*.tsv"), *benchmarks.glob("*/*.tsv")]):
        alone = path.parent == benchmarks
        if alone or path.stem in datasets:
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file, delimiter="\t"))
            found.setdefault(path.stem if alone else path.parent.name, []).extend(rows)
    order = sorted(found, key=lambda rule: (ORDER.index(rule) if rule in ORDER else len(ORDER), rule))
    return {rule: _use(found[rule]) for rule in order}


def _use(rows: Sequence[dict[str, str]]) -> StageUse:
    # Snakemake writes "-" or "NA" where a job ended before it was measured.
    memory = pd.to_numeric([row.get("max_rss", "") for row in rows], errors="coerce")
    seconds = pd.to_numeric([row.get("s", "") for row in rows], errors="coerce")
    return StageUse(
        jobs=len(rows),
        seconds=float(np.nansum(seconds)),
        peak_memory_mb=float(np.nanmax(memory)) if not np.isnan(memory).all() else None,
    )


# --- the manifest ------------------------------------------------------------------------------------------------


def describe(
    settings: SummarySettings,
    results: Path,
    servers: dict[str, Any],
    code: dict[str, str],
    stats: dict[str, DatasetStats],
) -> dict[str, Any]:
    """All that decided the results, and the results by digest."""
    return {
        "format": MANIFEST_FORMAT,
        "eyas": importlib.metadata.version("eyas"),
        "python": platform.python_version(),
        "packages": packages(),
        "code": code,
        "model": portable(msgspec.to_builtins(settings.model)),
        "servers": {server: portable(manifest) for server, manifest in servers.items()},
        "sources": {name: sources(stats[name], results / name / "prompts.jsonl.zst") for name in stats},
        "outputs": outputs(results, settings.datasets),
    }


def packages() -> dict[str, str]:
    """Installed versions of what Eyas depends on directly, extras not counted."""
    required = importlib.metadata.requires("eyas") or []
    names = sorted(re.split(r"[^A-Za-z0-9._-]", line)[0] for line in required if "extra ==" not in line)
    return {name: importlib.metadata.version(name) for name in names}


def sources(stats: DatasetStats, prompts: Path) -> dict[str, Any]:
    """The files that a dataset came from, with the revision that its prompts carry."""
    first = next(read_records(prompts, Prompt), None)
    return {
        "source": first.origin.source if first else None,
        "revision": first.origin.revision if first else None,
        "files": [msgspec.to_builtins(file) for file in stats.prompts.files],
    }


def outputs(results: Path, datasets: Sequence[str]) -> dict[str, OutputFile]:
    """Every file of the datasets and of the training set, by its path under `results`."""
    files = [
        path
        for folder in (*datasets, "train")
        for path in (results / folder).rglob("*")
        if path.is_file() and not path.name.startswith(".")
    ]
    return {path.relative_to(results).as_posix(): output(path) for path in sorted(files)}


def output(path: Path) -> OutputFile:
    """Digest and rows of one file; raises EyasError for a table that is cut short."""
    rows = None
    if path.name.endswith(".jsonl.zst"):
        rows = read_seal(path).rows
    elif path.suffix == ".parquet":
        try:
            rows = pq.read_metadata(path).num_rows
        except pa.ArrowException as error:
            raise EyasError(f"{path}: damaged ({error}); delete it and run again to rebuild it") from None
    with path.open("rb") as file:
        return OutputFile(sha256=hashlib.file_digest(file, "sha256").hexdigest(), rows=rows)


_FOLDERS = re.compile(r"(?:(?<=^)|(?<=[\s=]))/(?:[^/\s]+/)+")


def portable(value: Any) -> Any:
    """`value` with absolute paths cut down to their last part, so that where a server keeps its files is not told."""
    if isinstance(value, str):
        return _FOLDERS.sub("", value)
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    return value
