"""In CI a skip is a failure unless its reason is in tests/allowed_skips.txt: a test that quietly stops running is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ALLOWED = Path(__file__).with_name("allowed_skips.txt")
_reasons: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _reasons.add(str(report.longrepr[2]).removeprefix("Skipped: "))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _reasons.add(str(report.longrepr[2]).removeprefix("Skipped: "))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") != "true":
        return
    allowed = [line for line in ALLOWED.read_text().splitlines() if line and not line.startswith("#")]
    unknown = {reason for reason in _reasons if not any(reason.startswith(start) for start in allowed)}
    if unknown:
        print("\nSkips whose reason is not in tests/allowed_skips.txt:", *sorted(unknown), sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
