"""Signs of life of workers, as seen from outside: by processor time, bytes, output, and waits that end.

They are read in /proc in a thread, since a process in trouble can hold up who reads it. A look costs some microseconds
for each process of a worker; all of /proc is searched for them now and then only. Their threads, of which there may be
hundreds, are looked at only while the worker itself is still.
"""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TypeAlias

from ....rendezvous.text import clean
from ....threads import Thread
from ...common.events import Event
from ...common.kernel_files import read
from ..processes.proc import all_stats, debugger_of, family_of, sleeps_of, stat_of, thread_sleeps

LOOK_EVERY_S = 2.0
"""Between two looks that the main thread asks for."""
SEARCH_EVERY_S = 10.0
"""Between two searches for descendants. What a new one has used shows at the next one."""
WAKES_PER_S = 0.5
"""Of a thread that gets something, or polls. It does not wake in a collective or for a lock, and for a data loader each
five seconds."""
LIBRARIES = ("pt_gloo", "pt_nccl", "pt_tcpstore", "gloo", "nccl", "NCCL", "cuda")
"""With these the names of threads begin that wake by themselves while their rank hangs: as of torch 2.13."""

ACTIVE_SHARE = 0.01
"""Of one processor's time, from which on a worker is active, whatever it uses otherwise."""
OF_USUAL = 0.1
"""Or so much of what it has mostly used while it was active."""
WAITING_SHARE = 0.0075
"""Libraries that wait use less. Of a worker that uses little more when it works, half of that counts."""
USUAL_LOOKS = 32
WORKING_SHARE = 0.05
"""From which on a worker that waits itself has threads or children at work."""
BYTES_PER_S = 16384.0
"""Read and written; less is what libraries write of themselves."""
NOW_AND_THEN = 0.004
"""A smaller share of one processor, over three looks, is what threads of libraries use that only wait."""
AT_ONCE = 0.0125
"""In one look it is more than that: they may use two ticks of the kernel's clock in two seconds."""
WARM_LOOKS = 10
"""A worker that was active at so many looks has begun its work."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Signs:
    """What one worker and its descendants have used since they began, and the length of its output."""

    processor_s: float
    moved_bytes: int
    """Bytes read and written through files, pipes and most sockets."""
    output_bytes: int
    wakes: int = 0
    """How often its main thread has waited for something, and gone on."""
    debugger: str = ""
    """What traces the worker now, for people; empty: nothing does."""
    stirs: bool = False
    """One of its threads, or of its children's, does so again and again. Looked for while nothing else moves."""


SignsTaker: TypeAlias = Callable[[float, Mapping[int, Signs]], object]
"""In the main loop: it gets the instant, and what the workers here had used then, by local rank."""


class SignReader:
    """`look` is for the main thread."""

    def __init__(self, post: Callable[[Event], object], clock: Callable[[], float]) -> None:
        self._post = post
        self._clock = clock
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = Thread(self._serve, "hang-signs")
        self._families: dict[int, tuple[int, ...]] = {}
        """By the pid of a worker: itself and its descendants."""
        self._searched_at = 0.0
        self._sleeps: dict[int, tuple[float, dict[str, int]]] = {}
        """By the pid of a worker: how often each thread of its family had gone to sleep, and when that was read."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join(1.0)

    def look(
        self, then: SignsTaker, pids: Mapping[int, int], printed: Mapping[int, int], *, threads: bool
    ) -> None:
        """`then` is posted. While a look does not come to its end no other begins. `pids` and `printed` are of the
        workers, by local rank.

        `threads`: whether any thread of their families stirs, which two such looks in a row show.
        """
        if self._orders.empty():
            self._orders.put(partial(self._look, then, pids, printed, threads))

    # Everything below runs in the thread.

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            order()

    def _look(
        self, then: SignsTaker, pids: Mapping[int, int], printed: Mapping[int, int], threads: bool
    ) -> None:
        self._search(tuple(pids.values()))
        seen = {
            local_rank: self._signs(pid, printed.get(local_rank, 0), threads=threads)
            for local_rank, pid in pids.items()
        }
        self._post(partial(then, self._clock(), seen))

    def _search(self, workers: tuple[int, ...]) -> None:
        now = self._clock()
        known = all(pid in self._families for pid in workers)
        if known and now < self._searched_at + SEARCH_EVERY_S:
            return
        self._searched_at = now
        stats = all_stats()
        self._families = {worker: family_of(worker, stats) for worker in workers}

    def _signs(self, worker: int, printed: int, *, threads: bool = False) -> Signs:
        ticks = moved = 0
        for pid in self._families[worker]:
            if (stat := stat_of(f"/proc/{pid}")) is not None:
                ticks += stat.ticks
                moved += _moved(read(f"/proc/{pid}/io"))
        folder = f"/proc/{worker}"
        stirs = self._stirs(worker, self._clock()) if threads else False
        return Signs(
            ticks / _TICKS_PER_S, moved, printed, sleeps_of(folder), clean(debugger_of(folder)), stirs
        )

    def _stirs(self, worker: int, now: float) -> bool:
        sleeps = {
            f"{pid}/{thread}": count
            for pid in self._families[worker]
            for thread, name, count in thread_sleeps(f"/proc/{pid}")
            if not name.startswith(LIBRARIES)
        }
        before = self._sleeps.get(worker)
        self._sleeps[worker] = now, sleeps
        if before is None or now - before[0] > 2 * LOOK_EVERY_S:
            return False
        most = WAKES_PER_S * (now - before[0])
        return any(count - before[1].get(thread, count) > most for thread, count in sleeps.items())


def _moved(text: str) -> int:
    """
    >>> _moved("rchar: 30\\nwchar: 12\\nsyscr: 2")
    42
    """
    fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    return sum(int(value) for name in ("rchar", "wchar") if (value := fields.get(name, "")).isdecimal())


@dataclass(slots=True)
class Stillness:
    """Whether one worker is active. Instants are monotonic.

    The kernel counts no bytes of sockets for a process. But a main thread that waits for them wakes when some have
    come. A worker that hangs is not quite still: threads of libraries wake now and then, a data loader asks every few
    seconds whether its children live. So a worker counts as active only from a share of what it uses when it works;
    until that is known, from the smallest use that the kernel shows, if that is more than two ticks now and then. What
    an inquiry itself makes it do, which asks for its stacks by a signal, does not count.
    """

    active_at: float
    """When it was last seen to do anything."""
    worked_at: float = 0.0
    """When it was last seen to do more than a worker does that only waits, whatever it has used before."""
    active_looks: int = 0
    _signs: Signs | None = None
    _looked_at: float = 0.0
    _lately: deque[float] = field(default_factory=lambda: deque(maxlen=3))
    _shares: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL_LOOKS))

    def look(self, at: float, signs: Signs, *, asked: bool = False) -> float:
        """Returns the pause that this look has ended, 0 if none. `asked`: its stacks were asked for since the last."""
        before, self._signs = self._signs, signs
        took_s, self._looked_at = at - self._looked_at, at
        if before is None or took_s <= 0:
            self.active_at = self.worked_at = max(self.active_at, at)
            return 0.0
        if asked:
            return 0.0
        share = (signs.processor_s - before.processor_s) / took_s
        self._lately.append(share)
        lately = sum(self._lately) / len(self._lately)
        threshold = self._threshold()
        uses = share > threshold and (share > AT_ONCE or lately > max(NOW_AND_THEN, threshold))
        moves = (
            share < 0  # a child has ended for which its parent did not wait
            or abs(signs.moved_bytes - before.moved_bytes) > BYTES_PER_S * took_s
            or signs.wakes - before.wakes > WAKES_PER_S * took_s
            or signs.output_bytes != before.output_bytes
        )
        if moves or signs.stirs or share > WORKING_SHARE:
            self.worked_at = at
        if not (moves or uses):
            return 0.0
        pause_s = self._looked_at - took_s - self.active_at
        self.active_at = at
        self.active_looks += 1
        self._shares.append(max(0.0, share))
        return pause_s

    def _threshold(self) -> float:
        if len(self._shares) < WARM_LOOKS:
            return 0.0
        usual = median(self._shares)
        return min(ACTIVE_SHARE, max(OF_USUAL * usual, min(usual / 2, WAITING_SHARE)))

    @property
    def warm(self) -> bool:
        return self.active_looks >= WARM_LOOKS
