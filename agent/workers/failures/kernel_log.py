"""Reads the kernel's log for out-of-memory kills, lost GPUs and memory errors.

`parse` is pure. `KernelLog` reads /dev/kmsg if this process may: that needs CAP_SYSLOG where kernel.dmesg_restrict is
1, and containers seldom have the device. If it may not, there are no events, and nothing else changes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ....health.checks.gpus import HARDWARE_XIDS
from ..processes.proc import pid_namespace
from .facts import MachineEvent, Trouble
from .texts import clean, cut

KMSG = Path("/dev/kmsg")

ECC_XIDS = frozenset((48, 92, 94, 95, 140))
"""Errors of a GPU's memory that were not corrected, or too many that were."""
_INFORM = frozenset((63,))
"""The driver has remapped a row of memory: another message reports the error itself."""
LOST_XIDS = HARDWARE_XIDS - ECC_XIDS - _INFORM
"""The driver has lost a GPU, its firmware or its link."""

_MOST_RECORDS = 20_000
_RECORD_BYTES = 8192
"""The longest record that the kernel writes."""
_MOST_EVENTS = 64
_TEXT_MAX = 160
_OF_KERNEL = 8
"""User programs may write into the log, too: their facility gives a priority of at least this."""
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Its inode is the same on every machine: PROC_PID_INIT_INO."""

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]*\): (\d+)\b")
_XID_PID = re.compile(r"\bpid='?(\d+)")
_GPU = re.compile(r"NVRM: The NVIDIA GPU ([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})")
_FALLEN = re.compile(r"NVRM:.* fallen off the bus")
_OOM = re.compile(r"[Oo]ut of memory[^:]*: Kill(?:ed)? process (\d+) ")
_POISON = re.compile(r"Memory failure: .*:(\d+) due to hardware memory corruption")


def parse(messages: Iterable[str]) -> Iterator[MachineEvent]:
    """The events in these messages, the oldest first."""
    named = ""
    for message in messages:
        text = cut(clean(message), _TEXT_MAX)
        if found := _GPU.search(message):
            named = address(found[1])
        elif found := _XID.search(message):
            trouble = _trouble(int(found[2]))
            pid = _XID_PID.search(message)
            if trouble is not None:
                yield MachineEvent(trouble, text, int(pid[1]) if pid else 0, address(found[1]))
        elif named and _FALLEN.search(message):
            yield MachineEvent(Trouble.XID, text, device=named)
        elif found := _OOM.search(message):
            yield MachineEvent(Trouble.OUT_OF_MEMORY, text, int(found[1]))
        elif found := _POISON.search(message):
            yield MachineEvent(Trouble.ECC, text, int(found[1]))


def _trouble(xid: int) -> Trouble | None:
    if xid in ECC_XIDS:
        return Trouble.ECC
    return Trouble.XID if xid in LOST_XIDS else None


def address(device: str) -> str:
    """The address of a PCI device as the kernel writes it, without the function.

    >>> address("00000000:3B:00.0"), address("0000:3b:00")
    ('0000:3b:00', '0000:3b:00')
    """
    domain, _, rest = device.partition(":")
    return f"{domain[-4:]}:{rest}".lower().partition(".")[0]


@dataclass(frozen=True, slots=True)
class KernelNews:
    """The kernel's events since a worker was started, and how to recognize the worker in them: its pid, if the agent
    sees the kernel's own pids (else 0), and the addresses of its devices."""

    events: tuple[MachineEvent, ...]
    pid: int
    devices: frozenset[str]

    def about(self, exception: str) -> tuple[MachineEvent, ...]:
        """The events about this worker, or about a child of it that its exception names."""
        return tuple(event for event in self.events if self._concerns(event, exception))

    def _concerns(self, event: MachineEvent, exception: str) -> bool:
        if event.device and event.device in self.devices:
            return True
        return self.pid > 0 and event.pid > 0 and (event.pid == self.pid or f"(pid {event.pid})" in exception)


def pids_are_the_kernels() -> bool:
    """This process is in the initial PID namespace: no container is."""
    return pid_namespace() == _FIRST_PID_NAMESPACE


class KernelLog:
    """For one thread. No call waits."""

    def __init__(self, path: Path = KMSG) -> None:
        self._fd = _opened(path)
        self._events: list[MachineEvent] = []

    def forget(self) -> None:
        """Skip all messages until now."""
        self._events.clear()
        if self._fd is not None:
            os.lseek(self._fd, 0, os.SEEK_END)

    def events(self) -> tuple[MachineEvent, ...]:
        """The events since `forget`, the oldest first; empty if the log cannot be read."""
        if self._fd is not None:
            room = _MOST_EVENTS - len(self._events)
            self._events += list(parse(_messages(self._fd)))[:room]
        return tuple(self._events)


def _opened(path: Path) -> int | None:
    try:
        # In some containers it leads to the console, where a reader would take what another one waits for.
        if not stat.S_ISCHR(os.stat(path).st_mode) or os.stat(path).st_rdev != os.makedev(1, 11):
            return None
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


def _messages(fd: int) -> Iterator[str]:
    """A read gives one record: `priority,number,microseconds,flags;message`, and further lines about it."""
    for _ in range(_MOST_RECORDS):
        try:
            record = os.read(fd, _RECORD_BYTES).decode(errors="replace")
        except BrokenPipeError:
            continue  # the kernel has written over records that were still to be read
        except OSError:
            return  # there is no more
        head, _, message = record.partition(";")
        priority = head.partition(",")[0]
        if priority.isdigit() and int(priority) < _OF_KERNEL:
            yield message.partition("\n")[0]
