"""What is seen of workers in /proc, as plain data, from which `testimony.py` finds what each of them does.

Only small files of /proc are read, none of which waits for the process. `maps`, `smaps`, `cmdline` and `environ` would
wait for a process that holds its memory's lock in the kernel, and the last two may have secrets: none of them is read.
All texts come from processes that are not trusted, and are cleaned and bounded where they are made.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field

from ....rendezvous.statements.inquiry import Recorded
from ....rendezvous.text import clean
from ..processes.proc import read, stat_of

BUSY_SHARE = 0.3
"""Of one processor."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of Python. `source`: the text of that line, where the file can be read."""

    file: str
    line: int
    function: str
    source: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        """For people, the same on all nodes that keep the script elsewhere."""
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """Of one thread that runs Python; the innermost frame first."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class ThreadFacts:
    """One thread, as the kernel shows it."""

    tid: int
    name: str
    state: str
    """A letter, as in proc(5)."""
    waits_for: str = ""
    """For people, by its system call; empty: it runs, or that is not shown."""
    channel: str = ""
    """The kernel's function where it waits."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker."""

    rank: int
    local_rank: int
    pid: int
    threads: tuple[ThreadFacts, ...]
    """The first is the main one; empty: the process has ended, or was ending."""
    stacks: tuple[ThreadStack, ...] = ()
    """The last is the main thread's. Empty: not known."""
    why_no_stacks: str = ""
    window_s: float = 0.0
    """Over which processor time was measured; 0: it was not."""
    main_cpu_s: float = 0.0
    """Of the main thread, meanwhile."""
    memory_bytes: int = 0
    devices: bool = False
    """It has a GPU's device file open."""
    step: int | None = None
    still_s: float | None = None
    last_lines: tuple[str, ...] = ()
    recorded: Recorded | None = None
    """By torch's flight recorder."""

    @property
    def main(self) -> ThreadFacts | None:
        return self.threads[0] if self.threads else None

    @property
    def runs(self) -> bool:
        """Its main thread uses a processor, and does not only look now and then whether there is something to do."""
        running = self.main is not None and self.main.state == "R"
        return running or self.main_cpu_s > BUSY_SHARE * self.window_s > 0


LOCK = "a lock or another thread"
TIME = "time to pass"
BYTES = "bytes"
CHILD = "the end of a child"
ANY = "one of several descriptors"

_CALLS = (
    (LOCK, (202, 73), (98, 32)),
    (TIME, (35, 230, 34, 128), (101, 115, 137)),
    (BYTES, (0, 19, 45, 47, 43, 288), (63, 65, 207, 212, 202, 242)),
    (ANY, (7, 271, 23, 270, 232, 281), (73, 72, 22)),
    (CHILD, (61, 247), (260, 95)),
)
"""What is waited for in futex and flock; nanosleep, clock_nanosleep, pause and sigtimedwait; read, readv, recvfrom,
recvmsg, accept and accept4; poll, ppoll, select, pselect6, epoll_wait and epoll_pwait; wait4 and waitid: by the numbers
of x86_64 and of aarch64."""
_COLUMN = {"x86_64": 1, "aarch64": 2}.get(platform.machine())
_WAITS = {number: row[0] for row in _CALLS for number in row[_COLUMN]} if _COLUMN is not None else {}

MOST_THREADS = 256
"""Of one process."""
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def main_cpu_s(pid: int) -> float:
    """What its main thread has used so far."""
    stat = stat_of(f"/proc/{pid}/task/{pid}")
    return stat.own_ticks * _TICK_S if stat is not None else 0.0


def threads_of(pid: int) -> tuple[ThreadFacts, ...]:
    """The main one first."""
    folder = f"/proc/{pid}/task"
    tids = sorted(map(int, _names(folder)), key=lambda tid: (tid != pid, tid))[:MOST_THREADS]
    return tuple(facts for tid in tids if (facts := _thread(f"{folder}/{tid}")) is not None)


def memory_of(pid: int) -> int:
    resident = read(f"/proc/{pid}/statm").split()
    return int(resident[1]) * _PAGE if len(resident) > 1 else 0


def has_gpu(pid: int) -> bool:
    for name in _names(f"/proc/{pid}/fd"):
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith(_DEVICES):
                return True
        except OSError:
            continue
    return False


def _thread(folder: str) -> ThreadFacts | None:
    stat = stat_of(folder)
    if stat is None:
        return None
    channel = read(f"{folder}/wchan")
    number = read(f"{folder}/syscall").partition(" ")[0]
    waits_for = _WAITS.get(int(number), f"system call {number}") if number.isdigit() else ""
    return ThreadFacts(
        int(stat.pid),
        clean(stat.name),
        stat.state,
        "" if stat.state == "R" else waits_for,
        "" if channel == "0" else clean(channel),
    )


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
