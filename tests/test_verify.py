"""`eyas verify`: what the journal gives is found equal, and every kind of tampering is named with file and field."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import journal_entries
from pipeline import ROOT, Run, fake_server

from eyas.failures import failed_jobs
from eyas.generate import LACKS
from eyas.journal import Answered, JournalWriter
from eyas.recordfile import read_records, write_records
from eyas.records import Response, TrainRow
from eyas.tables import read_table, write_table
from eyas.train import SCHEMA
from eyas.verify import _compare, _difference, _why

# --- how files differ --------------------------------------------------------------------------------------------


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    write_records(path, rows)
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows, None),
        (
            lambda rows: [rows[0], {"key": "b", "ids": [4, 9]}, rows[2]],
            r"1 of 3 rows differ, in ids; first in row 2 (b): ids[1]: 9 here, 5 rebuilt",
        ),
        (lambda rows: rows[:2], "2 rows here, 3 rebuilt"),
        (
            lambda rows: [rows[0], rows[2], rows[1]],
            "2 of 3 rows differ, in ids, key; first in row 2 (b): ids[0]: 6 here, 4 rebuilt",
        ),
        (
            lambda rows: [{**rows[0], "ids": [1]}, *rows[1:]],
            "1 of 3 rows differ, in ids; first in row 1 (a): ids: 1 entries here, 3 rebuilt",
        ),
        (
            lambda rows: [{**rows[0], "more": None}, {**rows[1], "key": "x" * 99}, rows[2]],
            "2 of 3 rows differ, in key, more; first in row 1 (a): more: None here, nothing rebuilt",
        ),
    ],
)
def test_rows_that_differ_are_counted_and_the_first_is_shown(
    tmp_path: Path, change: Callable[[list[Any]], list[Any]], said: str | None
) -> None:
    rows = [{"key": "a", "ids": [1, 2, 3]}, {"key": "b", "ids": [4, 5]}, {"key": "c", "ids": [6]}]
    there = jsonl(tmp_path / "there.jsonl.zst", rows)
    assert _difference(jsonl(tmp_path / "here.jsonl.zst", change(rows)), there) == said


def test_a_file_of_equal_rows_and_other_bytes_is_told_apart_from_one_that_cannot_be_read(
    tmp_path: Path,
) -> None:
    there = jsonl(tmp_path / "there.jsonl.zst", [{"key": "a"}])
    here = tmp_path / "here.jsonl.zst"
    here.write_bytes(there.read_bytes()[:-30])
    told = _difference(here, there)
    assert told is not None and ("not their bytes" in told or "cannot be read" in told)
    here.write_bytes(there.read_bytes()[:15] + b"#" + there.read_bytes()[16:])
    assert "here.jsonl.zst" in (_difference(here, there) or "")


def test_tables_folders_and_other_files_are_compared_too(tmp_path: Path) -> None:
    for name, values in (("here", [1, 2]), ("there", [1, 3])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "same.txt").write_text("same")
        (folder / "table.csv").write_text("".join(f"{value}\n" for value in values))
        (folder / "numbers.json").write_text(json.dumps({"a": {"b": values}}))
    here, there = tmp_path / "here", tmp_path / "there"
    assert _difference(here / "same.txt", there / "same.txt") is None
    assert _difference(here / "numbers.json", there / "numbers.json") == (
        "1 of 1 rows differ, in a; first in row 1: a.b[1]: 2 here, 3 rebuilt"
    )
    assert "first in row 2: line: b'2\\n' here, b'3\\n' rebuilt" in (
        _difference(here / "table.csv", there / "table.csv") or ""
    )
    assert (_difference(here, there) or "").startswith("numbers.json: 1 of 1 rows differ")
    shutil.rmtree(here)
    shutil.copytree(there, here)
    assert _difference(here, there) is None
    (here / "more").touch()
    assert _difference(here, there) == "more is not of this run"


def test_an_answer_that_the_journal_has_lost_is_named(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "generate" / "alpha.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        f"2026-01-01 00:00:00,000 INFO {LACKS % 'k3'}\n2026-01-01 00:00:01,000 ERROR nobody is there\n"
    )
    ((found, reason),) = failed_jobs(tmp_path / "logs", {})
    assert _why(found, reason, tmp_path) == (
        "generate of alpha cannot be rebuilt: the journal lacks at least the answer to k3"
    )
    log.write_text(f"2026-01-01 00:00:01,000 ERROR {tmp_path}/journal/alpha/000001.jsonl.zst: damaged\n")
    assert _why(log, f"{tmp_path}/journal/alpha/000001.jsonl.zst: damaged", tmp_path) == (
        "generate of alpha cannot be rebuilt: journal/alpha/000001.jsonl.zst: damaged"
    )


# --- whole runs --------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.workflow


def eyas(run: Run, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from eyas.cli import main; sys.exit(main())", *arguments]
    return subprocess.run(command, cwd=cwd or run.cwd, env=run.environment(), capture_output=True, text=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of which most was adopted from another one's file, with a data file outside its folder.

    Before it is handed out: only the rest was asked for, and all files are found to be what the journal gives.
    """
    top = tmp_path_factory.mktemp("top")
    run = Run(top / "run", {"alpha": 4})
    (run.folder / "data" / "alpha.jsonl").rename(top / "alpha.jsonl")
    run.config["datasets"]["alpha"]["files"] = ["../alpha.jsonl"]
    with fake_server(run) as url:
        run.config["server"]["url"] = url
        run.save()
        other = top / "other.jsonl.zst"
        assert eyas(run, "adopt", str(other)).stderr == (
            "eyas: error: results/alpha/prompts.jsonl.zst: missing; run `snakemake "
            "results/alpha/prompts.jsonl.zst --cores 1` first, so that answers find their prompts\n"
        )
        run.snakemake("results/alpha/responses.jsonl.zst")
        responses = list(read_records(run.folder / "results/alpha/responses.jsonl.zst", Response))
        write_records(other, responses[:3])
        shutil.rmtree(run.folder / "journal")
        (run.folder / "results/alpha/responses.jsonl.zst").unlink()
        done = eyas(run, "adopt", str(other), "--dataset", "alpha")
        assert f"{other}: 3 of 3 answers adopted, " in done.stdout, done.stderr
        with run.asked() as asked:
            run.snakemake()
    assert [one["prompt"] for one in asked] == [responses[3].prompt_ids], "only the rest was asked"
    return run


def test_an_untouched_run_is_what_its_journal_gives(finished: Run) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")}
    done = eyas(finished, "verify")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "files are what the journal gives, byte by byte" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")} == before, "it only reads"


def copied(finished: Run, folder: Path) -> Run:
    shutil.copytree(finished.folder, folder / "run")
    shutil.copy(finished.folder.parent / "alpha.jsonl", folder)
    run = object.__new__(Run)
    run.folder = run.cwd = folder / "run"
    run.record = folder / "requests.jsonl"
    return run


def test_a_changed_result_of_every_kind_is_named_with_row_and_field(finished: Run, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    results = run.folder / "results"

    responses = list(read_records(results / "alpha/responses.jsonl.zst", Response))
    changed = Response(
        **{name: getattr(responses[1], name) for name in responses[1].__struct_fields__}
        | {"output_ids": [77, *responses[1].output_ids[1:]]}
    )
    write_records(results / "alpha/responses.jsonl.zst", [responses[0], changed, *responses[2:]])
    rows = list(read_table(results / "alpha/train.parquet", TrainRow))
    write_table(results / "alpha/train.parquet", SCHEMA, rows[:-1])
    exported = list(read_records(results / "train/exports/tokens/train.jsonl.zst", TrainRow))
    mask = [1 - bit for bit in exported[0].loss_mask]
    first = TrainRow(
        **{n: getattr(exported[0], n) for n in exported[0].__struct_fields__} | {"loss_mask": mask}
    )
    write_records(results / "train/exports/tokens/train.jsonl.zst", [first, *exported[1:]])
    verdicts = results / "alpha/verdicts.parquet"
    verdicts.write_bytes(verdicts.read_bytes()[:-9])
    (results / "alpha/stats.json").unlink()
    manifest = json.loads((results / "summary/manifest.json").read_bytes())
    manifest["jobs"]["generate"]["alpha"]["settings"]["sampling"]["temperature"] = 0.1
    manifest["packages"]["numpy"] = "0.1"
    (results / "summary/manifest.json").write_text(json.dumps(manifest))

    found = _compare(results, finished.folder / "results", ["alpha"], [])
    lines = dict(line.split(": ", 1) for line in found.differences)
    assert set(lines) == {
        "alpha/responses.jsonl.zst",
        "alpha/train.parquet",
        "alpha/verdicts.parquet",
        "alpha/stats.json",
        "train/exports/tokens/train.jsonl.zst",
        "summary/manifest.json",
    }
    assert lines["alpha/responses.jsonl.zst"].startswith(
        "1 of 4 rows differ, in output_ids; first in row 2 ("
    )
    assert (
        f"output_ids[0]: 77 here, {responses[1].output_ids[0]} rebuilt" in lines["alpha/responses.jsonl.zst"]
    )
    assert lines["alpha/train.parquet"] == f"{len(rows) - 1} rows here, {len(rows)} rebuilt"
    assert "in loss_mask; first in row 1 (" in lines["train/exports/tokens/train.jsonl.zst"]
    assert "damaged" in lines["alpha/verdicts.parquet"]
    assert lines["alpha/stats.json"] == "is missing"
    assert lines["summary/manifest.json"] == (
        "jobs.generate.alpha.settings.sampling.temperature: 0.1 here, 0.7 rebuilt"
    )
    (note,) = found.notes
    assert note.startswith("summary/manifest.json: packages.numpy: '0.1' here, ")


def replace_an_answer(journal: Path) -> None:
    """Writes the journal anew, whole and sealed, with another first answer."""
    entries = [
        entry for path in sorted(journal.glob("*.zst")) for entry in journal_entries(path.read_bytes())
    ]
    first = next(entry for entry in entries if isinstance(entry, Answered))
    shutil.rmtree(journal)
    with JournalWriter(journal) as writer:
        for entry in entries:
            writer.append(another(entry) if entry is first else entry)


def another(entry: Answered) -> Answered:
    reply = {name: getattr(entry.reply, name) for name in entry.reply.__struct_fields__}
    reply["output_ids"] = [99, *reply["output_ids"][1:]]
    return Answered(reply=type(entry.reply)(**reply), delivery=entry.delivery)


def flip_a_bit(journal: Path) -> None:
    segment = max(journal.glob("*.zst"), key=lambda path: path.stat().st_size)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            replace_an_answer,
            r"alpha/responses\.jsonl\.zst: 1 of 4 rows differ, in output_ids; first in row . \(\S+\): "
            r"output_ids\[0\]: \d+ here, 99 rebuilt",
        ),
        (flip_a_bit, r"generate of alpha cannot be rebuilt: journal/alpha/\S+: .*damaged"),
    ],
    ids=["an answer replaced", "a bit flipped"],
)
def test_a_changed_journal_is_named(
    finished: Run, tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    run = copied(finished, tmp_path)
    change(run.folder / "journal" / "alpha")
    done = eyas(run, "verify")
    assert done.returncode == 1
    assert re.match(r"eyas: error: \d+ differences? above\. .*restore it from a backup$", done.stderr)
    assert re.search(f"^{said}", done.stdout, re.MULTILINE), done.stdout
    assert "/tmp" not in done.stdout


def test_without_results_there_is_nothing_to_verify(finished: Run, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    shutil.rmtree(run.folder / "results" / "summary")
    done = eyas(run, "verify", "--directory", str(run.folder), cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "eyas: error: results/summary/manifest.json: missing; run `snakemake` first"
    )


def test_the_results_of_another_config_are_not_called_wrong(finished: Run) -> None:
    done = eyas(finished, "verify", "--configfile", str(ROOT / "config.yaml"))
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith(
        "eyas: error: results/ holds a run with the datasets alpha, the config has B1_glaive, "
    )
    assert "name that run's config with --configfile" in done.stderr


def test_results_of_other_settings_are_not_to_be_deleted(finished: Run, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    checks = {"length": {"policy": "reject"}, "empty_answer": {"policy": "off"}}
    config = {**finished.config, "defaults": {**finished.config.get("defaults", {}), "checks": checks}}
    (run.folder / "other.yaml").write_text(yaml.safe_dump(config))
    done = eyas(run, "verify", "--directory", str(run.folder), "--configfile", str(run.folder / "other.yaml"))
    assert done.returncode == 1
    assert "summary/manifest.json: jobs." in done.stdout
    assert "name it with --configfile and delete nothing" in done.stderr
    assert (
        f"`snakemake --cores 1 --directory {run.folder} --configfile {run.folder}/other.yaml`" in done.stderr
    )
