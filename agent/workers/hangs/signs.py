"""Signs of life of workers, as seen from outside: by processor time, bytes, output, and waits that end.

They are read in /proc in a thread, since a process in trouble can hold up who reads it. A look costs some microseconds
for each process of a worker; all of /proc is searched for them now and then only. Their threads, of which there may be
hundreds, are looked at only while the worker itself is still.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import psutil

from ....threads import Thread
from ...common.events import Event
from ..processes.proc import read, status_field

LOOK_EVERY_S = 2.0
"""Between two looks that the main thread asks for."""
SEARCH_EVERY_S = 10.0
"""Between two searches for descendants. What a new one has used shows at the next one."""
WAKES_PER_S = 0.5
"""Of a thread that gets something, or polls. It does not wake in a collective or for a lock, and for a data loader each
five seconds."""
LIBRARIES = ("pt_gloo", "pt_nccl", "pt_tcpstore", "gloo", "nccl", "NCCL", "cuda")
"""With these the names of threads begin that wake by themselves while their rank hangs: as of torch 2.13."""

ACTIVE_SHARE = 0.0125
"""Of one processor's time, from which on a worker is active. Threads of libraries that only wait use less: two ticks of
the kernel's clock in two seconds, now and then."""
WORKING_SHARE = 0.05
"""From which on a worker that waits itself has threads or children at work; those that ask for Python's lock use less.
"""
BYTES_PER_S = 16384.0
"""Read and written; less is what libraries write of themselves."""


@dataclass(frozen=True, slots=True)
class Signs:
    """What one worker and its descendants have used since they began, and the length of its output."""

    processor_s: float
    moved_bytes: int
    """Bytes read and written through files, pipes and most sockets."""
    output_bytes: int
    wakes: int = 0
    """How often its main thread has waited for something, and gone on."""
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
        self._families: dict[int, list[psutil.Process]] = {}
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
        self._families = {worker: _family_of(worker) for worker in workers}

    def _signs(self, worker: int, printed: int, *, threads: bool = False) -> Signs:
        processor_s, moved, wakes = 0.0, 0, 0
        for process in self._families[worker]:
            with suppress(psutil.Error):  # it has ended
                processor_s += sum(process.cpu_times()[:4])  # with that of its children that have ended
                if process.pid == worker:
                    wakes = process.num_ctx_switches().voluntary
                io = process.io_counters()
                moved += io.read_chars + io.write_chars
        stirs = self._stirs(worker, self._clock()) if threads else False
        return Signs(processor_s, moved, printed, wakes, stirs)

    def _stirs(self, worker: int, now: float) -> bool:
        sleeps = {
            f"{process.pid}/{thread}": count
            for process in self._families[worker]
            for thread, count in _sleeps(f"/proc/{process.pid}/task")
        }
        before = self._sleeps.get(worker)
        self._sleeps[worker] = now, sleeps
        if before is None or now - before[0] > 2 * LOOK_EVERY_S:
            return False
        most = WAKES_PER_S * (now - before[0])
        return any(count - before[1].get(thread, count) > most for thread, count in sleeps.items())


def _sleeps(tasks: str) -> Iterator[tuple[str, int]]:
    """Of each thread but the libraries': how often it has gone to sleep by itself."""
    with suppress(OSError):  # the process has ended
        for thread in os.listdir(tasks):
            number = status_field(f"{tasks}/{thread}", "voluntary_ctxt_switches")
            if number and not read(f"{tasks}/{thread}/comm").startswith(LIBRARIES):
                yield thread, int(number)


def _family_of(worker: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(worker)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


@dataclass(slots=True)
class Stillness:
    """Whether one worker is active. Instants are monotonic.

    The kernel counts no bytes of sockets for a process. But a main thread that waits for them wakes when some have
    come. What an inquiry itself makes a worker do, which asks for its stacks by a signal, does not count.
    """

    active_at: float
    """When it was last seen to do anything."""
    worked_at: float = 0.0
    """When it did more than a worker does that only waits, or something of it stirred: a thread or a child at work."""
    _signs: Signs | None = None
    _looked_at: float = 0.0

    def look(self, at: float, signs: Signs, *, asked: bool = False) -> None:
        """`asked`: its stacks were asked for since the last look."""
        before, self._signs = self._signs, signs
        took_s, self._looked_at = at - self._looked_at, at
        if before is None or took_s <= 0:
            self.active_at = self.worked_at = max(self.active_at, at)
        elif not asked:
            share = (signs.processor_s - before.processor_s) / took_s
            moves = (
                share < 0  # a child has ended for which its parent did not wait
                or abs(signs.moved_bytes - before.moved_bytes) > BYTES_PER_S * took_s
                or signs.wakes - before.wakes > WAKES_PER_S * took_s
                or signs.output_bytes != before.output_bytes
            )
            if moves or share > ACTIVE_SHARE:
                self.active_at = at
            if moves or share > WORKING_SHARE or signs.stirs:
                self.worked_at = at
