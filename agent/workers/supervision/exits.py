"""What the end of a worker means: a pure function of its return code and of what was asked of it."""

from __future__ import annotations

import enum
import signal

from ....worker.steps.drain import DRAINED
from ..failures.worker_failure import HANG_SIGNAL

LEAVING = (DRAINED, 0, -signal.SIGTERM, 128 + signal.SIGTERM)
"""How a worker ends after its last step in a planned change: as `Drained` does, or as a script does that has kept its
state by itself."""

AS_ASKED = (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGKILL, DRAINED)
"""How a worker ends that was asked to: by the signal, by a handler or shell in its place, when its grace is over, or
because a planned change was under way."""


class Exit(enum.Enum):
    ENDED = enum.auto()
    """With success."""
    DRAINED = enum.auto()
    """After the last step of a planned change."""
    DOUBTFUL = enum.auto()
    """It crashed in a planned change: a failure, unless it waited in a step for ranks that had ended already."""
    AS_ASKED = enum.auto()
    """Because its generation is stopped."""
    HUNG = enum.auto()
    """By the signal that the agent sends to workers that do not move."""
    FAILED = enum.auto()


def classify_exit(
    returncode: int, *, stopping: bool, hung: bool, draining: bool, finished: bool, kept: bool
) -> Exit:
    """`stopping`: its generation is asked to end; `hung`: because it did not move. In a planned change (`draining`)
    this worker has `finished` its last step, and has `kept` the state after it."""
    if stopping:
        if hung and returncode == -HANG_SIGNAL:
            return Exit.HUNG
        if returncode in AS_ASKED:
            return Exit.AS_ASKED
    elif kept or (finished and returncode in LEAVING):
        return Exit.DRAINED
    if returncode == 0:
        return Exit.ENDED
    return Exit.DOUBTFUL if draining and not finished and not stopping else Exit.FAILED
