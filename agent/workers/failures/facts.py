"""The facts of one worker's end, from which its cause is found."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

LAST_WORDS = 3
"""The last lines in which a program without a traceback says why it ended."""

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
"""Signals that a process causes itself: its last output says why."""


class Trouble(Enum):
    """What the kernel or NVML may report of this machine, as far as it matters here."""

    OUT_OF_MEMORY = "out of memory"
    XID = "Xid"
    """The driver has lost a GPU, or its link; or a GPU needs a reset."""
    ECC = "ECC"
    """Memory of the machine or of a GPU had errors that could not be corrected."""


@dataclass(frozen=True, slots=True)
class MachineEvent:
    """One report of the kernel, or of NVML (`by`). `pid`: of the process that it names, in the initial PID namespace;
    0: it names none. `device`: the PCI address of a GPU, like "0000:3b:00"."""

    trouble: Trouble
    text: str
    pid: int = 0
    device: str = ""
    by: str = "the kernel"


@dataclass(frozen=True, slots=True)
class Facts:
    """`returncode` as in `subprocess`. `exception`: `Type: message`, with all of its lines, from the error file or the
    last traceback; empty without one. `output`: the worker's last lines. `oom_killed`: the kernel has killed a process
    of this agent for its memory. `events`: what the kernel and NVML report of this worker since it was started.
    `inner`: the exceptions in `exception`, if it is a group and all are known."""

    returncode: int
    exception: str = ""
    output: tuple[str, ...] = ()
    oom_killed: bool = False
    events: tuple[MachineEvent, ...] = ()
    inner: tuple[str, ...] = ()

    @property
    def signal(self) -> int:
        """The signal that ended the worker, also as a shell's exit code 128 + n; 0: it has exited."""
        code = self.returncode
        if code < 0:
            return -code
        return code - 128 if 128 < code <= 128 + signal.SIGRTMAX else 0

    @property
    def code(self) -> int:
        """The exit code; 0: success, or ended by a signal."""
        return 0 if self.signal else self.returncode

    @property
    def words(self) -> tuple[str, ...]:
        """The texts in which the worker says why it ended: its exception, or else its last lines. Empty if another
        process ended it by a signal."""
        if self.exception:
            return (self.exception,)
        if self.returncode < 0:
            return self.output if self.signal in BY_ITSELF else ()
        return tuple(line for line in self.output if line.strip())[-LAST_WORDS:]

    @property
    def lines(self) -> tuple[str, ...]:
        """All that is known of what the worker said, however it ended."""
        return (*self.exception.split("\n"), *self.output)
