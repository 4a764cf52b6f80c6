"""How busy the GPUs of this host are, where NVML answers."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from msgspec import Struct

DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # NVIDIA's, and Windows' for its Linux


class Gpu(Struct, frozen=True):
    """One GPU. busy: share of the last second or so in which it computed; memory: share that is taken."""

    busy: float
    memory: float


def look() -> list[Gpu]:
    """All GPUs of this host now; none where there is no NVML, or it does not answer."""
    nvml, handles = _open()
    if nvml is None:
        return []
    try:
        return [_look(nvml, handle) for handle in handles]
    except nvml.NVMLError:  # a GPU fell off the bus, or the driver is being replaced
        return []


def _look(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        busy=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, memory=memory.used / max(memory.total, 1)
    )


@cache
def _open() -> tuple[Any, list[Any]]:
    """NVML and a handle for each GPU, opened once."""
    if not any(map(os.path.exists, DRIVERS)):  # importing the bindings takes longer than all looks of an hour
        return None, []
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None, []
