"""The memory that one worker shares with its node's agent: a few words, each written by one of them, and its stacks.

    agent    generation, pending, all_signalled, and script_at of a worker that it started as a new process
    worker   attached, step, stepped_at, first_step, first_at, load_at, chosen_step, loaded_at, loaded_step,
             leaves_sigterm, own_count, own_times, saving, polled_at
    spare    script_at, when it becomes a worker and the user's script begins

A *word* is a signed number of 8 bytes, written and read whole. An *instant* is nanoseconds of `clock`, which all
processes of a machine share. Words of the same event have an order: a step's instant is there before its
number, the first step before the newest, and an own time before their count, so that a reader of a number finds what
belongs to it.

The page is anonymous memory that the agent keeps open (`memfd_create`): it is never on a disk, whose writes could hold
up a step; nothing is left of it when both processes are gone, however they went; and it cannot be cut short under the
agent's feet. A worker finds it as `/proc/PID/fd/N`, `WorkerEnv.page`. Every generation has new ones.

What a page says is a hint for metrics and hang detection, as reports are: no decision about correctness rests on it.

In the job's interpreter, too: standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import mmap
import os
import signal
import time
from dataclasses import dataclass
from functools import partial

VERSION = 4
MAGIC = int.from_bytes(b"e-page" + VERSION.to_bytes(2, "little"), "little")
SIZE = 448
"""Bytes: the first cache line is the agent's, so that what a worker writes at every step is not in what it reads."""
NO_STEP = -1

_MAGIC = 0
GENERATION = 1
PENDING = 2
"""1 while a planned change waits for this worker to stop between two steps."""
ALL_SIGNALLED = 3
"""1 where a scheduler sends its signals to the agent and to its workers alike."""
ATTACHED = 8
"""The pid of the process that uses the page as the worker; 0 while none does."""
STEP = 9
"""The newest finished one, or NO_STEP."""
STEPPED_AT = 10
FIRST_STEP = 11
FIRST_AT = 12
SCRIPT_AT = 13
"""The first line of the user's script is about to run; or, of a worker that is no spare, its process was made."""
LOAD_AT = 14
"""`Checkpointer.load` was called, for the first time."""
LOADED_AT = 15
"""`Checkpointer.load` has returned."""
LOADED_STEP = 16
"""What it returned."""
CHOSEN_STEP = 17
"""The step of the state that it is about to load, or NO_STEP: what loads it may end this process."""
LEAVES_SIGTERM = 18
"""1 while a SIGTERM does nothing to this worker, which without a handler of its own would end by it."""
OWN_COUNT = 19
"""How many steps were timed so far: all but the first."""
SAVING = 20
"""1 while `Checkpointer.save` runs."""
POLLED_AT = 21
"""The newest `poll`, between two steps."""
OWN_TIMES = 24
"""The first of `KEPT_TIMES` words: of the newest steps, nanoseconds without those spent waiting for other ranks. Step
number n of them is in word n modulo `KEPT_TIMES`."""
KEPT_TIMES = 32
"""A power of two."""


clock = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
"""Seconds on the clock of the agent and its workers. It goes on while the machine sleeps, as a lease in the store does;
`time.monotonic` would stand still."""
clock_ns = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)


class SharedProgressError(RuntimeError):
    """What is open there is not this worker's: too short, or of another version or generation.

    The worker goes on without it, and logs that once.
    """


@dataclass(frozen=True, slots=True)
class Reading:
    """What a page said at one moment. Instants are seconds, monotonic; None: that has not happened."""

    step: int | None = None
    stepped_at: float | None = None
    first_step: int | None = None
    first_at: float | None = None
    script_at: float | None = None
    load_at: float | None = None
    loaded_at: float | None = None
    loaded_step: int | None = None
    chosen_step: int | None = None
    saving: bool = False
    polled_at: float | None = None


class SharedProgress:
    """One page, mapped by this process. The agent makes and closes it; a worker attaches and leaves it mapped."""

    def __init__(self, fd: int, path: str) -> None:
        """Maps what is open at `fd`, and keeps the descriptor. Raises SharedProgressError and OSError."""
        self.path = path
        """Where a worker finds it."""
        self._fd = fd
        size = os.fstat(fd).st_size
        if size < SIZE:
            raise SharedProgressError(f"{path} has {size} bytes, a page has {SIZE}: it is not this agent's")
        # In the machine's own order of bytes: no other machine reads it.
        self.words = memoryview(mmap.mmap(fd, SIZE)).cast("q")

    @classmethod
    def make(cls, generation: int) -> SharedProgress:
        """A new page for one worker of this generation. Raises OSError."""
        fd = os.memfd_create("elastic-agent-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, SIZE)
            # A process that cut it short would end the agent by SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            # Not os.getpid(): a container may see the /proc of another pid namespace.
            page = cls(fd, f"/proc/{os.readlink('/proc/self')}/fd/{fd}")
        except BaseException:
            os.close(fd)
            raise
        page.words[GENERATION] = generation
        page.words[STEP] = page.words[CHOSEN_STEP] = NO_STEP
        page.words[_MAGIC] = MAGIC
        return page

    @classmethod
    def attach(cls, path: str, generation: int) -> SharedProgress:
        """The page at `path`, for its worker. Raises SharedProgressError and OSError."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            page = cls(fd, path)
            page._check(generation)
        except BaseException:
            os.close(fd)
            raise
        return page

    def _check(self, generation: int) -> None:
        if self.words[_MAGIC] != MAGIC:
            raise SharedProgressError(
                f"{self.path} is no page of version {VERSION}: let job and agent use the same elastic-agent"
            )
        if self.words[GENERATION] != generation:
            raise SharedProgressError(
                f"{self.path} is of generation {self.words[GENERATION]}, this process of {generation}: its time is over"
            )

    def close(self) -> None:
        """No worker can attach any more, and this process no longer reads it."""
        self.words.release()
        os.close(self._fd)

    def own_times(self, after: int) -> tuple[int, list[int]]:
        """How many steps were timed, and nanoseconds of those after number `after`, as far as they are kept."""
        words = self.words
        count = words[OWN_COUNT]
        first = max(after, count - KEPT_TIMES)
        times = [words[OWN_TIMES + number % KEPT_TIMES] for number in range(first, count)]
        # One word may be written just now, and those before it have been.
        overwritten = words[OWN_COUNT] + 1 - KEPT_TIMES - first
        return count, times[max(0, overwritten) :]

    def read(self) -> Reading:
        words = self.words
        step, stepped_at = words[STEP], words[STEPPED_AT]
        for _ in range(3):  # a worker that takes no microsecond between two steps is not waited for
            again = words[STEP]
            if again == step:
                break
            step, stepped_at = again, words[STEPPED_AT]
        stepped, loaded_at = step != NO_STEP, _instant(words[LOADED_AT])
        return Reading(
            step=step if stepped else None,
            stepped_at=_instant(stepped_at),
            first_step=words[FIRST_STEP] if stepped else None,
            first_at=_instant(words[FIRST_AT]),
            script_at=_instant(words[SCRIPT_AT]),
            load_at=_instant(words[LOAD_AT]),
            loaded_at=loaded_at,
            loaded_step=words[LOADED_STEP] if loaded_at is not None else None,
            chosen_step=words[CHOSEN_STEP] if words[CHOSEN_STEP] != NO_STEP else None,
            saving=bool(words[SAVING]),
            polled_at=_instant(words[POLLED_AT]),
        )


def private_words() -> memoryview:
    """The words of a process that has no page: no process reads them, and no change is ever pending."""
    return memoryview(bytearray(SIZE)).cast("q")


def _instant(word: int) -> float | None:
    return word / 1e9 if word else None


# ---------------------------------------------------------------- stacks
#
# Where the Python threads of a worker stand: written by the process itself, at a signal of its agent's.
#
# The handler is faulthandler's, in C: it runs while Python's lock is held, too, and writes all threads. It writes to a
# file in the agent's memory, `WorkerEnv.stacks`, that is open here at a high descriptor, so that a script gets the low
# ones that it would get without us. A fork, as a data loader's, inherits both; a program that is executed has neither.
#
# The agent sends the signal only to a process that catches it and has that very file open there: to another, it is the
# end. What a script makes of the signal, of faulthandler, or of that descriptor, holds.

STACKS_SIGNAL = int(signal.SIGRTMAX) - 6
"""Hardly used by anyone: not by C libraries, Python, CUDA, or service managers."""

STACKS_DESCRIPTOR = 1000


def register_stacks(path: str) -> None:
    """From now on this process, and its forks, write their stacks there when `STACKS_SIGNAL` comes. Where that cannot
    be, as with a lower limit for descriptors, there are none."""
    with contextlib.suppress(OSError):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            kept = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, STACKS_DESCRIPTOR)
        finally:
            os.close(opened)
        if kept == STACKS_DESCRIPTOR:
            faulthandler.register(STACKS_SIGNAL, file=kept, all_threads=True, chain=False)
        else:  # one is there already
            os.close(kept)
