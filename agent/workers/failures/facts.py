"""What is known of one worker's end, before it is judged."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

LAST_WORDS = 3
"""Lines, in which a program that ends without an exception says why."""

BY_ITSELF = frozenset(
    (
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGTRAP,
        signal.SIGSYS,
    )
)
"""Signals that a process brings upon itself: what it has said before is why."""


class Trouble(Enum):
    """What the kernel tells of this machine."""

    OUT_OF_MEMORY = "out of memory"
    XID = "Xid"
    """The driver has lost a GPU, or its link."""
    ECC = "ECC"
    """Memory of the machine or of a GPU had errors that could not be corrected."""


@dataclass(frozen=True, slots=True)
class Event:
    """One such message. `pid`: of the process that it names, in the first namespace of processes; 0: it names none.
    `device`: the PCI address of a GPU, as "0000:3b:00"."""

    trouble: Trouble
    text: str
    pid: int = 0
    device: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """`returncode` as `subprocess` counts it. `exception`: `Type: message`, with all of its lines, of the error file or
    of the last traceback; empty without. `output`: the worker's last lines. `oom_killed`: the kernel has killed a
    process of this agent for its memory meanwhile. `events`: what concerns this worker since it was started."""

    returncode: int
    exception: str = ""
    output: tuple[str, ...] = ()
    oom_killed: bool = False
    events: tuple[Event, ...] = ()

    @property
    def signal(self) -> int:
        """That has ended it, also where a shell says so; 0: it has exited."""
        code = self.returncode
        if code < 0:
            return -code
        return code - 128 if 128 < code <= 128 + signal.SIGRTMAX else 0

    @property
    def code(self) -> int:
        """With which it has exited by itself; 0: it has not, or with success."""
        return 0 if self.signal else self.returncode

    @property
    def words(self) -> tuple[str, ...]:
        """In which it tells why it ended: an exception, or else its last lines, unless another process has ended it."""
        if self.exception:
            return (self.exception,)
        if self.returncode < 0:
            return self.output if self.signal in BY_ITSELF else ()
        return tuple(line for line in self.output if line.strip())[-LAST_WORDS:]
