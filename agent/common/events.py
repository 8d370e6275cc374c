"""What other threads have the main loop do: calls on one queue, made one after the other, in the order of the posts.

A thread *posts* a method with its arguments, and forgets it. Two things may come before there is a main loop, and are
records: a signal, and the failure of a thread. Who runs the queue decides what follows from them.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from .exits import ExitCode


@dataclass(frozen=True, slots=True)
class Signalled:
    number: int


@dataclass(frozen=True, slots=True)
class ThreadFailed:
    """A thread of this process has ended as it should not, or could not be started."""

    name: str
    problem: str
    code: ExitCode = ExitCode.AGENT_FAILED

    @property
    def reason(self) -> str:
        """Of this process' end, and what to do about it."""
        report = "; report it with the traceback above" if self.code is ExitCode.AGENT_FAILED else ""
        return f"the thread {self.name} has failed: {self.problem}{report}"


Event: TypeAlias = Callable[[], object] | Signalled | ThreadFailed


def run_next(events: queue.SimpleQueue[Any], timeout_s: float, otherwise: Callable[[Any], object]) -> None:
    """Make the next call, if one comes within that time, and all that wait behind it; `otherwise` gets the records."""
    try:
        event = events.get(timeout=timeout_s)
        while True:
            if callable(event):
                event()
            else:
                otherwise(event)
            event = events.get_nowait()
    except queue.Empty:
        pass
