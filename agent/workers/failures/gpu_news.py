"""What NVML shows of this node's GPUs after a worker has failed, as reports of the machine. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ....health.checks.gpus import Fault, GpuFault
from .facts import MachineEvent, Trouble
from .texts import clean

_TROUBLES = {Fault.MEMORY: Trouble.ECC, Fault.LOST: Trouble.XID}


@dataclass(frozen=True, slots=True)
class GpuNews:
    """Faults of this node's GPUs that no earlier failure of a worker of the same GPU has told of."""

    own: tuple[MachineEvent, ...] = ()
    """Of the worker's."""
    others: tuple[MachineEvent, ...] = ()
    """Of other workers' here."""


def gpu_news(faults: Sequence[GpuFault], own: Collection[str]) -> GpuNews:
    """`own`: the GPUs of the worker."""

    def events(*, of_worker: bool) -> tuple[MachineEvent, ...]:
        return tuple(
            MachineEvent(_TROUBLES[fault.fault], clean(fault.text), by="NVML")
            for fault in faults
            if (fault.gpu in own) is of_worker
        )

    return GpuNews(own=events(of_worker=True), others=events(of_worker=False))
