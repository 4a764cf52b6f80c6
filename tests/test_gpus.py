"""How busy GPUs are, from NVML to the status display; there is no GPU here, so NVML's answers are made up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from eyas.cli.status import table
from eyas.config import ServerConfig
from eyas.progress import Progress
from eyas.server import gpus
from eyas.server.gpus import Gpu, look
from eyas.server.shares import Client, Shares
from eyas.server.state import State


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Two GPUs, the second busier, and the device of their driver."""
    monkeypatch.setattr(gpus, "DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda at: at)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda at: SimpleNamespace(gpu=50 + 40 * at))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda at: SimpleNamespace(used=90, total=100))
    gpus._open.cache_clear()
    yield
    gpus._open.cache_clear()


def test_shares_of_time_and_memory(two: None) -> None:
    assert look() == [Gpu(0.5, 0.9), Gpu(0.9, 0.9)]


def test_a_host_without_a_driver_has_none_and_does_not_look(
    two: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpus, "DRIVERS", (str(tmp_path / "none"),))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: pytest.fail("NVML was asked"))
    assert look() == []


def test_a_host_without_nvml_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "DRIVERS", (str(tmp_path),))
    gpus._open.cache_clear()
    assert look() == []


def test_a_gpu_that_falls_off_the_bus_is_no_error(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_handle: object) -> None:
        raise pynvml.NVMLError_GpuIsLost

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lost)
    assert look() == []


def test_a_job_on_another_host_is_told_by_the_one_beside_the_server(
    two: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.server.shares.BEAT", 0.01)
    state = State(tmp_path)
    with Client(state, "") as beside, Client(state, "") as elsewhere:
        beside.beside_server = True
        shares = Shares(elsewhere, ServerConfig(engine={"name": "x"}))
        deadline = time.monotonic() + 30
        while not shares.gpus and time.monotonic() < deadline:
            time.sleep(0.3)
            shares.share({}, 1)
        assert shares.gpus == [Gpu(0.5, 0.9), Gpu(0.9, 0.9)]


def test_a_driver_that_hangs_is_not_the_death_of_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, end = threading.Event(), threading.Event()
    monkeypatch.setattr("eyas.server.shares.BEAT", 0.01)
    monkeypatch.setattr("eyas.server.shares.look", lambda: hanging.set() or end.wait(60) or [])
    with Client(State(tmp_path), "") as client:
        client.beside_server = True
        assert hanging.wait(30)
        before, deadline = client.path.stat().st_mtime_ns, time.monotonic() + 30
        while client.path.stat().st_mtime_ns == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.path.stat().st_mtime_ns > before
    end.set()


def test_status_has_a_line_for_them() -> None:
    progress = Progress(dataset="a", state="generating", planned=9, gpus=[(0.5, 0.9), (0.9, 0.9)])
    assert table([(progress, "generating")])[-1] == "GPUs: 2, 50% to 90% busy, 90% of their memory taken"
    assert "GPUs" not in table([(progress, "done")])[-1]
