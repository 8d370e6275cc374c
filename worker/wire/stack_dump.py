"""Where the Python threads of a worker stand: written by the process itself, at a signal of its agent's.

The handler is faulthandler's, in C: it runs while Python's lock is held, too, and writes all threads. It writes to a
file in the agent's memory, `WorkerEnv.stacks`, that is open here at a high descriptor, so that a script gets the low
ones that it would get without us. A fork, as a data loader's, inherits both; a program that is executed has neither.

The agent sends the signal only to a process that catches it and has that very file open there: to another, it is the
end. What a script makes of the signal, of faulthandler, or of that descriptor, holds.

In the job's interpreter: standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal

SIGNAL = int(signal.SIGRTMAX) - 6
"""Hardly used by anyone: not by C libraries, Python, CUDA, or service managers."""

DESCRIPTOR = 1000


def register(path: str) -> None:
    """From now on this process, and its forks, write their stacks there when `SIGNAL` comes. Where that cannot be, as
    with a lower limit for descriptors, there are none."""
    with contextlib.suppress(OSError):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            kept = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, DESCRIPTOR)
        finally:
            os.close(opened)
        if kept == DESCRIPTOR:
            faulthandler.register(SIGNAL, file=kept, all_threads=True, chain=False)
        else:  # one is there already
            os.close(kept)
