"""What runs when what changes: exact jobs, exact requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline import Run, fake_server

pytestmark = pytest.mark.workflow


def test_a_started_server_answers_everything_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"alpha": 6, "beta": 5})
    with run.asked() as asked:
        jobs = run.jobs()
    assert len(asked) == 11
    assert jobs["generate alpha"] == jobs["train_of_dataset beta"] == jobs["mix"] == jobs["summary"] == 1
    with run.asked() as asked:
        assert not run.jobs()
    assert asked == []
