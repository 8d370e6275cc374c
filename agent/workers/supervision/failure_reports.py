"""From a worker's crash to the report of it: what waits for its last lines, and what all nodes show of it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ....rendezvous.records import Failure
from ..failures.causes import Cause, CauseTable
from ..failures.summary import summarize
from ..failures.worker_failure import FailureInvalid, WorkerFailure, fingerprint

log = logging.getLogger(__name__)

TAIL_WITHIN_S = 0.5
"""A failure whose worker's last lines have not been read and written after so long is reported without the rest."""


@dataclass(frozen=True, slots=True)
class Crash:
    """A worker that has failed. It is examined when its last lines have been read, or when that takes too long."""

    local_rank: int
    returncode: int
    at: float
    due_at: float
    asked: bool = False
    """It was asked to end, so it has not failed; but it may have begun to before."""


@dataclass(slots=True)
class Crashes:
    """The crashes of one generation that are not examined yet, the first first."""

    _waiting: deque[Crash] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def due_at(self) -> float | None:
        return self._waiting[0].due_at if self._waiting else None

    def add(self, crash: Crash) -> None:
        self._waiting.append(crash)

    def ready(self, local_rank: int) -> Iterator[Crash]:
        """The lines of this worker are here, and so are those of all that crashed before it."""
        while any(crash.local_rank == local_rank for crash in self._waiting):
            yield self._waiting.popleft()

    def overdue(self, now: float) -> Iterator[Crash]:
        while self._waiting and now >= self._waiting[0].due_at:
            yield self._waiting.popleft()


def report_of(failure: WorkerFailure, cause: Cause, known_as: str = "") -> Failure:
    """For the other nodes. `known_as` is the fingerprint of a failure that the agent has made of a hang."""
    return Failure(
        failure.generation,
        known_as or fingerprint(failure),
        failure.summary,
        failure.to_json(),
        failure.cause,
        cause.action,
        cause.collateral,
        cause.outside,
    )


def show(
    failure: Failure, own: Sequence[WorkerFailure], causes: CauseTable, evidence: Path | None = None
) -> WorkerFailure | None:
    """The block for a tired person. Returns the worker that is to blame, if one is.

    `own`: the failures on this node in the same generation. Any agent may have written `failure.detail`.
    `evidence`: the folder of what this node has kept of that generation.
    """
    try:
        first = WorkerFailure.from_json(failure.detail) if failure.detail else None
    except FailureInvalid as error:
        log.warning("the failure's details in the store are not usable: %s", error)
        first = None
    if first is None:
        kept = f"; evidence: {evidence}" if evidence is not None else ""
        log.error("generation %d failed: %s%s", failure.generation, failure.summary, kept)
        return None
    here = next((mine for mine in own if mine.rank == first.rank), None)
    others = [mine for mine in own if mine.rank != first.rank]
    log.error("%s", summarize(here or first, others, causes.named(first.cause).hint, evidence))
    return here or first
