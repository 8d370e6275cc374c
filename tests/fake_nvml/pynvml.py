"""Stands in for nvidia-ml-py where PYTHONPATH leads here: says what the JSON file of FAKE_NVML says at the moment.

{"used": {"0000:3b:00.0": 2048}, "processes": {"0000:3b:00.0": [[4711, 1024]]}}     MiB, and by pid
{"raises": "Driver Not Loaded"}     every call does
{"hangs": true}                     the next call never returns
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20


class NVMLError(Exception):
    pass


def _told() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    while told.get("hangs"):
        time.sleep(60)
    if "raises" in told:
        raise NVMLError(told["raises"])
    return told


def nvmlInit() -> None:
    _told()


def _find(name: str) -> str:
    if name not in _told()["used"]:
        raise NVMLError("Not Found")
    return name


def nvmlDeviceGetHandleByPciBusId(address: bytes) -> str:
    return _find(address.decode())


def nvmlDeviceGetHandleByUUID(uuid: bytes) -> str:
    return _find(uuid.decode())


def nvmlDeviceGetHandleByIndex(index: int) -> str:
    return _find(str(index))


def nvmlDeviceGetMemoryInfo(handle: str) -> SimpleNamespace:
    with open(os.environ["FAKE_NVML"] + ".asked", "a") as asked:
        asked.write(f"{handle}\n")
    return SimpleNamespace(used=_told()["used"][handle] * MIB)


def nvmlDeviceGetComputeRunningProcesses(handle: str) -> list[SimpleNamespace]:
    processes = _told().get("processes", {})
    if processes is None:
        raise NVMLError("Not Supported")
    return [
        SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else mib * MIB)
        for pid, mib in processes.get(handle, ())
    ]
