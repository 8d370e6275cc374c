"""What has broken on this node's GPUs between two readings of NVML: pure functions.

A fault is what NVIDIA's documents answer with a reset or an exchange of the GPU: it has had more memory errors that
could not be corrected, a remapping of a row has failed, pages wait for their retirement, or the GPU is lost. What was
there at the first reading is no fault, but for a GPU that no program can use. A remapping that waits for a reset is
none either: by NVIDIA's description the GPU works on without that row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum

from .gpus import GpuFacts, NvmlFacts

NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED = 6, 15, 16
"""As in nvml.h."""

UNUSABLE = frozenset((GPU_IS_LOST, RESET_REQUIRED))
"""Codes of a GPU that no program can use until it is reset or exchanged."""


class Fault(Enum):
    MEMORY = "memory"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class GpuFault:
    """`gpu` as in the reading."""

    gpu: str
    fault: Fault
    text: str


def faults_since(before: NvmlFacts, now: NvmlFacts) -> tuple[GpuFault, ...]:
    """Empty where NVML itself does not answer any more: that says nothing of a GPU."""
    known = {gpu.name: gpu for gpu in before.gpus}
    return tuple(
        GpuFault(gpu.name, fault, f"GPU {gpu.name}: {text}")
        for gpu in now.gpus
        for fault, text in _faults(known.get(gpu.name, GpuFacts(name=gpu.name, problem="unknown")), gpu)
    )


def _faults(before: GpuFacts, now: GpuFacts) -> Iterator[tuple[Fault, str]]:
    if now.code in UNUSABLE:
        yield Fault.LOST, now.problem
    elif now.code == NOT_FOUND and not before.problem:
        yield Fault.LOST, f"NVML no longer lists it ({now.problem})"
    if before.uncorrected is not None and (now.uncorrected or 0) > before.uncorrected:
        yield Fault.MEMORY, f"uncorrected memory errors: {now.uncorrected}, were {before.uncorrected}"
    if now.remap_failed and before.remap_failed is False:
        yield Fault.MEMORY, "a remapping of a row has failed"
    if now.retirement_pending and before.retirement_pending is False:
        yield Fault.MEMORY, "pages of its memory wait for their retirement"


def moved_on(before: NvmlFacts, now: NvmlFacts, gpus: Collection[str]) -> NvmlFacts:
    """The first reading, with these GPUs as they are now."""
    newest = {gpu.name: gpu for gpu in now.gpus if gpu.name in gpus}
    return replace(before, gpus=tuple(newest.get(gpu.name, gpu) for gpu in before.gpus))


def described(before: NvmlFacts, now: NvmlFacts) -> str:
    """The reading for people: a line for each GPU, with what was there `before` where it has changed."""
    known = {gpu.name: gpu for gpu in before.gpus}
    lines = [f"driver {now.driver}" if now.driver else "", now.problem]
    lines += [_line(known.get(gpu.name), gpu) for gpu in now.gpus]
    return "".join(f"{line}\n" for line in lines if line)


def _line(before: GpuFacts | None, now: GpuFacts) -> str:
    if now.problem:
        return f"{now.name}: {now.problem} (code {now.code})"
    parts = []
    for field in fields(now):
        value, was = getattr(now, field.name), getattr(before or now, field.name)
        if field.name in ("name", "problem", "code") or value is None:
            continue
        parts.append(f"{field.name} {value}" + (f" (was {was})" if was != value else ""))
    return f"{now.name}: {', '.join(parts)}"
