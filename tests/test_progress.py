"""The status file is true while a job runs, however busy it is, and a run is seen whole from its start."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from eyas import progress
from eyas.progress import Progress, ProgressFile, announce, read_progress


def test_the_file_is_rewritten_while_the_job_is_busy_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "BEAT", 0.02)
    path = tmp_path / "logs" / "a.status.json"
    with ProgressFile(path, Progress(dataset="a", state="waiting", planned=3)) as show:
        seen = set()
        deadline = time.monotonic() + 30
        while len(seen) < 4 and time.monotonic() < deadline:
            current = read_progress(path)
            assert current is not None and current.state == "waiting"
            seen.add(current.updated)
        assert len(seen) == 4
        show.progress.state, show.progress.done = "done", 3
    last = read_progress(path)
    assert last is not None and (last.state, last.done) == ("done", 3)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [(KeyboardInterrupt(), "interrupted", ""), (ValueError("gone"), "failed", "gone")],
)
def test_how_a_job_ended_is_told(tmp_path: Path, error: BaseException, state: str, message: str) -> None:
    path = tmp_path / "a.status.json"
    begun = Progress(dataset="a", state="waiting", planned=3, in_flight=2, rate=5.0, eta=(1.0, 2.0, 3.0))
    with pytest.raises(type(error)), ProgressFile(path, begun):
        raise error
    last = read_progress(path)
    assert last is not None and (last.state, last.message) == (state, message)
    assert (last.in_flight, last.rate, last.eta) == (0, 0.0, None)


def test_a_job_that_cannot_write_its_file_goes_on(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with ProgressFile(tmp_path / "logs" / "a.status.json", Progress(dataset="a", state="waiting", planned=3)):
        pass
    announce(tmp_path / "logs", {"a": (3, 1)}, ["a"])


def test_a_run_announces_what_it_will_generate_and_forgets_what_the_config_has_not(tmp_path: Path) -> None:
    for name in ("done", "again", "gone.v2"):
        state = Progress(dataset=name, state="done", planned=3, done=3)
        progress.write_progress(tmp_path / f"{name}.status.json", state)
    announce(tmp_path, {"again": (5, 2), "new": (None, 4)}, ["done", "again", "new"])
    files = {path.name: json.loads(path.read_bytes()) for path in tmp_path.iterdir()}
    assert {name: (f["state"], f["planned"], f["samples"], f["done"]) for name, f in files.items()} == {
        "done.status.json": ("done", 3, 1, 3),
        "again.status.json": ("pending", 10, 2, 0),
        "new.status.json": ("pending", 0, 4, 0),
    }
    assert files["new.status.json"]["pid"] == os.getpid()
