"""What is seen of workers in /proc, as plain data, from which `testimony.py` finds what each of them does.

Only small files of /proc are read, none of which waits for the process. `maps`, `smaps`, `cmdline` and `environ` would
wait for a process that holds its memory's lock in the kernel, and the last two may have secrets: none of them is read.
All texts come from processes that are not trusted, and are cleaned and bounded where they are made.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from ....rendezvous.statements.inquiry import Recorded
from ....rendezvous.text import clean
from ...common.kernel_files import read
from ..processes.proc import debugger_of, sleeps_of, stat_of

BUSY_SHARE = 0.3
"""Of one processor."""


class Wait(Enum):
    """What a thread waits for in the kernel, by its wait channel and system call."""

    NOTHING = "runs"
    FUTEX = "a lock, or another thread"
    SLEEP = "time to pass"
    READ = "bytes"
    POLL = "one of several descriptors"
    CHILD = "the end of a child"
    OTHER = "something else in the kernel"


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
    state_before: str = ""
    """The same, at the beginning of the window."""
    channel: str = ""
    """The kernel's function where it waits."""
    call: str = ""
    """The system call, by name or number."""
    on: str = ""
    """What is behind the descriptor of that call: pipe:[4711], a socket's addresses, a path."""
    cpu_s: float = 0.0
    """Within `WorkerFacts.window_s`."""
    wakes: float = 0.0
    """How often in a second it went to sleep, meanwhile."""

    @property
    def asleep(self) -> bool:
        """In uninterruptible sleep, and not just for a moment."""
        return self.state == "D" and self.state_before in ("", "D")

    def runs(self, window_s: float) -> bool:
        """It uses a processor, or waits for one, and does not only look whether there is something to do."""
        return self.cpu_s > BUSY_SHARE * window_s > 0 or self.state == self.state_before == "R"

    @property
    def wait(self) -> Wait:
        return wait_of(self.state, self.channel, self.call)


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    pid: int
    name: str
    parent: int
    threads: tuple[ThreadFacts, ...]
    """The first is the process' own; empty: it has ended, or was ending."""
    memory_bytes: int = 0
    stacks: tuple[ThreadStack, ...] = ()
    """The last is the main thread's. Empty: not known."""
    later: tuple[ThreadStack, ...] = ()
    """The same, after the window; empty: they were not asked for again."""
    devices: bool = False
    """It has a GPU's device file open."""
    why_no_stacks: str = ""
    debugger: str = ""
    """What traces it, for people."""

    @property
    def main(self) -> ThreadFacts | None:
        return self.threads[0] if self.threads else None

    @property
    def cpu_s(self) -> float:
        return sum(thread.cpu_s for thread in self.threads)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker: its process, and those that it has started."""

    rank: int
    local_rank: int
    process: ProcessFacts
    children: tuple[ProcessFacts, ...] = ()
    window_s: float = 0.0
    """Over which times were measured; 0: they were not."""
    step: int | None = None
    still_s: float | None = None
    last_lines: tuple[str, ...] = ()
    recorded: Recorded | None = None
    """By torch's flight recorder."""


_CHANNELS = (
    ("futex", Wait.FUTEX),
    ("nanosleep", Wait.SLEEP),
    ("do_sigtimedwait", Wait.SLEEP),
    ("pause", Wait.SLEEP),
    ("poll", Wait.POLL),
    ("do_select", Wait.POLL),
    ("do_wait", Wait.CHILD),
    ("pipe_read", Wait.READ),
    ("pipe_wait", Wait.READ),
    ("_recv", Wait.READ),
    ("stream_read", Wait.READ),
    ("wait_data", Wait.READ),
    ("inet_csk_accept", Wait.READ),
    ("wait_for_packets", Wait.READ),
    ("_read", Wait.READ),
)
"""Parts of names of kernel functions: which one waits has changed from kernel to kernel."""

_CALLS = (
    ("read", 0, 63, Wait.READ),
    ("readv", 19, 65, Wait.READ),
    ("recvfrom", 45, 207, Wait.READ),
    ("recvmsg", 47, 212, Wait.READ),
    ("accept", 43, 202, Wait.READ),
    ("accept4", 288, 242, Wait.READ),
    ("flock", 73, 32, Wait.FUTEX),
    ("write", 1, 64, None),
    ("writev", 20, 66, None),
    ("sendto", 44, 206, None),
    ("sendmsg", 46, 211, None),
    ("connect", 42, 203, None),
    ("fsync", 74, 82, None),
    ("fdatasync", 75, 83, None),
    ("poll", 7, -1, Wait.POLL),
    ("ppoll", 271, 73, Wait.POLL),
    ("select", 23, -1, Wait.POLL),
    ("pselect6", 270, 72, Wait.POLL),
    ("epoll_wait", 232, -1, Wait.POLL),
    ("epoll_pwait", 281, 22, Wait.POLL),
    ("futex", 202, 98, Wait.FUTEX),
    ("nanosleep", 35, 101, Wait.SLEEP),
    ("clock_nanosleep", 230, 115, Wait.SLEEP),
    ("pause", 34, -1, Wait.SLEEP),
    ("rt_sigtimedwait", 128, 137, Wait.SLEEP),
    ("wait4", 61, 260, Wait.CHILD),
    ("waitid", 247, 95, Wait.CHILD),
)
"""The system calls in which a process may stand for long: the number of each on x86_64 and on aarch64 (-1: it has
none), and what a thread waits for there; None: the kernel's function says that."""

_COLUMN = {"x86_64": 1, "aarch64": 2}.get(platform.machine())
_NAMES = {row[_COLUMN]: row[0] for row in _CALLS} if _COLUMN is not None else {}
_WAITS = {name: wait for name, _, _, wait in _CALLS if wait is not None}
_OF_DESCRIPTOR = frozenset(name for name, *_ in _CALLS[:14])
"""Their first argument is a descriptor."""


def wait_of(state: str, channel: str, call: str) -> Wait:
    """The system call says it for certain; where it is not shown, the channel does.

    >>> wait_of("S", "anon_pipe_read", "").name, wait_of("S", "", "futex").name, wait_of("R", "0", "").name
    ('READ', 'FUTEX', 'NOTHING')
    """
    if state == "R":
        return Wait.NOTHING
    if call in _WAITS:
        return _WAITS[call]
    return next((wait for part, wait in _CHANNELS if part in channel), Wait.OTHER)


# --- From /proc

MOST_THREADS = 256
"""Of one process."""
_MOST_TEXT = 160
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Times:
    """What a thread has used up to an instant: processor time, and how often it went to sleep by itself."""

    cpu_s: float
    sleeps: int


def times_of(pid: int) -> dict[int, Times]:
    """By thread."""
    folder = f"/proc/{pid}/task"
    found = {}
    for tid in _threads(folder):
        if (stat := stat_of(f"{folder}/{tid}")) is not None:
            found[tid] = Times(stat.own_ticks * _TICK_S, sleeps_of(f"{folder}/{tid}"))
    return found


def process_facts(
    pid: int,
    before: Mapping[int, Times],
    now: Mapping[int, Times],
    window_s: float,
    sockets: Callable[[], Mapping[str, str]],
) -> ProcessFacts:
    """Without its stacks. `before` and `now` are its times, so far apart; `sockets` the machine's, by inode."""
    folder = f"/proc/{pid}"
    stat = stat_of(folder)
    if stat is None:
        return ProcessFacts(pid, "", 0, ())
    tids = sorted(_threads(f"{folder}/task"), key=lambda tid: (tid != pid, tid))[:MOST_THREADS]
    threads = tuple(
        _within(facts, before.get(facts.tid), now.get(facts.tid), window_s)
        for tid in tids
        if (facts := _thread(f"{folder}/task/{tid}", sockets)) is not None
    )
    resident = read(f"{folder}/statm").split()
    memory = int(resident[1]) * _PAGE if len(resident) > 1 else 0
    return ProcessFacts(
        pid,
        clean(stat.name),
        stat.parent,
        threads,
        memory,
        devices=_has_device(folder),
        debugger=clean(debugger_of(folder)),
    )


def _thread(folder: str, sockets: Callable[[], Mapping[str, str]]) -> ThreadFacts | None:
    stat = stat_of(folder)
    if stat is None:
        return None
    call, on = _call(folder, sockets) if stat.state != "R" else ("", "")
    channel = read(f"{folder}/wchan")
    return ThreadFacts(
        int(stat.pid),
        clean(stat.name),
        stat.state,
        channel="" if channel == "0" else clean(channel),
        call=call,
        on=on,
    )


def _within(facts: ThreadFacts, before: Times | None, now: Times | None, window_s: float) -> ThreadFacts:
    if before is None or now is None or window_s <= 0:
        return facts
    return replace(facts, cpu_s=now.cpu_s - before.cpu_s, wakes=(now.sleeps - before.sleeps) / window_s)


def _call(folder: str, sockets: Callable[[], Mapping[str, str]]) -> tuple[str, str]:
    """The system call in which the thread waits, and what is behind its descriptor."""
    number, *arguments = read(f"{folder}/syscall").split()[:2] or [""]
    if not number.isdigit():
        return "", ""
    call = _NAMES.get(int(number), number)
    if call not in _OF_DESCRIPTOR or not arguments:
        return call, ""
    try:
        on = os.readlink(f"{folder}/fd/{int(arguments[0], 16)}")
    except (OSError, ValueError):
        return call, ""
    if on.startswith("socket:["):
        on = sockets().get(on[len("socket:[") : -1], on)
    return call, clean(on)[:_MOST_TEXT]


def _threads(folder: str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder)]
    except OSError:
        return []


def _has_device(folder: str) -> bool:
    try:
        names = os.listdir(f"{folder}/fd")
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"{folder}/fd/{name}").startswith(_DEVICES):
                return True
        except OSError:
            continue
    return False


# --- Sockets


def sockets_of(tables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The addresses of each TCP socket by its inode, from texts of /proc/net/tcp and tcp6 by name.

    >>> row = "0: 0100007F:1F90 0200007F:C350 01 00000000:00000000 00:00000000 00000000 0 0 4711 1"
    >>> sockets_of([("tcp", "header\\n" + row)])
    {'4711': 'tcp 127.0.0.1:8080 to 127.0.0.2:50000'}
    """
    found = {}
    for name, text in tables:
        for row in text.splitlines()[1:]:
            fields = row.split()
            if len(fields) > 9:
                found[fields[9]] = f"{name} {_address(fields[1])} to {_address(fields[2])}"
    return found


def read_sockets() -> dict[str, str]:
    """This network namespace's, which is the workers', too."""
    return sockets_of((name, read(f"/proc/self/net/{name}")) for name in ("tcp", "tcp6"))


def _address(text: str) -> str:
    """The kernel writes words of the machine's order."""
    address, _, port = text.partition(":")
    try:
        words = bytes.fromhex(address)
        packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
        family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
        return f"{socket.inet_ntop(family, packed)}:{int(port, 16)}"
    except ValueError:
        return text
