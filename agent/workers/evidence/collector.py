"""Looks at workers from outside, and says what it saw: effects, and a bound of time.

A look is *quick*, of the workers themselves and at one moment, where something is to be ended at once; or *thorough*,
with their children, and twice, so that what moves is told from what does not. What the kernel shows is read before a
signal is sent, for the signal itself may wake what it asks.
"""

from __future__ import annotations

import linecache
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ....rendezvous.text import clean
from ..processes.proc import all_stats
from .facts import ProcessFacts, ThreadFacts, WorkerFacts
from .kernel import Times, children_of, process_facts, read_sockets, times_of
from .stacks import Answers, StackFile, ask, parse

MOST_SOURCE = 2**20
"""Bytes of a file whose lines are looked at."""
_MOST_LINE = 200
_MOST_NATIVE = 64 * 1024
_SPY = "py-spy"
_COMMAND_LINE = "Process "


@dataclass(frozen=True, slots=True)
class Depth:
    """How thorough a look is."""

    within_s: float
    """In all."""
    window_s: float
    """Between the two moments; 0: there is one."""
    children: bool
    native: bool


QUICK = Depth(within_s=0.05, window_s=0.0, children=False, native=False)
"""Before workers are ended because another one has failed: a restart waits for it."""

THOROUGH = Depth(within_s=1.5, window_s=0.5, children=True, native=True)
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
        # The last: a process that is looked at so is stopped meanwhile.
        native = _Spies([one.pid for one in targets]).end(until, self._clock) if depth.native else {}

        def facts(pid: int) -> ProcessFacts:
            return replace(
                last.processes[pid],
                stacks=parse(stacks.texts.get(pid, ""), _source),
                later=parse(later.texts.get(pid, "")),
                native=native.get(pid, ""),
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
        if not depth.children:
            return {one.pid: (one.pid,) for one in targets}
        stats = all_stats()
        return {one.pid: (one.pid, *children_of(stats, one.pid)) for one in targets}

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


class _Spies:
    """py-spy on each of these processes, where it is installed: what it writes, with the frames of C."""

    def __init__(self, pids: Sequence[int]) -> None:
        beside = os.path.dirname(sys.executable)
        program = shutil.which(_SPY, path=os.pathsep.join((beside, os.environ.get("PATH", os.defpath))))
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        for pid in pids if program is not None else ():
            command = [str(program), "dump", "--native", "--pid", str(pid)]
            try:
                self._running[pid] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            except OSError:
                return

    def end(self, until: float, clock: Callable[[], float]) -> dict[int, str]:
        """By pid; those that are not done at that instant are ended."""
        found = {}
        for pid, spy in self._running.items():
            try:
                text, _ = spy.communicate(timeout=max(0.0, until - clock()))
            except subprocess.TimeoutExpired:
                spy.kill()
                spy.wait()
                continue
            lines = text[:_MOST_NATIVE].decode(errors="replace").splitlines()
            # Without the command line, which may have secrets.
            found[pid] = "\n".join(clean(line) for line in lines if not line.startswith(_COMMAND_LINE))
        return found
