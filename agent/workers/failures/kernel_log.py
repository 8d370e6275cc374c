"""The kernel's log: what it tells of processes that it has killed for their memory, and of GPUs that are lost.

`parse` is pure; `KernelLog` reads /dev/kmsg, where this process may (it takes CAP_SYSLOG where kernel.dmesg_restrict is
1, and containers seldom have the device at all). Where it may not, nothing is known, and nothing else changes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ....health.checks.rules.gpus import HARDWARE_XIDS
from .facts import Event, Trouble
from .texts import clean, cut

KMSG = Path("/dev/kmsg")

ECC_XIDS = frozenset((48, 92, 94, 95, 140))
"""Errors of a GPU's memory that were not corrected, or too many that were."""
_INFORM = frozenset((63,))
"""A row that was replaced has done its work: another message tells of the error."""
LOST_XIDS = HARDWARE_XIDS - ECC_XIDS - _INFORM
"""The driver has lost a GPU, its firmware or its link."""

_MOST_RECORDS = 20_000
_RECORD_BYTES = 8192
"""As the kernel writes them at most."""
_MOST_EVENTS = 64
_TEXT_MAX = 160
_OF_KERNEL = 8
"""What others write into it has a priority of at least this: a facility besides the kernel's."""
_FIRST_PID_NAMESPACE = "pid:[4026531836]"

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]*\): (\d+)\b")
_XID_PID = re.compile(r"\bpid='?(\d+)")
_GPU = re.compile(r"NVRM: The NVIDIA GPU ([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})")
_FALLEN = re.compile(r"NVRM:.* fallen off the bus")
_OOM = re.compile(r"[Oo]ut of memory[^:]*: Kill(?:ed)? process (\d+) ")
_POISON = re.compile(r"Memory failure: .*:(\d+) due to hardware memory corruption")


def parse(messages: Iterable[str]) -> Iterator[Event]:
    """Of these messages, the oldest first, those that tell of such trouble."""
    named = ""
    for message in messages:
        text = cut(clean(message), _TEXT_MAX)
        if found := _GPU.search(message):
            named = address(found[1])
        elif found := _XID.search(message):
            trouble = _trouble(int(found[2]))
            pid = _XID_PID.search(message)
            if trouble is not None:
                yield Event(trouble, text, int(pid[1]) if pid else 0, address(found[1]))
        elif named and _FALLEN.search(message):
            yield Event(Trouble.XID, text, device=named)
        elif found := _OOM.search(message):
            yield Event(Trouble.OUT_OF_MEMORY, text, int(found[1]))
        elif found := _POISON.search(message):
            yield Event(Trouble.ECC, text, int(found[1]))


def _trouble(xid: int) -> Trouble | None:
    if xid in ECC_XIDS:
        return Trouble.ECC
    return Trouble.XID if xid in LOST_XIDS else None


def address(device: str) -> str:
    """Of a PCI device, without its function, as the kernel writes it.

    >>> address("00000000:3B:00.0"), address("0000:3b:00")
    ('0000:3b:00', '0000:3b:00')
    """
    domain, _, rest = device.partition(":")
    return f"{domain[-4:]}:{rest}".lower().partition(".")[0]


@dataclass(frozen=True, slots=True)
class KernelNews:
    """What the log tells since a worker was started, and what tells in it that this worker is meant: its process, if
    this one counts them as the kernel does (else 0), and the addresses of its devices."""

    events: tuple[Event, ...]
    pid: int
    devices: frozenset[str]

    def about(self, exception: str) -> tuple[Event, ...]:
        """This worker, or a process of its own that its exception names."""
        return tuple(event for event in self.events if self._concerns(event, exception))

    def _concerns(self, event: Event, exception: str) -> bool:
        if event.device and event.device in self.devices:
            return True
        return self.pid > 0 and event.pid > 0 and (event.pid == self.pid or f"(pid {event.pid})" in exception)


def pids_are_the_kernels(proc: Path = Path("/proc/self")) -> bool:
    """This process is in the first namespace of processes, as none in a container is."""
    try:
        return os.readlink(proc / "ns" / "pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return False


class KernelLog:
    """For one thread. No call waits."""

    def __init__(self, path: Path = KMSG) -> None:
        self._fd = _opened(path)
        self._events: list[Event] = []

    def forget(self) -> None:
        """What has been told until now is of no concern."""
        self._events.clear()
        if self._fd is not None:
            os.lseek(self._fd, 0, os.SEEK_END)

    def events(self) -> tuple[Event, ...]:
        """Since then, the oldest first; without any where the log cannot be read."""
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
