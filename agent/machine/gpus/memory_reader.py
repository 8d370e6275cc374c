"""The reader: a process that asks NVML how much of the GPUs' memory is in use, because NVML can hang on a sick driver.

`memory` starts it as `python memory_reader.py DEVICE...`, through `shim`: it dies with the agent, and ignores what a
service manager sends to all. A device is named by its PCI address, its uuid or its index. Each line on standard input
asks for a reading; the answer is a line of JSON, with one number for each device: the MiB in use that no living process
accounts for. That is what the driver keeps for itself and what the dead have not given back yet. What goes wrong is its
last word, as a JSON text.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

MIB = 1 << 20


def main(devices: list[str]) -> None:
    """Answers until end-of-file."""
    # Python looks first where this file lies, but the modules here are not to be imported by their bare names.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]
    try:
        import pynvml

        pynvml.nvmlInit()
        for _ in sys.stdin:
            print(json.dumps([unaccounted_mib(pynvml, device) for device in devices]), flush=True)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)


def unaccounted_mib(nvml: Any, device: str) -> float:
    """In a container, where NVML shows no process, all that is in use."""
    handle = _handle(nvml, device)
    used: int = nvml.nvmlDeviceGetMemoryInfo(handle).used
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:  # not for every kind of device, nor for every user
        processes = []
    living = [process for process in processes if os.path.exists(f"/proc/{process.pid}")]
    return (used - sum(process.usedGpuMemory or 0 for process in living)) / MIB


def _handle(nvml: Any, device: str) -> Any:
    if device.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(device.encode())
    if ":" in device:
        return nvml.nvmlDeviceGetHandleByPciBusId(device.encode())
    return nvml.nvmlDeviceGetHandleByIndex(int(device))


if __name__ == "__main__":
    main(sys.argv[1:])
