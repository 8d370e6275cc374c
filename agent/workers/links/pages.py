"""The agent's end of its workers' pages: made before a generation starts, read as the main loop turns.

Reading costs some loads from memory and nothing on the worker's side: there is no event for a step. Pages outlive their
workers, so that what one did last is there when it has exited.
"""

from __future__ import annotations

from ....worker.wire.shared_progress import (
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
