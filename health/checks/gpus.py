"""GPUs as NVML and the kernel's log show them: what a check finds, and what has broken between two readings.

The outcomes follow what NVIDIA's documents on memory errors and Xid messages ask an operator to do: an uncorrected
error or a failed remapping asks for a reset or an exchange before the next job; a remapping that waits for a reset, a
hot or power-braked GPU and a hardware Xid cost speed or announce trouble.

A *fault* is what they answer with a reset or an exchange of the GPU. What was there at the first reading is none, but
for a GPU that no program can use. A remapping that waits for a reset is none either: the GPU works on without that row.

NVML is called through ctypes: the library comes with the driver, and no package is needed. Names and signatures are
those of nvml.h. All calls may hang on a sick driver, so they are made in a process of their own.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated

from ...codec import AtMost, Checked, Codec, Count, Text, Within
from .finding import MIB, Finding, NodeNeeds, Outcome, listed

GPU_CHECKS = ("gpu-visible", "gpu-ecc", "gpu-remapped-rows", "gpu-throttling")

THROTTLING = {
    0x08: "hardware slowdown (heat or power)",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "external power brake",
}
"""By the bit of nvmlDeviceGetCurrentClocksThrottleReasons. Idle, a power cap and chosen clocks are no faults."""

_LONG_KNOWN = frozenset((48, 61, 62, 63, 64, 74, 79, 92, 94, 95))
HARDWARE_XIDS = _LONG_KNOWN | {109, 110, 119, 120, 121, 136, 140, 143, 145, 149, 154, 155, 156, 158}
"""Memory, NVLink, bus and firmware. The others (13, 31, 43, 45, ...) mostly come from programs."""

XIDS_COUNT_S = 24 * 3600.0
"""Older messages are left out."""

_XID = re.compile(rb"\d+,\d+,(\d+),[^;]*;NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{1,32})\): (\d{1,4})")
"""With the microseconds since the machine was up, the GPU and the number."""


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
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttled: Annotated[int, Within(0, 2**63 - 1)] | None = None
    """Bits of `THROTTLING`, and others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlFacts(Checked):
    absent: bool = False
    """There is no library of the driver."""
    problem: Annotated[str, Text(1024)] = ""
    """What NVML's start answers; empty where it works."""
    driver: Annotated[str, Text(128)] = ""
    gpus: Annotated[tuple[GpuFacts, ...], AtMost(256)] = ()


GPU_READING = Codec((NvmlFacts,), version=1, most_bytes=1 << 18)


def check_gpus(needs: NodeNeeds) -> tuple[Finding, ...]:
    return judge_nvml(read_gpus(open_nvml(), needs.gpus), needs)


def judge_nvml(facts: NvmlFacts, needs: NodeNeeds) -> tuple[Finding, ...]:
    """One finding for each of `GPU_CHECKS`, or only the first where NVML does not answer."""
    count = len(needs.gpus)
    if facts.absent:
        summary = f"{count} GPUs, and {LIBRARY} is not here"
        advice = "let the container have the driver's utilities (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        return (Finding("gpu-visible", Outcome.UNKNOWN, summary, advice),)
    if facts.problem:
        advice = "see nvidia-smi and dmesg: reboot, or reload the driver, whose library and module must agree"
        return (Finding("gpu-visible", Outcome.FAIL, f"NVML does not start: {facts.problem}", advice),)
    lost = [f"{gpu.name}: {gpu.problem}" for gpu in facts.gpus if gpu.problem]
    seen = [gpu for gpu in facts.gpus if not gpu.problem]
    if lost:
        summary = f"{len(seen)} of {count} GPUs answer: {listed(lost)}"
        advice = "see nvidia-smi and dmesg for its Xid: reset it (nvidia-smi -r), or reboot; else exchange it"
        visible = Finding("gpu-visible", Outcome.FAIL, summary, advice)
    else:
        visible = Finding("gpu-visible", Outcome.OK, f"{count} GPUs answer, driver {facts.driver}")
    return (visible, *(_judge(check, seen) for check in GPU_CHECKS[1:] if seen))


def _judge(check: str, gpus: Sequence[GpuFacts]) -> Finding:
    fact, advice = _FACTS_AND_ADVICE[check]
    troubles = [
        (outcome, f"{gpu.name}: {text}")
        for gpu in gpus
        for name, outcome, text in _troubles(gpu)
        if name == check
    ]
    if troubles:
        fails = any(outcome is Outcome.FAIL for outcome, _ in troubles)
        summary = listed([text for _, text in troubles])
        return Finding(check, Outcome.FAIL if fails else Outcome.WARN, summary, advice)
    if all(getattr(gpu, fact) is None for gpu in gpus):
        return Finding(check, Outcome.UNKNOWN, "these GPUs do not say it, or not to this user")
    return Finding(check, Outcome.OK, f"nothing to say of {len(gpus)} GPUs")


def _troubles(gpu: GpuFacts) -> Iterator[tuple[str, Outcome, str]]:
    if gpu.uncorrected:
        yield "gpu-ecc", Outcome.FAIL, f"{gpu.uncorrected} uncorrected memory errors since the last reset"
    if gpu.remap_failed:
        yield "gpu-remapped-rows", Outcome.FAIL, "a remapping has failed: no spare rows are left"
    elif gpu.remap_pending:
        yield "gpu-remapped-rows", Outcome.WARN, "a remapping waits for a reset"
    for bit, reason in THROTTLING.items():
        if bit & (gpu.throttled or 0):
            yield "gpu-throttling", Outcome.WARN, reason


_FACTS_AND_ADVICE = {
    "gpu-ecc": ("uncorrected", "reset these GPUs (nvidia-smi -r); if it comes again, exchange them"),
    "gpu-remapped-rows": (
        "remap_failed",
        "reset these GPUs (nvidia-smi -r) before the next job; one whose remapping has failed is to be exchanged",
    ),
    "gpu-throttling": (
        "throttled",
        "the slowest GPU sets the pace of all: check fans, inlet air and power (nvidia-smi -q -d PERFORMANCE)",
    ),
}


# --- Faults

NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED = 6, 15, 16
"""As in nvml.h."""

UNUSABLE = frozenset((GPU_IS_LOST, RESET_REQUIRED))
"""Codes of a GPU that no program can use until it is reset or exchanged."""


@dataclass(frozen=True, slots=True)
class GpuFault:
    """`gpu` as in the reading."""

    gpu: str
    text: str


def faults_since(before: NvmlFacts, now: NvmlFacts) -> tuple[GpuFault, ...]:
    """Empty where NVML itself does not answer any more: that says nothing of a GPU."""
    known = {gpu.name: gpu for gpu in before.gpus}
    return tuple(
        GpuFault(gpu.name, f"GPU {gpu.name}: {text}")
        for gpu in now.gpus
        for text in _faults(known.get(gpu.name, GpuFacts(name=gpu.name, problem="unknown")), gpu)
    )


def _faults(before: GpuFacts, now: GpuFacts) -> Iterator[str]:
    if now.code in UNUSABLE:
        yield now.problem
    elif now.code == NOT_FOUND and not before.problem:
        yield f"NVML no longer lists it ({now.problem})"
    if before.uncorrected is not None and (now.uncorrected or 0) > before.uncorrected:
        yield f"uncorrected memory errors: {now.uncorrected}, were {before.uncorrected}"
    if now.remap_failed and before.remap_failed is False:
        yield "a remapping of a row has failed"


def moved_on(before: NvmlFacts, now: NvmlFacts, gpus: Collection[str]) -> NvmlFacts:
    """The first reading, with these GPUs as they are now."""
    newest = {gpu.name: gpu for gpu in now.gpus if gpu.name in gpus}
    return replace(before, gpus=tuple(newest.get(gpu.name, gpu) for gpu in before.gpus))


# --- The kernel's log

KERNEL_LOG = "/dev/kmsg"
RECORD_BYTES = 8192
"""The kernel gives one record at each read, and none is longer."""


def check_xids(needs: NodeNeeds, log: str = KERNEL_LOG) -> Finding:
    """Old and new ones cannot be told apart after a reset, so this warns and never fails."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
        try:
            xids = list(_hardware_xids(descriptor, time.clock_gettime(time.CLOCK_BOOTTIME) - XIDS_COUNT_S))
        finally:
            os.close(descriptor)
    except OSError:
        advice = "run as root, or sysctl -w kernel.dmesg_restrict=0"
        return Finding("gpu-xid", Outcome.UNKNOWN, "this user may not read the kernel's log", advice)
    if not xids:
        return Finding("gpu-xid", Outcome.OK, "no hardware Xid in the kernel's log of a day")
    up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    newest = {(gpu, number): (up_s - at_s) / 60 for gpu, number, at_s in xids}
    shown = listed([f"Xid {number} of {gpu}, {ago:.0f} min ago" for (gpu, number), ago in newest.items()])
    advice = "look the number up in NVIDIA's list of Xid messages; reset the GPU (nvidia-smi -r) if it was not since"
    return Finding("gpu-xid", Outcome.WARN, shown, advice)


def _hardware_xids(descriptor: int, since_s: float) -> Iterator[tuple[str, int, float]]:
    """GPU, number and the seconds since the machine was up; oldest first. Raises OSError."""
    while True:
        try:
            record = os.read(descriptor, RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:  # it was overwritten before it was read
            continue
        if not record:
            return
        found = _XID.match(record)
        if found and int(found[3]) in HARDWARE_XIDS and int(found[1]) / 1e6 > since_s:
            yield found[2].decode(), int(found[3]), int(found[1]) / 1e6


# --- NVML

LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96
_UNCORRECTED, _SINCE_RESET = 1, 0
_MOST_PROCESSES = 1024
_NOT_AVAILABLE = 2**64 - 1


class NvmlError(Exception):
    """What NVML says is wrong; `code` as in nvml.h, 0 where it has not been asked."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class _Process(ctypes.Structure):
    """nvmlProcessInfo_v2_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """All calls may hang on a sick driver. Those about a GPU raise NvmlError if it is lost."""

    def __init__(self) -> None:
        """Raises OSError where there is no such library, and NvmlError where it does not start."""
        self._library = ctypes.CDLL(LIBRARY)
        self._ask("nvmlInit_v2")

    def driver(self) -> str:
        text = ctypes.create_string_buffer(_TEXT)
        self._ask("nvmlSystemGetDriverVersion", text, _TEXT)
        return text.value.decode(errors="replace")

    def device(self, name: str) -> ctypes.c_void_p:
        """By PCI address, uuid or index. Raises NvmlError."""
        handle = ctypes.c_void_p()
        if name.isdigit():
            self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            way = "UUID" if name.startswith(("GPU-", "MIG-")) else "PciBusId_v2"
            self._ask(f"nvmlDeviceGetHandleBy{way}", name.encode(), ctypes.byref(handle))
        return handle

    def uncorrected(self, device: ctypes.c_void_p) -> int | None:
        count = ctypes.c_ulonglong()
        known = self._know(
            "nvmlDeviceGetTotalEccErrors", device, _UNCORRECTED, _SINCE_RESET, ctypes.byref(count)
        )
        return count.value if known else None

    def remapped_rows(self, device: ctypes.c_void_p) -> tuple[bool, bool] | None:
        """Whether some wait for a reset, and whether one has failed."""
        numbers = [ctypes.c_uint() for _ in range(4)]
        if not self._know("nvmlDeviceGetRemappedRows", device, *map(ctypes.byref, numbers)):
            return None
        _, _, pending, failed = (bool(number.value) for number in numbers)
        return pending, failed

    def throttled(self, device: ctypes.c_void_p) -> int | None:
        """The bits of the reasons for low clocks."""
        bits = ctypes.c_ulonglong()
        known = self._know("nvmlDeviceGetCurrentClocksThrottleReasons", device, ctypes.byref(bits))
        return bits.value if known else None

    def used_bytes(self, device: ctypes.c_void_p) -> int:
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        self._ask("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        return int(memory[2])

    def processes(self, device: ctypes.c_void_p) -> dict[int, int]:
        """The bytes that each has, by pid. None in a container, nor for every kind of device and user."""
        found = (_Process * _MOST_PROCESSES)()
        count = ctypes.c_uint(_MOST_PROCESSES)
        if not self._know("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), found):
            return {}
        return {one.pid: 0 if one.used == _NOT_AVAILABLE else one.used for one in found[: count.value]}

    def _know(self, name: str, *arguments: object) -> bool:
        try:
            self._ask(name, *arguments)
        except NvmlError as error:
            if error.code in UNUSABLE:
                raise
            return False
        return True

    def _ask(self, name: str, *arguments: object) -> None:
        call = getattr(self._library, name, None)
        if call is None:
            raise NvmlError(f"this driver has no {name}")
        answer = call(*arguments)
        if answer != 0:
            words = self._library.nvmlErrorString
            words.restype = ctypes.c_char_p
            raise NvmlError((words(answer) or b"").decode(errors="replace") or f"error {answer}", answer)


# --- Reading


def open_nvml() -> Nvml | NvmlFacts:
    """NVML, started, or why it cannot be asked."""
    try:
        return Nvml()
    except OSError:
        return NvmlFacts(absent=True)
    except NvmlError as error:
        return NvmlFacts(problem=str(error))


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
        device = nvml.device(name)
        pending, failed = nvml.remapped_rows(device) or (None, None)
        return GpuFacts(
            name=name,
            uncorrected=nvml.uncorrected(device),
            remap_pending=pending,
            remap_failed=failed,
            throttled=nvml.throttled(device),
        )
    except NvmlError as error:
        return GpuFacts(name=name, problem=str(error), code=error.code)


def unaccounted_mib(nvml: Nvml | NvmlFacts, names: Sequence[str]) -> list[float] | str:
    """Of each GPU what no living process accounts for: what the driver keeps for itself, and what the dead have not
    given back yet. In a container, where NVML shows no process, it is all that is in use. A text says what is wrong;
    it is empty without NVML, of which the check `gpu-visible` tells."""
    if isinstance(nvml, NvmlFacts):
        return nvml.problem
    try:
        found = []
        for device in map(nvml.device, names):
            used = nvml.used_bytes(device)
            living = [by for pid, by in nvml.processes(device).items() if os.path.exists(f"/proc/{pid}")]
            found.append((used - sum(living)) / MIB)
        return found
    except NvmlError as error:
        return str(error)


MEMORY, HEALTH = b"memory\n", b"health\n"
"""The questions: for that, and for all else."""


def main() -> None:
    """A process that keeps NVML open, and reads the GPUs of its arguments for each question on standard input.

    The answer is a line of standard output: a `NvmlFacts`, or to `MEMORY` what `unaccounted_mib` says. One that hangs
    does not hold up the other. What a library of the driver prints goes nowhere.
    """
    gpus = sys.argv[2:]
    with os.fdopen(os.dup(1), "wb") as answers:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        nvml, turn = open_nvml(), threading.Lock()

        def answer(question: bytes) -> None:
            try:
                if question == MEMORY:
                    line = json.dumps(unaccounted_mib(nvml, gpus)).encode() + b"\n"
                else:
                    line = GPU_READING.encode(read_gpus(nvml, gpus))
                with turn:
                    answers.write(line)
                    answers.flush()
            except BaseException:
                os._exit(1)  # which the agent hears; a question without an answer would wait for ever

        at_once = ThreadPoolExecutor(2)
        for question in sys.stdin.buffer:
            at_once.submit(answer, question)
        os._exit(0)  # a thread may hang in the driver
