"""The agent's end of its workers' pages: made before a generation starts, read as the main loop turns.

Reading costs some loads from memory and nothing on the worker's side: there is no event for a step. Pages outlive
their workers, so that what one did last is there when it has exited.

`PaceWatch` reports how fast this node's ranks work: their own times for a step, every `OFTEN_S`. In a job of many nodes
that is rarer, so that the coordinator gets at most `REPORTS_PER_S` reports from all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...health.stragglers import Paces
from ...worker.wire.shared_progress import (
    ALL_SIGNALLED,
    LEAVES_SIGTERM,
    PENDING,
    SCRIPT_AT,
    Reading,
    SharedProgress,
)


class WorkerPages:
    """Those of one generation's workers on this node, by local rank. For the main thread."""

    def __init__(self, generation: int, *, all_signalled: bool = False) -> None:
        """`all_signalled`: workers get the signals of the agent's scheduler, too."""
        self._generation = generation
        self._all_signalled = all_signalled
        self.by_rank: dict[int, SharedProgress] = {}
        """By local rank."""

    def make(self, local_rank: int) -> str:
        """The page of a worker that is to be started; returns its path, for `WorkerEnv.page`. Raises OSError."""
        page = self.by_rank[local_rank] = SharedProgress.make(self._generation)
        page.words[ALL_SIGNALLED] = self._all_signalled
        return page.path

    def process_made(self, local_rank: int, at: float) -> None:
        """At `at` this worker's process began. When its script begins is not known."""
        self.by_rank[local_rank].words[SCRIPT_AT] = round(at * 1e9)

    def read(self) -> dict[int, Reading]:
        return {local_rank: page.read() for local_rank, page in self.by_rank.items()}

    def newest_step(self) -> int | None:
        """That any of them has finished, and None before the first."""
        return max(
            (reading.step for reading in self.read().values() if reading.step is not None), default=None
        )

    def leave_sigterm(self) -> frozenset[int]:
        """The local ranks of those that a SIGTERM does not end, and only because they leave it to the agent."""
        return frozenset(rank for rank, page in self.by_rank.items() if page.words[LEAVES_SIGTERM])

    def raise_flags(self) -> None:
        """A planned change waits for these workers."""
        for page in self.by_rank.values():
            page.words[PENDING] = 1

    def close(self) -> None:
        """The generation is over."""
        for page in self.by_rank.values():
            page.close()
        self.by_rank.clear()


REPORTS_PER_S = 20
OFTEN_S = 5.0
"""Each report is a write to the store, of which all nodes hear."""
WARM_UP = 3
"""The first steps of a generation, which load, compile and tune, are ignored."""
CUT_AT = 2.0
"""In medians of the steps of one look: a longer step, such as one with a checkpoint, counts as this long."""


class PaceWatch:
    """The reports of one generation. For the main thread, which no report wakes; `now` is monotonic."""

    def __init__(self, pages: WorkerPages, generation: int, members: int) -> None:
        self._pages = pages
        self._generation = generation
        self._often_s = max(OFTEN_S, members / REPORTS_PER_S)
        self._due_at = -math.inf
        """When to look next; once that is past, the next turn after a step looks."""
        self._read: dict[int, int] = {}
        """By local rank: how many steps were timed at the newest look."""
        self._looked: tuple[int, float] | None = None
        """The number of timed steps of the first rank at the newest look, and the instant of its newest step."""

    def turn(self, now: float) -> Paces | None:
        """The report that is due now, if any."""
        if now < self._due_at:
            return None
        times = {
            rank: page.own_times(self._read.get(rank, WARM_UP)) for rank, page in self._pages.by_rank.items()
        }
        if not times or not all(own for _, own in times.values()):
            return None
        self._due_at = now + self._often_s
        self._read = {rank: count for rank, (count, _) in times.items()}
        before, self._looked = self._looked, self._newest()
        if before is None or self._looked is None or self._looked[0] <= before[0]:
            return None
        step_s = (self._looked[1] - before[1]) / (self._looked[0] - before[0])
        return Paces(
            self._generation,
            timed=min(self._read.values()),
            step_us=max(0, round(step_s * 1e6)),
            own_us=tuple(pace_us(own) for _, (_, own) in sorted(times.items())),
        )

    def _newest(self) -> tuple[int, float] | None:
        first = min(self._read)
        stepped_at = self._pages.by_rank[first].read().stepped_at
        return (self._read[first], stepped_at) if stepped_at is not None else None


def pace_us(own_ns: Sequence[int]) -> int:
    """The mean time of a step, in which no step counts for more than `CUT_AT` medians.

    >>> pace_us([1_000_000] * 9 + [50_000_000])
    1100
    """
    most = CUT_AT * sorted(own_ns)[(len(own_ns) - 1) // 2]
    return round(sum(min(own, most) for own in own_ns) / len(own_ns) / 1000)
