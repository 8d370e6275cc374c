"""Where only an agent's spares matter: what stands in its place, adopts them, and hears what they say."""

from __future__ import annotations

import ctypes
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from elastic_agent.agent.common.events import Event
from elastic_agent.agent.workers.processes.guard import PR_SET_CHILD_SUBREAPER, adopt_orphans
from elastic_agent.agent.workers.processes.spare_wire import BecomeWorker
from elastic_agent.agent.workers.processes.spares import Spare, Spares

from .io_threads import started_io

PATIENCE_S = 60.0
"""Importing torch takes two seconds, and many more on a busy machine."""


@contextmanager
def adopting() -> Iterator[None]:
    """This process is to its orphans what an agent is."""
    assert adopt_orphans() == ""
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class SpareKeeper:
    """What is left of one when only its spares matter."""

    def __init__(
        self,
        *names: str,
        **environment: str,
    ) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.late_s = 0.0
        self.spares = Spares(
            {**os.environ, **environment},
            names,
            started_io(),
            self.events.put,
            self.clock,
        )

    def clock(self) -> float:
        return time.monotonic() + self.late_s

    def start(self) -> SpareKeeper:
        self.spares.start()
        return self

    def run_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            self.spares.turn(self.clock())
            try:
                event = self.events.get(timeout=0.01)
            except queue.Empty:
                continue
            assert callable(event)
            event()

    def run_until_prepared(self, count: int = 2) -> None:
        self.run_until(lambda: self.spares.prepared(count))

    @property
    def preloaded(self) -> int:
        """The number of the fork server."""
        [pid, *_] = self.spares.sessions
        return pid

    def hand_out(self, message: BecomeWorker, descriptors: Sequence[int]) -> Spare:
        spare = self.spares.hand_out(message, descriptors)
        assert spare is not None, self.spares.why_cold
        return spare
