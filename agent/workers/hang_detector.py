"""Do the workers of one generation on this node hang? Judged from what they report and from what is seen of them.

Where they report steps, a stall is a time without a step, a checkpoint or a `poll`. Where they do not, it is one in
which a worker uses no processor, moves no bytes and prints nothing. Either is only a suspicion: workers elsewhere may
be the reason for it, or be at work while these wait. So an early one costs no more than a question: what do all of them
do?

There are two rows of limits, `STEPS` and `UNKNOWN`, of three numbers each. Nothing but how long a step mostly takes is
learned. The detector is pure but for its own state: readings and instants are arguments, seconds on the monotonic
clock.

Activity is seen from outside: processor time, bytes, output, and waits that end. `ActivityReader` samples it in /proc,
in a thread, since a process in trouble can hold up who reads it. While steps come there is no need to. A look costs
some microseconds for each process of a worker; all of /proc is searched for them now and then only. Their threads, of
which there may be hundreds, are looked at only while the worker itself is still.
"""

from __future__ import annotations

import math
import os
import queue
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import psutil

from ...health.hang_report import LOOK_S, HangFinding, HangProbe, Urgency
from ...threads import Thread
from .processes.proc import read, status_field

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
class ActivitySample:
    """What one worker and its descendants have used since they began, and the length of its output."""

    processor_s: float
    moved_bytes: int
    """Bytes read and written through files, pipes and most sockets."""
    output_bytes: int
    wakes: int = 0
    """How often its main thread has waited for something, and gone on."""
    threads_active: bool = False
    """One of its threads, or of its children's, does so again and again. Looked for while nothing else moves."""


@dataclass(slots=True)
class ActivityTracker:
    """Whether one worker is active. Instants are monotonic.

    The kernel counts no bytes of sockets for a process. But a main thread that waits for them wakes when some have
    come. What an inquiry itself makes a worker do, which asks for its stacks by a signal, does not count.
    """

    active_at: float
    """When it was last seen to do anything."""
    worked_at: float = 0.0
    """When it did more than a worker does that only waits, or something of it stirred: a thread or a child at work."""
    _sample: ActivitySample | None = None
    _looked_at: float = 0.0

    def look(self, at: float, sample: ActivitySample, *, asked: bool = False) -> None:
        """`asked`: its stacks were asked for since the last look."""
        before, self._sample = self._sample, sample
        took_s, self._looked_at = at - self._looked_at, at
        if before is None or took_s <= 0:
            self.active_at = self.worked_at = max(self.active_at, at)
        elif not asked:
            share = (sample.processor_s - before.processor_s) / took_s
            moves = (
                share < 0  # a child has ended for which its parent did not wait
                or abs(sample.moved_bytes - before.moved_bytes) > BYTES_PER_S * took_s
                or sample.wakes - before.wakes > WAKES_PER_S * took_s
                or sample.output_bytes != before.output_bytes
            )
            if moves or share > ACTIVE_SHARE:
                self.active_at = at
            if moves or share > WORKING_SHARE or sample.threads_active:
                self.worked_at = at


HangTimeout: TypeAlias = float | Literal["auto"] | None
"""The user's own limit, those of the table, or none at all."""

VERDICT_S = 5.0
"""How long a node whose workers report steps waits for the verdict of all when its user's own limit is over, before it
ends its workers by itself."""
ALONE_S = 60.0
"""And any other, when the last limit is over."""


@dataclass(frozen=True, slots=True)
class HangLimits:
    """Seconds without any sign of life from which on a suspicion is as urgent as that."""

    early_s: float
    overdue_s: float
    last_s: float

    def passed(self, still_s: float) -> tuple[Urgency, float] | None:
        """The longest that is over; None: that is nothing unusual."""
        over = [(urgency, limit_s) for urgency, limit_s in self._rising if still_s >= limit_s]
        return over[-1] if over else None

    def next_s(self, still_s: float) -> float:
        """The next of them; infinity beyond the last."""
        return min((limit_s for _, limit_s in self._rising if limit_s > still_s), default=math.inf)

    @property
    def _rising(self) -> tuple[tuple[Urgency, float], ...]:
        return (Urgency.EARLY, self.early_s), (Urgency.OVERDUE, self.overdue_s), (Urgency.LAST, self.last_s)


UNKNOWN = HangLimits(30.0 - LOOK_EVERY_S - LOOK_S, 300.0 - LOOK_EVERY_S - LOOK_S, 1800.0)
"""Of workers that report no steps, or too few so far, and of those that save or evaluate. A rank is named within 30 s,
and ended within 5 min: the last sign of life may be as old as the pause between two looks, and then the workers are
looked at. That is late: it may wait for a service, or load, or compile."""
LEAST_S = 300.0
"""A limit of the user's own, until workers report steps."""
STEPS = HangLimits(5.0, 30.0, 600.0)
"""Of workers that report steps: the least, where steps are short. A look is begun so early that it is over by then."""
TIMES = HangLimits(3.0, 5.0, 5.0)
"""Else so many of the usual steps."""
ENOUGH = 10
"""Steps from which on it is known how long they take."""


class Durations:
    """How long the newest steps took. Of a job, over all generations."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=512)
        self._usual_s: float | None = None

    def add(self, seconds: float) -> None:
        self._newest.append(seconds)
        self._usual_s = None

    @property
    def usual_s(self) -> float | None:
        """Only one in a hundred takes longer; None: not known yet."""
        if self._usual_s is None and len(self._newest) >= ENOUGH:
            self._usual_s = sorted(self._newest)[math.ceil(0.99 * len(self._newest)) - 1]
        return self._usual_s


@dataclass(frozen=True, slots=True)
class Stall:
    """What is unusual now."""

    urgency: Urgency
    local_rank: int
    """The likeliest of this node to be stuck by itself."""
    reports_steps: bool
    why: str


@dataclass(slots=True)
class HangDetector:
    """Of one generation on this node."""

    timeout: HangTimeout
    learned: Durations
    began_at: float
    steps: dict[int, int] = field(default_factory=dict)
    """The newest step of each worker that has finished one, by local rank."""
    alive_at: float = 0.0
    """The newest report of a worker."""
    saving: Collection[int] = ()
    """Local ranks that are in a save now."""
    polled_at: float = 0.0
    _stepped_at: dict[int, float] = field(default_factory=dict)
    _aside: set[int] = field(default_factory=set)
    """Who has saved or evaluated since its newest step: how long that took teaches nothing."""
    _trackers: dict[int, ActivityTracker] = field(default_factory=dict)
    _asked_until: float = 0.0
    """Until then the workers do what they were asked for."""
    _looked_at: float = 0.0

    # ---------------------------------------------------------------- what is seen

    def stepped(self, local_rank: int, step: int, at: float) -> None:
        before, before_at = self.steps.get(local_rank, step), self._stepped_at.get(local_rank, at)
        if step > before and at > before_at and local_rank not in self._aside:
            self.learned.add((at - before_at) / (step - before))
        self._aside.discard(local_rank)
        self.steps[local_rank], self._stepped_at[local_rank] = step, at
        self.reported(at)

    def reported(self, at: float) -> None:
        """A worker has reported something: a save, a load."""
        self.alive_at = max(self.alive_at, at)

    def marked(self, saving: Collection[int], polled_at: float | None) -> None:
        """Who is in a save, and when one of them last asked for news between two steps."""
        self.saving = saving
        if saving:
            self._aside = set(self.steps)
        if polled_at is not None and polled_at > self.polled_at:
            self.polled_at = polled_at
            self._aside = set(self.steps)
            self.reported(polled_at)

    def asked(self, at: float) -> None:
        """The workers are asked for their stacks: what they do for that is no sign of life."""
        self._asked_until = at + 2 * LOOK_S

    def sampled(self, at: float, seen: Mapping[int, ActivitySample]) -> None:
        """What the workers have used until `at`, by local rank."""
        asked, self._looked_at = self._looked_at < self._asked_until, at
        for local_rank, sample in seen.items():
            self._trackers.setdefault(local_rank, ActivityTracker(self.began_at)).look(
                at, sample, asked=asked
            )

    def still_s(self, local_rank: int, now: float) -> float | None:
        """For how long nothing of this worker has moved; None: not known."""
        tracker = self._trackers.get(local_rank)
        seen_at = [self._stepped_at[local_rank]] if local_rank in self._stepped_at else []
        if tracker is not None:
            seen_at.append(tracker.worked_at)
        return max(0.0, now - max(seen_at)) if seen_at else None

    # ---------------------------------------------------------------- what it means

    def stall(self, running: Collection[int], now: float) -> Stall | None:
        """Of the workers with these local ranks."""
        if self.timeout is None or not running:
            return None
        local_rank, since = self._since(running)
        passed = self._limits().passed(now - since)
        if passed is None:
            return None
        urgency, limit_s = passed
        nothing = "no step or checkpoint reported" if self.steps else "no output, processor time or bytes"
        return Stall(urgency, local_rank, bool(self.steps), f"{nothing} for {limit_s:.3g} s (--hang-timeout)")

    def due_at(self, running: Collection[int], now: float) -> float | None:
        """When `stall` may say something else without any sign; None: never."""
        if self.timeout is None or not running:
            return None
        _, since = self._since(running)
        at = since + self._limits().next_s(now - since)
        return at if at < math.inf else None

    def stalled_s(self, running: Collection[int], now: float) -> float:
        return max(0.0, now - self._since(running)[1]) if running else 0.0

    def limit_s(self) -> float | None:
        """The one in force now from which on a suspicion counts in full; None: there is none."""
        return self._limits().overdue_s if self.timeout == "auto" else self.timeout

    def state(self, stall: Stall | None) -> str:
        """For people."""
        if self.timeout is None:
            return "off"
        return "suspecting" if stall is not None else "watching"

    def _since(self, running: Collection[int]) -> tuple[int, float]:
        """Who is still, and since when. Where they report steps it is the one that is behind the others: the likeliest
        of this node to be stuck by itself."""
        if self.steps:
            left = [one for one in running if one in self.steps] or self.steps
            return min(left, key=lambda local_rank: (self.steps[local_rank], local_rank)), self.alive_at
        since = {one: self._trackers[one].active_at for one in running if one in self._trackers}
        if not since:
            return min(running), math.inf
        stillest = min(since, key=lambda one: (since[one], one))
        return stillest, max(since[stillest], self.alive_at)

    def _limits(self) -> HangLimits:
        if isinstance(self.timeout, float):
            limit_s = self.timeout if self.steps else max(self.timeout, LEAST_S)
            return HangLimits(limit_s, limit_s, limit_s)
        usual_s = self.learned.usual_s
        aside = self.saving or self.polled_at > max(self._stepped_at.values(), default=0.0)
        if not self.steps or usual_s is None or aside:
            return UNKNOWN
        return HangLimits(
            max(STEPS.early_s, TIMES.early_s * usual_s) - LOOK_S,
            max(STEPS.overdue_s, TIMES.overdue_s * usual_s),
            max(STEPS.last_s, TIMES.last_s * usual_s),
        )


def ends_alone(
    stall: Stall,
    timeout: HangTimeout,
    inquiry: HangProbe | None,
    since: float,
    now: float,
    *,
    all_still: bool,
) -> bool:
    """A node without a verdict ends its workers by itself. `since`: when the last limit was over; `inquiry`: the newest
    that it knows of; `all_still`: none of its workers uses anything."""
    if stall.urgency is not Urgency.LAST:
        return False
    if isinstance(timeout, float) and stall.reports_steps:
        return now >= since + VERDICT_S
    if inquiry is not None and inquiry.urgency is Urgency.LAST and inquiry.finding is HangFinding.HEALTHY:
        return False  # a rank elsewhere is at work
    return all_still and now >= since + ALONE_S


# --- Signs of life, read in a thread


class ActivityReader:
    """`look` and `seen` are for the main thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: tuple[int, float, Mapping[int, ActivitySample]] | None = None
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = Thread(self._serve, "hang-activity")
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

    def seen(self) -> tuple[int, float, Mapping[int, ActivitySample]] | None:
        """What a look has shown since the last call: generation, instant, and what its workers had used then, by local
        rank. It waits here until the main loop turns, which it does not wake."""
        seen, self._seen = self._seen, None
        return seen

    def look(
        self, generation: int, pids: Mapping[int, int], printed: Mapping[int, int], *, threads: bool
    ) -> None:
        """While a look does not come to its end no other begins. `pids` and `printed` are of the workers of this
        generation, by local rank.

        `threads`: whether any thread of their families is active, which two such looks in a row show.
        """
        if self._orders.empty():
            self._orders.put(partial(self._look, generation, pids, printed, threads))

    # Everything below runs in the thread.

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            order()

    def _look(
        self, generation: int, pids: Mapping[int, int], printed: Mapping[int, int], threads: bool
    ) -> None:
        self._search(tuple(pids.values()))
        used = {
            local_rank: self._sample(pid, printed.get(local_rank, 0), threads=threads)
            for local_rank, pid in pids.items()
        }
        self._seen = generation, self._clock(), used

    def _search(self, workers: tuple[int, ...]) -> None:
        now = self._clock()
        known = all(pid in self._families for pid in workers)
        if known and now < self._searched_at + SEARCH_EVERY_S:
            return
        self._searched_at = now
        self._families = {worker: _family_of(worker) for worker in workers}

    def _sample(self, worker: int, printed: int, *, threads: bool = False) -> ActivitySample:
        processor_s, moved, wakes = 0.0, 0, 0
        for process in self._families[worker]:
            with suppress(psutil.Error):  # it has ended
                processor_s += sum(process.cpu_times()[:4])  # with that of its children that have ended
                if process.pid == worker:
                    wakes = process.num_ctx_switches().voluntary
                io = process.io_counters()
                moved += io.read_chars + io.write_chars
        threads_active = self._threads_active(worker, self._clock()) if threads else False
        return ActivitySample(processor_s, moved, printed, wakes, threads_active)

    def _threads_active(self, worker: int, now: float) -> bool:
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
