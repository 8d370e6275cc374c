"""Looks at workers from outside, and says what it saw: effects, and a bound of time.

A look is *quick*, of the workers themselves and at one moment, where something is to be ended at once; or *thorough*,
with their children, and twice, so that what moves is told from what does not. What the kernel shows is read before a
signal is sent, for the signal itself may wake what it asks.

By that signal processes are asked where their Python threads stand (`worker.wire.stack_dump`), and write it to a file.

A worker and its forks share one file, so they are asked one after the other, and what was written in between belongs to
the one that was asked; workers are asked at the same time. There is no mark at the end of what one writes: it is over
when nothing more has come for `QUIET_S`. A process that is stopped, or in uninterruptible sleep, would answer when it
goes on, in another's place: it is not asked.

`parse` is a pure function. What it reads was written by a process that is not trusted.
"""

from __future__ import annotations

import linecache
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from ....rendezvous.text import clean
from ....worker.wire.stack_dump import DESCRIPTOR, SIGNAL
from ..processes.proc import all_stats, debugger_of, family_of, stat_of, status_field
from .facts import (
    Frame,
    ProcessFacts,
    ThreadFacts,
    ThreadStack,
    Times,
    WorkerFacts,
    process_facts,
    read_sockets,
    times_of,
)

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
    """In this process' memory: one worker and its forks write there.

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


def why_not(pid: int, file: StackFile) -> str:
    """Why this process must not be asked; empty if it may."""
    seen = stat_of(f"/proc/{pid}")
    if seen is None or seen.state in ("Z", "X"):
        return "it has ended"
    if seen.state not in _ANSWERS:
        return f"its state is {seen.state}: it cannot answer"
    if debugger := debugger_of(f"/proc/{pid}"):
        return f"{debugger} traces it, and would show the signal as its own"
    if not _catches(pid) or not file.is_open_in(pid):
        return "it was not started from a spare, or has let go of the signal"
    return ""


def _catches(pid: int) -> bool:
    return bool(int(status_field(f"/proc/{pid}", "SigCgt") or "0", 16) >> (SIGNAL - 1) & 1)


@dataclass(slots=True)
class _Asked:
    """The processes that share one file, and how far they have been asked."""

    file: StackFile
    left: list[int]
    pid: int = 0
    since: float = 0.0
    grown_at: float = 0.0
    size: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)

    def turn(self, now: float) -> bool:
        """Whether there is more to wait for."""
        if self.pid:
            self._look(now)
        while not self.pid and self.left:
            self._ask(self.left.pop(0), now)
        return bool(self.pid)

    def _look(self, now: float) -> None:
        size = self.file.size
        if size != self.size:
            self.size, self.grown_at = size, now
        waits_s = QUIET_S if size else ANSWER_S
        if now - self.grown_at >= waits_s:
            self.end()

    def _ask(self, pid: int, now: float) -> None:
        if refusal := why_not(pid, self.file):
            self.refused[pid] = refusal
            return
        try:
            self.file.clear()
            os.kill(pid, SIGNAL)
        except OSError as error:
            self.refused[pid] = error.strerror or str(error)
            return
        self.pid, self.since, self.grown_at, self.size = pid, now, now, 0

    def end(self) -> None:
        if not self.pid:
            return
        if text := self.file.read():
            self.texts[self.pid] = text
        else:
            self.refused[self.pid] = "it has not answered: it may block the signal"
        self.pid = 0


@dataclass(frozen=True, slots=True)
class Answers:
    """By pid."""

    texts: Mapping[int, str]
    refused: Mapping[int, str]


def ask(
    families: Sequence[tuple[StackFile, Sequence[int]]],
    until: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Answers:
    """The stacks of all these processes, as far as they come before the instant `until`."""
    asked = [_Asked(file, list(pids)) for file, pids in families]
    while _turn_all(asked, clock()) and clock() < until:
        sleep(PAUSE_S)
    texts: dict[int, str] = {}
    refused: dict[int, str] = {}
    for one in asked:
        one.end()
        texts |= one.texts
        refused |= one.refused | dict.fromkeys(one.left, "there was no time left")
    return Answers(texts, refused)


def _turn_all(asked: Sequence[_Asked], now: float) -> bool:
    """Whether one of them has more to wait for. None waits for another."""
    return sum(one.turn(now) for one in asked) > 0


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

MOST_CHILDREN = 32
"""Of one worker, that are looked at."""
MOST_SOURCE = 2**20
"""Bytes of a file whose lines are looked at."""
_MOST_LINE = 200


@dataclass(frozen=True, slots=True)
class Depth:
    """How thorough a look is."""

    within_s: float
    """In all."""
    window_s: float
    """Between the two moments, at which children are looked at, too; 0: there is one, without them."""


QUICK = Depth(within_s=0.05, window_s=0.0)
"""Before workers are ended because another one has failed: a restart waits for it."""

THOROUGH = Depth(within_s=1.5, window_s=0.5)
"""At a suspicion, and before workers that hang are ended."""


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


@dataclass(frozen=True, slots=True)
class _Moment:
    """What the kernel shows of all these processes."""

    at: float
    processes: Mapping[int, ProcessFacts]
    times: Mapping[int, Mapping[int, Times]]


class Collector:
    """For any thread; each look by itself."""

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._clock = clock
        self._sleep = sleep

    def look(self, targets: Sequence[Target], depth: Depth) -> tuple[WorkerFacts, ...]:
        """At all of them, for `depth.within_s` at most. Never raises for what it may find."""
        until = self._clock() + depth.within_s
        families = self._families(targets, depth)
        sockets = cache(read_sockets)
        first = self._moment(families.values(), None, sockets)
        stacks = self._ask(targets, families, until - depth.window_s)
        if depth.window_s:
            self._sleep(max(0.0, min(first.at + depth.window_s, until) - self._clock()))
            last, window_s = self._moment(families.values(), first, sockets), self._clock() - first.at
            later = self._ask(targets, {one.pid: (one.pid,) for one in targets}, until)
        else:
            last, later, window_s = first, Answers({}, {}), 0.0

        def facts(pid: int) -> ProcessFacts:
            return replace(
                last.processes[pid],
                stacks=parse(stacks.texts.get(pid, ""), _source),
                later=parse(later.texts.get(pid, "")),
                why_no_stacks=stacks.refused.get(pid, ""),
            )

        return tuple(
            WorkerFacts(
                one.rank,
                one.local_rank,
                facts(one.pid),
                tuple(facts(child) for child in families[one.pid][1:]),
                window_s,
                one.step,
                one.still_s,
                one.last_lines,
            )
            for one in targets
        )

    @staticmethod
    def _families(targets: Sequence[Target], depth: Depth) -> dict[int, tuple[int, ...]]:
        """Each worker and the processes below it."""
        if not depth.window_s:
            return {one.pid: (one.pid,) for one in targets}
        stats = all_stats()
        return {one.pid: family_of(one.pid, stats)[: 1 + MOST_CHILDREN] for one in targets}

    def _moment(
        self,
        families: Collection[Sequence[int]],
        before: _Moment | None,
        sockets: Callable[[], Mapping[str, str]],
    ) -> _Moment:
        now = self._clock()
        pids = [pid for family in families for pid in family]
        times = {pid: times_of(pid) for pid in pids}
        processes = {}
        for pid in pids:
            was = before.times[pid] if before is not None else {}
            facts = process_facts(pid, was, times[pid], now - before.at if before else 0.0, sockets)
            processes[pid] = _with_state_before(facts, before.processes[pid]) if before is not None else facts
        return _Moment(now, processes, times)

    def _ask(self, targets: Sequence[Target], families: Mapping[int, Sequence[int]], until: float) -> Answers:
        asked = [(one.stacks, families[one.pid]) for one in targets if one.stacks is not None]
        return ask(asked, until, self._clock, self._sleep)


def _with_state_before(facts: ProcessFacts, before: ProcessFacts) -> ProcessFacts:
    known = {thread.tid: thread for thread in before.threads}

    def longer(thread: ThreadFacts) -> ThreadFacts:
        was = known.get(thread.tid)
        if was is None:
            return thread
        if thread.state == "R":  # where it waits when it does
            thread = replace(thread, channel=was.channel, call=was.call, on=was.on)
        return replace(thread, state_before=was.state)

    return replace(facts, threads=tuple(map(longer, facts.threads)))


def _source(file: str, line: int) -> str:
    """Of a regular file that is not too large; a pipe by such a name would make us wait."""
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return ""
    if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_SOURCE:
        return ""
    return clean(linecache.getline(file, line).strip())[:_MOST_LINE]
