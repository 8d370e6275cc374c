"""What was seen of workers, as plain data, from which `testimony.py` finds what each of them does.

All texts come from processes that are not trusted, and are cleaned and bounded where they are made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from ....rendezvous.statements.inquiry import Recorded

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
    source: str = ""

    @property
    def place(self) -> str:
        """For people, the same on all nodes that keep the script elsewhere."""
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """Of one thread that runs Python; the innermost frame first."""

    name: str
    frames: tuple[Frame, ...]

    def without_source(self) -> ThreadStack:
        return ThreadStack(self.name, tuple(replace(frame, source="") for frame in self.frames))


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
    native: str = ""
    """As py-spy shows it, with the frames of C."""
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

_CALLS = {
    "futex": Wait.FUTEX,
    "nanosleep": Wait.SLEEP,
    "clock_nanosleep": Wait.SLEEP,
    "pause": Wait.SLEEP,
    "rt_sigtimedwait": Wait.SLEEP,
    "read": Wait.READ,
    "readv": Wait.READ,
    "recvfrom": Wait.READ,
    "recvmsg": Wait.READ,
    "accept": Wait.READ,
    "accept4": Wait.READ,
    "flock": Wait.FUTEX,
    "wait4": Wait.CHILD,
    "waitid": Wait.CHILD,
    "poll": Wait.POLL,
    "ppoll": Wait.POLL,
    "select": Wait.POLL,
    "pselect6": Wait.POLL,
    "epoll_wait": Wait.POLL,
    "epoll_pwait": Wait.POLL,
}


def wait_of(state: str, channel: str, call: str) -> Wait:
    """The system call says it for certain; where it is not shown, the channel does.

    >>> wait_of("S", "anon_pipe_read", "").name, wait_of("S", "", "futex").name, wait_of("R", "0", "").name
    ('READ', 'FUTEX', 'NOTHING')
    """
    if state == "R":
        return Wait.NOTHING
    if call in _CALLS:
        return _CALLS[call]
    return next((wait for part, wait in _CHANNELS if part in channel), Wait.OTHER)
