"""Reads the GPUs from NVML and their Xid messages from the kernel's log. The driver may hang in any of these calls."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from ..needs import NodeNeeds
from ..rules.gpus import GpuFacts, NvmlFacts, XidFacts, xids_of
from .nvml import Nvml, NvmlError

KERNEL_LOG = "/dev/kmsg"
RECORD_BYTES = 8192
"""The kernel gives one record at each read, and none is longer."""
MOST_XIDS = 256


def probe_nvml(needs: NodeNeeds) -> NvmlFacts:
    return read_gpus(open_nvml(), needs.gpus)


def open_nvml() -> Nvml | NvmlFacts:
    """NVML, started, or why it cannot be asked."""
    try:
        nvml = Nvml()
    except OSError:
        return NvmlFacts(absent=True)
    try:
        nvml.start()
    except NvmlError as error:
        return NvmlFacts(problem=str(error))
    return nvml


def read_gpus(nvml: Nvml | NvmlFacts, names: Sequence[str]) -> NvmlFacts:
    if isinstance(nvml, NvmlFacts):
        return nvml
    try:
        driver = nvml.driver()
    except NvmlError as error:
        return NvmlFacts(problem=str(error))
    return NvmlFacts(driver=driver, gpus=tuple(_gpu(nvml, name) for name in names))


def _gpu(nvml: Nvml, name: str) -> GpuFacts:
    try:
        return _known_gpu(nvml, name)
    except NvmlError as error:
        return GpuFacts(name=name, problem=str(error), code=error.code)


def _known_gpu(nvml: Nvml, name: str) -> GpuFacts:
    """Raises NvmlError."""
    device = nvml.device(name)
    rows = nvml.remapped_rows(device)
    remapped, pending, failed = rows if rows is not None else (None, None, None)
    return GpuFacts(
        name=name,
        uncorrected=nvml.uncorrected(device),
        remapped=remapped,
        remap_pending=pending,
        remap_failed=failed,
        retirement_pending=nvml.retirement_pending(device),
        throttled=nvml.throttled(device),
        persistent=nvml.persistent(device),
    )


def probe_xids(log: str = KERNEL_LOG) -> XidFacts:
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return XidFacts(readable=False)
    try:
        found = xids_of(_messages(descriptor), time.clock_gettime(time.CLOCK_BOOTTIME))
    except PermissionError:
        return XidFacts(readable=False)
    finally:
        os.close(descriptor)
    return XidFacts(readable=True, xids=tuple(found[-MOST_XIDS:]))


def _messages(descriptor: int) -> Iterator[tuple[float, str]]:
    """`6,1234,5678901,-;text`: the third is in microseconds. Raises PermissionError."""
    while True:
        try:
            record = os.read(descriptor, RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:  # it was overwritten before it was read
            continue
        if not record:
            return
        head, _, text = record.decode(errors="replace").partition(";")
        fields = head.split(",")
        if len(fields) > 2 and fields[2].isdigit():
            yield int(fields[2]) / 1e6, text
