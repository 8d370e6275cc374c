"""Looks at workers from outside, and says what it saw: effects, and a bound of time.

A look is *quick*, at one moment, where something is to be ended at once; or *thorough*, with a window over which
processor time is measured. What the kernel shows is read before a signal is sent, for the signal itself may wake what
it asks.

By that signal workers are asked where their Python threads stand (`worker.wire.stack_dump`), all at the same time; each
writes it to a file of its own. There is no mark at the end of what one writes: it is over when nothing more has come
for `QUIET_S`. A process that is stopped, or in uninterruptible sleep, would answer when it goes on: it is not asked.

`parse` is a pure function. What it reads was written by a process that is not trusted.
"""

from __future__ import annotations

import linecache
import os
import re
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ....rendezvous.statements.inquiry import LOOK_S
from ....rendezvous.text import clean
from ....worker.wire.stack_dump import DESCRIPTOR, SIGNAL
from ..processes.proc import stat_of, status_field
from .facts import Frame, ThreadStack, WorkerFacts, has_gpu, main_cpu_s, memory_of, threads_of

QUIET_S = 0.004
PAUSE_S = 0.0005
ANSWER_S = 0.3
"""A process that has not begun to write after so long does not: its main thread blocks the signal, maybe."""

MOST_BYTES = 256 * 1024
"""Of one process' stacks."""
MOST_FRAMES = 64
"""Of one thread: the innermost ones."""
_MOST_TEXT = 256

_ANSWERS = ("R", "S", "I")
_THREAD = re.compile(
    r"(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.{0,64})\])?.{0,8} \(most recent call first\):"
)
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)')


class StackFile:
    """In this process' memory: one worker writes there.

    The thread of a look may still use it when the main thread closes it: from then on it is empty, and its descriptor,
    which may be another file's by then, is not touched.
    """

    def __init__(self) -> None:
        """Raises OSError."""
        self._fd = os.memfd_create("elastic-agent-stacks", os.MFD_CLOEXEC)
        os.fchmod(self._fd, 0o600)
        # Not os.getpid(): a container may see the /proc of another pid namespace.
        self.path = f"/proc/{os.readlink('/proc/self')}/fd/{self._fd}"
        self._closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._fd)

    def clear(self) -> None:
        with self._lock:
            if not self._closed:
                os.ftruncate(self._fd, 0)

    @property
    def size(self) -> int:
        with self._lock:
            return 0 if self._closed else os.fstat(self._fd).st_size

    def read(self) -> str:
        with self._lock:
            data = b"" if self._closed else os.pread(self._fd, MOST_BYTES, 0)
        return data.decode(errors="backslashreplace")

    def is_open_in(self, pid: int) -> bool:
        with self._lock:
            if self._closed:
                return False
            here = os.fstat(self._fd)
        try:
            there = os.stat(f"/proc/{pid}/fd/{DESCRIPTOR}")
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


class WorkerStacks:
    """The files in memory where the workers of one generation write their stacks, by local rank."""

    def __init__(self) -> None:
        self._files: dict[int, StackFile] = {}

    def make(self, local_rank: int) -> str:
        """For a worker that is to be started; returns its path, for `WorkerEnv.stacks`. Raises OSError."""
        file = self._files[local_rank] = StackFile()
        return file.path

    def of(self, local_rank: int) -> StackFile | None:
        return self._files.get(local_rank)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def why_not(pid: int, file: StackFile | None) -> str:
    """Why this process must not be asked; empty if it may."""
    seen = stat_of(f"/proc/{pid}")
    if seen is None or seen.state in ("Z", "X"):
        return "it has ended"
    if seen.state not in _ANSWERS:
        return f"its state is {seen.state}: it cannot answer"
    if file is None or not _catches(pid) or not file.is_open_in(pid):
        return "it was not started from a spare, or has let go of the signal"
    return ""


def _catches(pid: int) -> bool:
    return bool(int(status_field(f"/proc/{pid}", "SigCgt") or "0", 16) >> (SIGNAL - 1) & 1)


@dataclass(frozen=True, slots=True)
class Target:
    """One worker to look at, and what is known of it without that."""

    rank: int
    local_rank: int
    pid: int
    stacks: StackFile | None = None
    step: int | None = None
    still_s: float | None = None
    last_lines: tuple[str, ...] = ()


@dataclass(slots=True)
class Answer:
    """What one worker says of itself."""

    pid: int
    file: StackFile | None
    text: str = ""
    refused: str = ""
    """Why there is no text."""
    _size: int = 0
    _grown_at: float = 0.0

    def ask(self, now: float) -> None:
        self.refused, self._grown_at = why_not(self.pid, self.file), now
        if self.refused or self.file is None:
            return
        try:
            self.file.clear()
            os.kill(self.pid, SIGNAL)
        except OSError as error:
            self.refused = error.strerror or str(error)

    def waits(self, now: float) -> bool:
        """Whether there is more to come."""
        if self.refused or self.file is None:
            return False
        size = self.file.size
        if size != self._size:
            self._size, self._grown_at = size, now
        return now - self._grown_at < (QUIET_S if size else ANSWER_S)

    def end(self) -> None:
        if not self.refused and self.file is not None:
            self.text = self.file.read()
            self.refused = "" if self.text else "it has not answered: it may block the signal"


def ask(
    targets: Sequence[Target], until: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> dict[int, Answer]:
    """By pid: the stacks of all these processes, as far as they come before the instant `until`."""
    answers = [Answer(one.pid, one.stacks) for one in targets]
    for one in answers:
        one.ask(clock())
    while sum(one.waits(clock()) for one in answers) and clock() < until:
        sleep(PAUSE_S)
    for one in answers:
        one.end()
    return {one.pid: one for one in answers}


def parse(text: str, source: Callable[[str, int], str] = lambda file, line: "") -> tuple[ThreadStack, ...]:
    """What faulthandler writes; the main thread is the last. `source` gives the text of the line where that stands."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if found := _THREAD.fullmatch(line):
            threads.append((clean(found[3] or found[2]), []))
        elif (found := _FRAME.fullmatch(line)) and threads:
            frames = threads[-1][1]
            if len(frames) < MOST_FRAMES:
                number = int(found[2]) if found[2].isdigit() else 0
                frames.append(Frame(clean(found[1])[:_MOST_TEXT], number, clean(found[3])[:_MOST_TEXT]))
    if threads and threads[-1][1]:
        frames = threads[-1][1]
        frames[0] = replace(frames[0], source=source(frames[0].file, frames[0].line))
    return tuple(ThreadStack(name, tuple(frames)) for name, frames in threads)


# --- A look

MOST_SOURCE = 2**20
"""Bytes of a file whose lines are looked at."""
_MOST_LINE = 200


@dataclass(frozen=True, slots=True)
class Depth:
    """How thorough a look is."""

    within_s: float
    """In all."""
    window_s: float
    """Over which processor time is measured; 0: it is not."""


QUICK = Depth(within_s=0.05, window_s=0.0)
"""Before workers are ended because another one has failed: a restart waits for it."""

THOROUGH = Depth(within_s=LOOK_S, window_s=0.5)
"""At a suspicion, and before workers that hang are ended."""


def look_at(
    targets: Sequence[Target], depth: Depth, clock: Callable[[], float], sleep: Callable[[float], None]
) -> tuple[WorkerFacts, ...]:
    """At all of them, for `depth.within_s` at most. Never raises for what it may find. For any thread."""
    began_at = clock()
    until = began_at + depth.within_s
    before = {one.pid: main_cpu_s(one.pid) for one in targets}
    if depth.window_s:
        sleep(depth.window_s)
    window_s = clock() - began_at if depth.window_s else 0.0
    spent = {one.pid: main_cpu_s(one.pid) - before[one.pid] for one in targets}
    threads = {one.pid: threads_of(one.pid) for one in targets}
    answers = ask(targets, until, clock, sleep)
    return tuple(
        WorkerFacts(
            one.rank,
            one.local_rank,
            one.pid,
            threads[one.pid],
            parse(answers[one.pid].text, _source),
            answers[one.pid].refused,
            window_s,
            spent[one.pid],
            memory_of(one.pid),
            has_gpu(one.pid),
            one.step,
            one.still_s,
            one.last_lines,
        )
        for one in targets
    )


def _source(file: str, line: int) -> str:
    """Of a regular file that is not too large; a pipe by such a name would make us wait."""
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return ""
    if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_SOURCE:
        return ""
    return clean(linecache.getline(file, line).strip())[:_MOST_LINE]
