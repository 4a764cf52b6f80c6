"""The summary stage: all datasets in one table, one page, and one manifest of what made them.

summary.json and what is drawn from it hold rates and hours, which depend on the run. manifest.json holds only what
follows from the journal, the config and the code: no times, no absolute paths. So it leaves out timing.parquet and
servers.json, which tell how answers travelled; they are read for the rates and the servers.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
from msgspec import Struct

from eyas.capacity import Lengths, running, sentence
from eyas.columns import read_columns
from eyas.config import DATASET_STAGES, SummarySettings
from eyas.errors import EyasError
from eyas.exporters.reports import EVERY, ExportReport, read_report, report_path
from eyas.hours import Throughput, throughput
from eyas.hub import files_in, tokenizer_folder
from eyas.mix import MixReport
from eyas.plugins import Pool
from eyas.recordfile import atomic, read_seal
from eyas.records import CUT
from eyas.report.audits import audits
from eyas.report.examples import examples
from eyas.report.figures import Adopted, Part, StageUse, Summary
from eyas.report.markdown import markdown
from eyas.report.page import render
from eyas.report.planned import compare
from eyas.report.words import commonest, listed, number, percent
from eyas.stats import KINDS, Bin, DatasetStats, Tally, read_stats
from eyas.tables import open_parquet
from eyas.timeline import timeline

# The files that the manifest lists, by the stage that makes them.
DATASET_FILES = {
    "prompts": ("prompts.jsonl.zst", "prompts.json"),
    "generate": ("responses.jsonl.zst", "outcomes.jsonl.zst"),
    "validate": ("verdicts.parquet",),
    "stats": ("stats.json",),
    "train": ("train.parquet",),
}
MIX_FILES = ("train.parquet", "eval.parquet", "mix.json")
TIMING_COLUMNS = ["attempt", "server", "started", "finished", "prompt_tokens", "output_tokens", "used"]
NO_REPLIES = pd.DataFrame({name: [] for name in TIMING_COLUMNS})
MANIFEST_FORMAT = 3
MOST_REASONS = 5  # in a warning


class OutputFile(Struct, frozen=True, kw_only=True):
    """One result file. stage: which made it, as in the manifest's `jobs`. rows: null for files that are no tables of Eyas."""

    sha256: str
    rows: int | None
    stage: str


def summarise(
    settings: SummarySettings,
    results: Path,
    exports: Sequence[Path],
    benchmarks: Path,
    manifests: dict[str, Any],
    code: dict[str, dict[str, str]],
    out: Path,
) -> Summary:
    """Writes summary.json, summary.md, manifest.json and report.html to the folder `out`.

    exports: the exported files of the training set, below `results`. benchmarks: Snakemake's benchmark files; what is
    missing is left out. manifests: server manifests by id. code: code digest of each job, by stage and subject.
    """
    summary, stats = gather(settings, results, exports, benchmarks, manifests, {})
    manifest = describe(settings, results, exports, _used(summary, manifests), code, stats)
    _write(out / "summary.json", _json(summary))
    _write(out / "summary.md", markdown(summary).encode())
    _write(out / "manifest.json", _json(manifest))
    _write(out / "report.html", page(results, benchmarks, summary, stats, manifest))
    return summary


def summarise_part(
    settings: SummarySettings,
    results: Path,
    benchmarks: Path,
    manifests: dict[str, Any],
    code: dict[str, dict[str, str]],
    unfinished: dict[str, str],
    out: Path,
) -> Summary:
    """Writes a report of the datasets that are finished to `out`, a file; the training set is not in it.

    unfinished: the datasets to leave out, and how far they are.
    """
    summary, stats = gather(settings, results, None, benchmarks, manifests, unfinished)
    manifest = describe(settings, results, None, _used(summary, manifests), code, stats)
    _write(out, page(results, benchmarks, summary, stats, manifest))
    return summary


def gather(
    settings: SummarySettings,
    results: Path,
    exports: Sequence[Path] | None,
    benchmarks: Path,
    manifests: dict[str, Any],
    unfinished: dict[str, str],
) -> tuple[Summary, dict[str, DatasetStats]]:
    """The numbers of all datasets but the unfinished. exports: None where the training set is not to be read."""
    names = [name for name in settings.datasets if name not in unfinished]
    stats = {name: read_stats(results / name / "stats.json") for name in names}
    replies = {name: read_timing(results / name / "timing.parquet") for name in names}
    # When an adopted answer was asked for is not known, so it is in no rate.
    files = {server: told["adopted"] for server, told in manifests.items() if "adopted" in (told or {})}
    timing = {name: rows[~rows["server"].isin(list(files))] for name, rows in replies.items()}
    jobs = [settings.job("generate", name) for name in names]
    budgets = {name: job["budget_tokens"] for name, job in zip(names, jobs, strict=True)}
    limits = {name: job["sampling"]["max_new_tokens"] for name, job in zip(names, jobs, strict=True)}
    parts = {name: part([stats[name]], [timing[name]], [budgets[name]], limits[name]) for name in names}
    longest = max(limits.values(), default=0)
    total = part(list(stats.values()), list(timing.values()), list(budgets.values()), longest)
    everything = pd.concat(timing.values(), ignore_index=True) if timing else NO_REPLIES
    reports = {path.relative_to(results).as_posix(): read_report(path) for path in exports or ()}
    summary = Summary(
        warnings=[*(warnings(parts, total) if names else []), *losses(reports)],
        unfinished=unfinished,
        datasets=parts,
        total=total,
        servers={str(server): _rates(rows) for server, rows in everything.groupby("server", observed=True)},
        capacity=capacity(everything, manifests, longest),
        adopted=adopted(list(replies.values()), files),
        timeline=timeline(everything, manifests),
        stages=stages(benchmarks, names, exports or ()),
        fit={name: one.fit for name, one in stats.items()},
        mix=read_mix(results / "train" / "mix.json") if exports is not None else None,
        exports=reports,
    )
    return summary, stats


def page(
    results: Path,
    benchmarks: Path,
    summary: Summary,
    stats: dict[str, DatasetStats],
    manifest: dict[str, Any],
) -> bytes:
    """report.html."""
    reasons = [reason for reason, _ in commonest(summary.total.rejected_for)]
    told = examples(results, list(stats), reasons)
    # No declared inputs: plan and audit are no part of a run's results, and old ones may lie there.
    planned = compare(results / "plan" / "plan.json", summary)
    audited = audits(benchmarks.parent / "generate", list(stats))
    return render(summary, stats, manifest, told, planned, audited).encode()


def _used(summary: Summary, manifests: dict[str, Any]) -> dict[str, Any]:
    seen = sorted([*summary.servers, *(one.server for one in summary.adopted)])
    return {server: manifests.get(server) for server in seen}


def capacity(replies: pd.DataFrame, manifests: dict[str, Any], max_new_tokens: int) -> dict[str, str]:
    """By server: how many of the requests that were in flight it ran, at the lengths that were measured."""
    told = {}
    for server, rows in replies.groupby("server", observed=True):
        manifest = manifests.get(str(server)) or {}
        if "capacity" not in manifest:
            continue
        pool = msgspec.convert(manifest["capacity"], Pool)
        lengths = Lengths(
            prompt=float(rows["prompt_tokens"].mean()),
            output=float(rows["output_tokens"].mean()),
            output_sd=float(rows["output_tokens"].std(ddof=0)),
            max_new_tokens=max_new_tokens,
        )
        told[str(server)] = sentence(pool, lengths, running(pool, lengths, _rates(rows).peak_in_flight))
    return told


def adopted(replies: Sequence[pd.DataFrame], files: Mapping[str, Mapping[str, str]]) -> list[Adopted]:
    """What was taken from each of `files`, which are by server-manifest id."""
    found: dict[str, Tally] = {}
    for rows in replies:
        of_file = rows[rows["server"].isin(list(files))]
        for server, tokens in of_file.groupby("server", observed=True)["output_tokens"]:
            tally = Tally(rows=len(tokens), tokens=int(tokens.sum()))
            found[str(server)] = add([tally, found.get(str(server), Tally(rows=0, tokens=0))])
    return [
        Adopted(server=server, **files[server], rows=tally.rows, tokens=tally.tokens)
        for server, tally in sorted(found.items())
    ]


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2) + b"\n"


def _write(path: Path, content: bytes) -> None:
    with atomic(path) as temporary:
        temporary.write_bytes(content)


# --- the numbers -------------------------------------------------------------------------------------------------


def read_timing(path: Path) -> pd.DataFrame:
    """One row per delivered reply: server, started, finished, prompt_tokens, output_tokens, used."""
    table: pd.DataFrame = pa.Table.from_batches(read_columns(path, TIMING_COLUMNS)).to_pandas()
    return table


def read_mix(path: Path) -> MixReport:
    """mix.json, typed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=MixReport)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EyasError(f"{path}: {error}; delete it and run again to rebuild it") from None


def _rates(timing: pd.DataFrame) -> Throughput:
    return throughput(*(timing[name].to_numpy() for name in ("started", "finished", "output_tokens")))


def part(
    stats: Sequence[DatasetStats],
    timing: Sequence[pd.DataFrame],
    budgets: Sequence[int | None],
    max_new_tokens: int,
) -> Part:
    """The datasets in `stats` added up; where they overlapped in time, busy time counts once.

    A budget is shown only if every one of them has one.
    """
    replies = pd.concat(timing, ignore_index=True) if timing else NO_REPLIES
    rates = _rates(replies)
    outcomes = count(one.outcomes for one in stats)
    truncated = add(one.finish.get("length", Tally(rows=0, tokens=0)) for one in stats)
    accepted = add(one.accepted for one in stats)
    known = [budget for budget in budgets if budget is not None]
    budget = sum(known) if known and len(known) == len(budgets) else None
    tokens = {kind: sum(one.tokens[kind].all.total for one in stats) for kind in KINDS}
    return Part(
        source_rows=sum(one.prompts.rows_read for one in stats),
        prompts=sum(one.prompts.used for one in stats),
        turns=sum(one.prompts.turns for one in stats),
        not_taken=sum(one.prompts.not_taken for one in stats),
        skipped=sum(sum(one.prompts.skipped.values()) for one in stats),
        skipped_for=count(one.prompts.skipped for one in stats),
        planned=sum(one.planned for one in stats),
        responses=outcomes["answered"],
        accepted=accepted.rows,
        rejected=sum(one.rejected.rows for one in stats),
        rejected_for=by_reason([one.rejected_for for one in stats]),
        marked_for=by_reason([one.marked_for for one in stats]),
        by_length=add_bins([one.by_length for one in stats]),
        refused=outcomes["refused"],
        refused_for=count(one.outcome_reasons.get("refused", {}) for one in stats),
        failed=outcomes["failed"],
        failed_for=count(one.outcome_reasons.get("failed", {}) for one in stats),
        not_needed=outcomes["not_needed"],
        not_reached=outcomes["not_reached"],
        not_reached_for=count(one.outcome_reasons.get("not_reached", {}) for one in stats),
        prompt_tokens=tokens["prompt"],
        reasoning_tokens=tokens["reasoning"],
        answer_tokens=tokens["answer"],
        output_tokens=tokens["output"],
        accepted_tokens=accepted.tokens,
        unused_tokens=int(replies.loc[~replies["used"].astype(bool), "output_tokens"].sum()),
        truncated=truncated,
        truncated_share=truncated.rows / outcomes["answered"] if outcomes["answered"] else None,
        constrained=sum(one.constrained.rows for one in stats),
        max_new_tokens=max_new_tokens,
        budget_tokens=budget,
        budget_use=accepted.tokens / budget if budget else None,
        hours=rates.run.seconds / 3600,
        tokens_per_second=rates.run.tokens_per_second,
        completions_per_minute=rates.run.completions_per_minute,
        throughput=rates,
    )


def add(tallies: Iterable[Tally]) -> Tally:
    """The sum of tallies."""
    terms = list(tallies)
    return Tally(rows=sum(one.rows for one in terms), tokens=sum(one.tokens for one in terms))


def by_reason(tallies: Sequence[Mapping[str, Tally]]) -> dict[str, Tally]:
    """The sum of tallies by reason."""
    reasons = sorted({reason for one in tallies for reason in one})
    return {reason: add(one[reason] for one in tallies if reason in one) for reason in reasons}


def add_bins(parts: Sequence[Sequence[Bin]]) -> list[Bin]:
    """The sum of bins of the same edges, from the first to the last that is not empty."""
    found: dict[int, Bin] = {}
    for one in (one for part in parts for one in part):
        accepted, rejected = one.accepted, one.rejected
        if same := found.get(one.low):
            accepted, rejected = accepted + same.accepted, rejected + same.rejected
        found[one.low] = Bin(low=one.low, high=one.high, accepted=accepted, rejected=rejected)
    return [found[low] for low in sorted(found)]


def count(counts: Iterable[dict[str, int]]) -> Counter[str]:
    """The sum of counts by name."""
    total = Counter[str]()
    for one in counts:
        total.update(one)
    return total


def warnings(parts: dict[str, Part], total: Part) -> list[str]:
    """What nobody may overlook: what gives nothing to train on, and why; what it costs to reject cut answers."""
    if not total.accepted:
        return [nothing(total)]
    empty = [f"{name}: {nothing(one)}" for name, one in parts.items() if not one.accepted]
    costs = [f"{name}: {cost}" for name, one in parts.items() if (cost := cost_of_cutting(one))]
    return empty + costs


def cost_of_cutting(part: Part) -> str | None:
    """What a policy that rejects answers cut at the limit costs; None if it costs nothing."""
    cut = part.rejected_for.get(CUT)
    if cut is None:
        return None
    return (
        f"rejecting answers that are cut at the limit costs {number(cut.rows)} of {number(part.responses)} answers and "
        f"{number(cut.tokens)} of {number(part.output_tokens)} output tokens ({percent(cut.tokens / part.output_tokens)}), "
        "and they are the longest. Each of their tokens is the target's own: `checks.length.policy: mark` keeps them"
    )


def losses(exports: Mapping[str, ExportReport]) -> list[str]:
    """Exports in which a trainer does not see reasoning that the rows have, or learns answers without theirs."""
    learnt = [
        f"{name}: the trainer learns every answer of a conversation, and in {number(report.later_turns)} rows earlier ones "
        "without their reasoning. Train from the export `tokens`, where each answer is learnt once, or from `turns: first`"
        for name, report in exports.items()
        if report.later_turns and report.learns == EVERY
    ]
    return learnt + [
        f"{name}: the trainer sees the reasoning of {percent(report.reasoning_share)} of the answers that reason. Train from the "
        "export `tokens`, which keeps all of it"
        for name, report in exports.items()
        if report.reasoning_share is not None and report.reasoning_share < 1
    ]


def nothing(part: Part) -> str:
    """A sentence or two about a part that has no accepted answer."""
    causes: list[tuple[str, int, Mapping[str, int | Tally]]] = [
        ("refused", part.refused, part.refused_for),
        ("failed", part.failed, part.failed_for),
        ("not reached", part.not_reached, part.not_reached_for),
        ("rejected by a check", part.rejected, part.rejected_for),
    ]
    fates = [
        f"{number(units)} {fate} ({listed(reasons, MOST_REASONS)})"
        for fate, units, reasons in causes
        if units
    ]
    what = "no answer was accepted" if part.responses else "no prompt was answered"
    return (
        f"{what}, so there is nothing to train on. Of {number(part.planned)} planned answers: {', '.join(fates)}. "
        "Change what the reasons name and run again"
    )


def stages(benchmarks: Path, datasets: Sequence[str], exports: Sequence[Path]) -> dict[str, StageUse]:
    """Time and memory per stage that has a benchmark, in the order of the pipeline.

    The summary is not among them: its own benchmark is written after it has ended.
    """
    files = {stage: [benchmarks / stage / f"{name}.tsv" for name in datasets] for stage in DATASET_STAGES}
    files["mix"] = [benchmarks / "mix.tsv"]
    # …/train/exports/tokens/eval.jsonl.zst has the benchmark train.eval.tokens.jsonl.zst.tsv; a folder has no suffix.
    names = [(path.parent.name, *path.name.partition(".")) for path in exports]
    files["export"] = [
        benchmarks / "export" / f"train.{side}.{exporter}{dot}{suffix}.tsv"
        for exporter, side, dot, suffix in names
    ]
    rows = {stage: [row for path in paths for row in _rows(path)] for stage, paths in files.items()}
    return {stage: _use(found) for stage, found in rows.items() if found}


def _rows(benchmark: Path) -> list[dict[str, str]]:
    if not benchmark.exists():
        return []
    with benchmark.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


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
    exports: Sequence[Path] | None,
    servers: dict[str, Any],
    code: dict[str, dict[str, str]],
    stats: dict[str, DatasetStats],
) -> dict[str, Any]:
    """All that decided the results, and the results by digest.

    exports: None if there is no training set yet. stats: of the datasets that are finished.
    jobs: settings and code digest of each, by stage and then by dataset, exporter or, for the mix, `train`.
    """
    model = settings.job("generate", settings.datasets[0])["model"]
    return {
        "format": MANIFEST_FORMAT,
        "eyas": importlib.metadata.version("eyas"),
        "python": platform.python_version(),
        "packages": packages(),
        "model": named(model),
        "tokenizer": tokenizer(model),
        "plugins": settings.plugins,
        "servers": {server: portable(manifest) for server, manifest in servers.items()},
        "sources": {name: sources(settings, name, stats[name]) for name in stats},
        "jobs": {
            stage: {
                subject: {"code": code[stage][subject], "settings": named(settings.job(stage, subject))}
                for subject in subjects
            }
            for stage, subjects in settings.jobs.items()
        },
        "outputs": outputs(results, list(stats), exports),
    }


def tokenizer(model: Mapping[str, Any]) -> dict[str, str] | None:
    """SHA-256 of each file of the tokenizer and its chat template; None if they are in the weight file."""
    if model["tokenizer"] is None:
        return None
    folder = tokenizer_folder(model["tokenizer"])
    return {name: _sha256(folder / name) for name in files_in(folder, code=model["trust_remote_code"])}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def packages() -> dict[str, str]:
    """Installed versions of what Eyas depends on directly, extras not counted."""
    required = importlib.metadata.requires("eyas") or []
    names = sorted(re.split(r"[^A-Za-z0-9._-]", line)[0] for line in required if "extra ==" not in line)
    return {name: importlib.metadata.version(name) for name in names}


def sources(settings: SummarySettings, dataset: str, stats: DatasetStats) -> dict[str, Any]:
    """The files that a dataset came from, and the revision that its prompts carry."""
    job = settings.job("prompts", dataset)
    return {
        "source": job["source"]["name"],
        "revision": job["revision"],
        "files": [named(msgspec.to_builtins(file)) for file in stats.prompts.files],
        "evaluation": named(msgspec.to_builtins(stats.prompts.evaluation)),
    }


def outputs(results: Path, datasets: Sequence[str], exports: Sequence[Path] | None) -> dict[str, OutputFile]:
    """Every file of the datasets and of the training set, if there is one, by its path under `results`."""
    made_by = {
        results / name / file: stage
        for name in datasets
        for stage, files in DATASET_FILES.items()
        for file in files
    }
    if exports is not None:
        made_by |= {results / "train" / file: "mix" for file in MIX_FILES}
        made_by |= {file: "export" for path in exports for file in (*_files(path), report_path(path))}
    return {path.relative_to(results).as_posix(): output(path, made_by[path]) for path in sorted(made_by)}


def _files(export: Path) -> list[Path]:
    """The files of an export, which may be a folder of them."""
    return list(export.iterdir()) if export.is_dir() else [export]


def output(path: Path, stage: str) -> OutputFile:
    """Digest and rows of one file; raises EyasError for a table that is damaged."""
    rows = None
    if path.name.endswith(".jsonl.zst"):
        rows = read_seal(path).rows
    elif path.suffix == ".parquet" and stage != "export":  # an exporter's Parquet is its own
        with open_parquet(path) as table:
            rows = table.metadata.num_rows
    return OutputFile(sha256=_sha256(path), rows=rows, stage=stage)


_FOLDERS = re.compile(r"(?:(?<=^)|(?<=[\s=]))/(?:[^/\s]+/)+")
_ABSOLUTE = re.compile(r"\A/.*/([^/]+)/?\Z")


def portable(value: Any) -> Any:
    """`value` with absolute paths cut down to their last part, so that where a server keeps its files is not told."""
    return _texts(value, lambda text: _FOLDERS.sub("", text))


def named(value: Any) -> Any:
    """Like portable, but only texts that are a path from end to end: a grammar may hold what looks like one."""
    return _texts(value, lambda text: _ABSOLUTE.sub(r"\1", text))


def _texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_texts(item, change) for item in value]
    return value
