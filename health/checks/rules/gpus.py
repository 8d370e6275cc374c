"""GPUs as NVML and the kernel's log show them.

The outcomes follow what NVIDIA's documents on memory errors and Xid messages ask an operator to do: an uncorrected
error or a failed remapping asks for a reset or an exchange before the next job; a remapping that waits for a reset, a
hot or power-braked GPU and a hardware Xid cost speed or announce trouble.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from ....codec import AtMost, Checked, Codec, Count, Seconds, Text, Within
from ..finding import Finding, Outcome
from ..needs import NodeNeeds
from ..text import listed, span

GPU_CHECKS = ("gpu-visible", "gpu-ecc", "gpu-remapped-rows", "gpu-throttling", "gpu-persistence")

THROTTLING = {
    0x08: "hardware slowdown (heat or power)",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "external power brake",
}
"""By the bit of nvmlDeviceGetCurrentClocksThrottleReasons. Idle, a power cap and chosen clocks are no faults."""

HARDWARE_XIDS = frozenset(
    {
        48,
        61,
        62,
        63,
        64,
        74,
        79,
        92,
        94,
        95,
        109,
        110,
        119,
        120,
        121,
        136,
        140,
        143,
        145,
        149,
        154,
        155,
        156,
        158,
    }
)
"""Memory, NVLink, bus and firmware. The others (13, 31, 43, 45, ...) mostly come from programs."""

XIDS_COUNT_S = 24 * 3600.0
"""Older messages are left out."""

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{1,32})\): (\d{1,4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts(Checked):
    """Of one GPU. None: this kind of GPU does not say, or not to this user."""

    name: Annotated[str, Text(128)]
    problem: Annotated[str, Text(512)] = ""
    """Why NVML does not show it; empty where it does."""
    code: Count = 0
    """NVML's code of the problem; 0 without one."""
    uncorrected: Count | None = None
    """Memory errors since the last reset."""
    remapped: Count | None = None
    """Rows that were replaced because of uncorrected errors."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retirement_pending: bool | None = None
    """Pages wait to be taken out of use, on GPUs that remap no rows."""
    throttled: Annotated[int, Within(0, 2**63 - 1)] | None = None
    """Bits of `THROTTLING`, and others."""
    persistent: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlFacts(Checked):
    absent: bool = False
    """There is no library of the driver."""
    problem: Annotated[str, Text(1024)] = ""
    """What NVML's start answers; empty where it works."""
    driver: Annotated[str, Text(128)] = ""
    gpus: Annotated[tuple[GpuFacts, ...], AtMost(256)] = ()


GPU_READING = Codec((NvmlFacts,), version=1, most_bytes=1 << 18)


def judge_nvml(facts: NvmlFacts, needs: NodeNeeds) -> tuple[Finding, ...]:
    """One finding for each of `GPU_CHECKS`, or only the first where NVML does not answer."""
    count = len(needs.gpus)
    if facts.absent:
        summary = f"{count} GPUs, and libnvidia-ml.so.1 is not here"
        advice = "let the container have the driver's utilities (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        return (Finding("gpu-visible", Outcome.UNKNOWN, summary, advice),)
    if facts.problem:
        advice = "see nvidia-smi and dmesg: reboot, or reload the driver, whose library and module must agree"
        return (Finding("gpu-visible", Outcome.FAIL, f"NVML does not start: {facts.problem}", advice),)
    lost = [gpu for gpu in facts.gpus if gpu.problem]
    seen = [gpu for gpu in facts.gpus if not gpu.problem]
    values: dict[str, float] = {"expected": count, "visible": len(seen)}
    if lost:
        summary = (
            f"{len(seen)} of {count} GPUs answer: {listed([f'{gpu.name}: {gpu.problem}' for gpu in lost])}"
        )
        advice = "see nvidia-smi and dmesg for its Xid: reset it (nvidia-smi -r), or reboot; else exchange it"
        visible = Finding("gpu-visible", Outcome.FAIL, summary, advice, values)
    else:
        driver = f", driver {facts.driver}" if facts.driver else ""
        visible = Finding("gpu-visible", Outcome.OK, f"{count} GPUs answer{driver}", values=values)
    return (visible, _ecc(seen), _rows(seen), _throttling(seen), _persistence(seen)) if seen else (visible,)


def _ecc(gpus: Sequence[GpuFacts]) -> Finding:
    known = [gpu for gpu in gpus if gpu.uncorrected is not None]
    if not known:
        return Finding("gpu-ecc", Outcome.UNKNOWN, "these GPUs count no memory errors, or not for this user")
    bad = {gpu.name: gpu.uncorrected or 0 for gpu in known if gpu.uncorrected}
    values: dict[str, float] = {"uncorrected": sum(bad.values())}
    if not bad:
        return Finding(
            "gpu-ecc", Outcome.OK, "no uncorrected memory error since the last reset", values=values
        )
    counts = listed([f"{name}: {number}" for name, number in bad.items()])
    advice = "drain the node and reset these GPUs (nvidia-smi -r); if it comes again, exchange them"
    return Finding("gpu-ecc", Outcome.FAIL, f"uncorrected memory errors: {counts}", advice, values)


def _rows(gpus: Sequence[GpuFacts]) -> Finding:
    known = [gpu for gpu in gpus if gpu.remap_failed is not None]
    if not known:
        return Finding("gpu-remapped-rows", Outcome.UNKNOWN, "these GPUs remap no rows, or do not say so")
    failed = [gpu.name for gpu in known if gpu.remap_failed]
    pending = [gpu.name for gpu in known if gpu.remap_pending]
    remapped = sum(gpu.remapped or 0 for gpu in known)
    values: dict[str, float] = {"remapped": remapped, "pending": len(pending), "failed": len(failed)}
    if failed:
        summary, advice = (
            f"remapping failed on {listed(failed)}",
            "exchange these GPUs: no spare rows are left",
        )
        return Finding("gpu-remapped-rows", Outcome.FAIL, summary, advice, values)
    if pending:
        summary = f"a remapping waits for a reset on {listed(pending)}"
        advice = "reset these GPUs (nvidia-smi -r) before the next job, or reboot"
        return Finding("gpu-remapped-rows", Outcome.WARN, summary, advice, values)
    return Finding(
        "gpu-remapped-rows", Outcome.OK, f"none pending, none failed, {remapped} done", values=values
    )


def _throttling(gpus: Sequence[GpuFacts]) -> Finding:
    known = [gpu for gpu in gpus if gpu.throttled is not None]
    if not known:
        return Finding("gpu-throttling", Outcome.UNKNOWN, "these GPUs do not say why their clocks are low")
    slow = {gpu.name: reasons for gpu in known if (reasons := _reasons(gpu.throttled or 0))}
    values: dict[str, float] = {"throttled": len(slow)}
    if not slow:
        return Finding("gpu-throttling", Outcome.OK, "no GPU is slowed down", values=values)
    summary = listed([f"{name}: {', '.join(reasons)}" for name, reasons in slow.items()])
    advice = (
        "the slowest GPU sets the pace of all: check fans, inlet air and power (nvidia-smi -q -d PERFORMANCE)"
    )
    return Finding("gpu-throttling", Outcome.WARN, summary, advice, values)


def _reasons(bits: int) -> list[str]:
    return [reason for bit, reason in THROTTLING.items() if bits & bit]


def _persistence(gpus: Sequence[GpuFacts]) -> Finding:
    known = [gpu for gpu in gpus if gpu.persistent is not None]
    if not known:
        return Finding("gpu-persistence", Outcome.UNKNOWN, "these GPUs do not tell their persistence mode")
    off = [gpu.name for gpu in known if not gpu.persistent]
    values: dict[str, float] = {"off": len(off)}
    if not off:
        return Finding("gpu-persistence", Outcome.OK, "persistence mode is on", values=values)
    advice = "each start waits seconds for the driver to load: run nvidia-persistenced, or nvidia-smi -pm 1"
    return Finding("gpu-persistence", Outcome.WARN, f"persistence mode is off: {listed(off)}", advice, values)


# --- The kernel's log


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid(Checked):
    gpu: Annotated[str, Text(64)]
    number: Annotated[int, Within(0, 9999)]
    age_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class XidFacts(Checked):
    readable: bool
    xids: Annotated[tuple[Xid, ...], AtMost(256)] = ()
    """The newest."""


def xids_of(messages: Iterable[tuple[float, str]], up_s: float) -> list[Xid]:
    """Of the kernel's messages, each with its time in seconds since the machine was up; oldest first."""
    return [
        Xid(gpu=match[1], number=int(match[2]), age_s=max(0.0, up_s - at_s))
        for at_s, text in messages
        if (match := _XID.search(text))
    ]


def judge_xids(facts: XidFacts, needs: NodeNeeds) -> Finding:
    """Old and new ones cannot be told apart after a reset, so this warns and never fails."""
    if not facts.readable:
        advice = "run as root, or sysctl -w kernel.dmesg_restrict=0"
        return Finding("gpu-xid", Outcome.UNKNOWN, "this user may not read the kernel's log", advice)
    counted = [xid for xid in facts.xids if xid.number in HARDWARE_XIDS and xid.age_s < XIDS_COUNT_S]
    values: dict[str, float] = {"xids": len(counted)}
    if not counted:
        return Finding("gpu-xid", Outcome.OK, "no hardware Xid in the kernel's log of a day", values=values)
    newest: dict[tuple[str, int], float] = {(xid.gpu, xid.number): xid.age_s for xid in counted}
    shown = listed([f"Xid {number} of {gpu}, {_ago(age)} ago" for (gpu, number), age in newest.items()])
    advice = "look the number up in NVIDIA's list of Xid messages; reset the GPU (nvidia-smi -r) if it was not since"
    return Finding("gpu-xid", Outcome.WARN, shown, advice, values)


def _ago(age_s: float) -> str:
    return (
        f"{age_s / 3600:.0f} h" if age_s >= 7200 else f"{age_s / 60:.0f} min" if age_s >= 120 else span(age_s)
    )
