"""Re-derives every file behind the journal in a folder of its own, and says which of a run's files differ, and how.

The workflow itself does the work, so whatever it makes is covered, by the rules that made it: in a scratch folder, from
copies of the journal and links to what the config names, with a server address at which nobody is. Nothing of the run is
written to, and nothing can be asked.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from eyas.config import Stages
from eyas.errors import EyasError
from eyas.failures import failed_jobs
from eyas.generate import LACKS
from eyas.sources.files import read_rows
from eyas.tables import open_parquet

CLOSED = "http://127.0.0.1:9"  # the discard port, where nobody listens
MANIFEST = Path("summary/manifest.json")
# Follow from the journal too, but are not in the manifest, since equal answers may have travelled otherwise.
TRAVEL = ("timing.parquet", "servers.json")
# What another machine or another day may differ in; told, and no fault.
SURROUNDINGS = ("eyas", "python", "packages")
OUTPUTS = ("results", "logs", "journal", ".snakemake")
SHOWN = 60  # characters of a value


class _Nothing:
    """Stands for a field that is not there."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()


@dataclass
class Verification:
    """files: how many were compared. differences, notes: a line each, which begins with the file's path below results/."""

    files: int = 0
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(raw: dict[str, Any], stages: Stages, results: Path, root: Path, cores: int) -> Verification:
    """Compares the run in the working directory with what its journal gives. raw: its config as written.

    Needs space for the journal and the results once more, in TMPDIR. Raises EyasError if there is nothing to compare.
    """
    if not (results / MANIFEST).is_file():
        raise EyasError(
            f"{results / MANIFEST}: missing; run `snakemake` first, then there is something to verify"
        )
    with tempfile.TemporaryDirectory(prefix="eyas-verify-") as temporary:
        scratch = _prepare(raw, stages, Path(temporary))
        failures = _rebuild(scratch, root, cores)
        return _compare(results, scratch / "results", list(stages.config.datasets), failures)


# --- rebuilding --------------------------------------------------------------------------------------------------


def _prepare(raw: dict[str, Any], stages: Stages, temporary: Path) -> Path:
    """The scratch folder: config, links to what it names, copies of the journals."""
    texts = sorted(_texts(raw), key=len)
    climbs = max((Path(text).parts.count("..") for text in texts), default=0)
    scratch = temporary.joinpath("run", *["below"] * climbs).resolve()
    scratch.mkdir(parents=True)
    for text in [*texts, "data/hub"]:
        _link(text, scratch, temporary.resolve())
    for dataset in stages.config.datasets:
        journal = Path(stages.config.journal, dataset)
        if journal.is_dir():
            shutil.copytree(journal, scratch / "journal" / dataset, ignore=shutil.ignore_patterns("lock"))
    config = copy.deepcopy(raw)
    config["journal"] = "journal"
    # Nobody is there, so an answer that the journal lacks ends the rebuilding at once.
    config["server"] |= {
        "url": CLOSED,
        "start_timeout": 0.1,
        "state": "state",
        "api_key_env": None,
        "ignore_doctor": True,
    }
    (scratch / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    return scratch


def _texts(value: Any) -> Iterator[str]:
    """Every string in a config that may be a relative path."""
    if isinstance(value, str):
        if 0 < len(value) < 1024 and "\n" not in value and not Path(value).is_absolute():
            yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _link(text: str, scratch: Path, limit: Path) -> None:
    """Makes what lies at the relative path `text` lie there in the scratch folder too, within `limit`."""
    here, there = Path(text), Path(os.path.normpath(scratch / text))
    if not here.exists() or here.parts[:1] in [(name,) for name in OUTPUTS] or os.path.lexists(there):
        return
    if limit in there.parents and there not in scratch.parents:
        there.parent.mkdir(parents=True, exist_ok=True)
        there.symlink_to(here.resolve())


def _rebuild(scratch: Path, root: Path, cores: int) -> list[str]:
    """Runs the workflow in the scratch folder; why jobs failed, a line each."""
    command = [
        *(sys.executable, "-m", "snakemake", "--snakefile", str(root / "Snakefile")),
        *("--directory", str(scratch), "--configfile", str(scratch / "config.yaml")),
        *("--cores", str(cores), "--resources", f"llm={cores}", "--keep-going"),
        *("--profile", "none", "--workflow-profile", "none", "--", str("results" / MANIFEST)),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "SNAKEMAKE_PROFILE"}
    done = subprocess.run(
        command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode == 0:
        return []
    failed = failed_jobs(scratch / "logs", {})
    if not failed:
        raise EyasError(
            f"the results cannot be rebuilt: {' '.join(done.stderr.split())[-600:]}; run `snakemake` here to see why"
        )
    return [_why(log, reason, scratch) for log, reason in failed]


def _why(log: Path, reason: str, scratch: Path) -> str:
    """A failure without the scratch folder's paths; a missing answer by the name of its prompt."""
    start = LACKS.partition("%s")[0]
    for line in log.read_text(encoding="utf-8", errors="replace").split("\n"):
        if start in line:
            reason = start + line.partition(start)[2].partition(";")[0]
            break
    name = log.relative_to(scratch / "logs").with_suffix("").as_posix().replace("/", " of ")
    return f"{name} cannot be rebuilt: {reason.replace(f'{scratch}/', '')}"


# --- comparing ---------------------------------------------------------------------------------------------------


def _compare(results: Path, rebuilt: Path, datasets: list[str], failures: list[str]) -> Verification:
    found = Verification(differences=list(failures))
    manifests = [_manifest(folder / MANIFEST) for folder in (results, rebuilt)]
    names = set(itertools.chain.from_iterable(manifest.get("outputs", {}) for manifest in manifests))
    names |= {f"{dataset}/{file}" for dataset in datasets for file in TRAVEL}
    for name in sorted(names):
        if not (rebuilt / name).exists():
            if not failures:
                found.differences.append(f"{name}: no file of this run; delete it, or run `snakemake`")
            continue  # the failure says why
        found.files += 1
        if not (results / name).exists():
            found.differences.append(f"{name}: is missing")
        elif difference := _difference(results / name, rebuilt / name):
            found.differences.append(f"{name}: {difference}")
    if manifests[1]:
        found.files += 1
        for key in sorted(manifests[0].keys() | manifests[1].keys()):
            if told := _first(manifests[0].get(key), manifests[1].get(key), key):
                (found.notes if key in SURROUNDINGS else found.differences).append(f"{MANIFEST}: {told}")
    return found


def _manifest(path: Path) -> dict[str, Any]:
    """A manifest, empty if it was not rebuilt."""
    if not path.is_file():
        return {}
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise EyasError(f"{path}: not valid JSON ({error}); delete it and run `snakemake` again") from None
    return manifest


def _difference(here: Path, there: Path) -> str | None:
    """How two files, or folders of files, differ; None if they are equal."""
    if here.is_dir() or there.is_dir():
        names = {file.relative_to(top) for top in (here, there) for file in top.rglob("*") if file.is_file()}
        for name in sorted(names):
            if not (here / name).is_file() or not (there / name).is_file():
                return f"{name} is {'missing' if (there / name).is_file() else 'not of this run'}"
            if told := _difference(here / name, there / name):
                return f"{name}: {told}"
        return None
    if _sha256(here) == _sha256(there):
        return None
    try:
        return _rows_that_differ(here, there)
    except EyasError as error:
        return f"cannot be read: {error}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rows_that_differ(here: Path, there: Path) -> str:
    counts = [0, 0]
    differing, first, fields = 0, "", set[str]()
    for number, (one, other) in enumerate(itertools.zip_longest(_rows(here), _rows(there)), start=1):
        counts[0] += one is not None
        counts[1] += other is not None
        if one is None or other is None or one == other:
            continue
        differing += 1
        fields |= {
            name for name in one.keys() | other.keys() if one.get(name, NOTHING) != other.get(name, NOTHING)
        }
        name = other.get("id") or other.get("key")
        first = first or f"first in row {number:,}{f' ({name})' if name else ''}: {_first(one, other, '')}"
    parts = []
    if counts[0] != counts[1]:
        parts.append(f"{counts[0]:,} rows here, {counts[1]:,} rebuilt")
    if differing:
        listed = ", ".join(sorted(fields))
        parts.append(f"{differing:,} of {counts[1]:,} rows differ, in {listed}; {first}")
    return (
        "; ".join(parts)
        or "the rows are equal, but not their bytes (written by another program, or the end is damaged)"
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, whatever its seal says; bytes of a file that has none, in lines."""
    if path.suffix == ".json":
        yield _manifest(path)
    elif path.suffix == ".parquet":
        with open_parquet(path) as table:
            for batch in table.iter_batches(256):
                yield from batch.to_pylist()
    elif path.suffix in (".zst", ".gz", ".jsonl"):
        yield from (row for _, row in read_rows(path))
    else:
        with path.open("rb") as file:
            yield from ({"line": line} for line in file)


def _first(here: Any, there: Any, where: str) -> str | None:
    """The first place at which two values differ, with what stands there; None if they are equal."""
    if isinstance(here, dict) and isinstance(there, dict):
        for key in sorted(here.keys() | there.keys()):
            if told := _first(
                here.get(key, NOTHING), there.get(key, NOTHING), f"{where}.{key}" if where else key
            ):
                return told
        return None
    if isinstance(here, list) and isinstance(there, list):
        for at, (one, other) in enumerate(zip(here, there, strict=False)):
            if told := _first(one, other, f"{where}[{at}]"):
                return told
        return (
            f"{where}: {len(here):,} entries here, {len(there):,} rebuilt"
            if len(here) != len(there)
            else None
        )
    return None if here == there else f"{where}: {_short(here)} here, {_short(there)} rebuilt"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
