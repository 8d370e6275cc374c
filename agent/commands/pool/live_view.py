"""A pool as its store shows it from moment to moment, for commands that follow a job until its end."""

from __future__ import annotations

import time
from collections.abc import Callable

from ....pool.records import Job, JobResult, Outcome
from ....pool.schedule import why_waiting
from ....pool.view import SCOPES, PoolView
from ....rendezvous.errors import Compacted, StoreError, StoreRefused, StoreUnavailable
from ....rendezvous.store.interface import Store, Watch
from ...common.exits import PoolCode
from .jobs import JobState, states

OUTAGE_S = 60.0
"""The store may be away for so long before a command that follows a job gives up."""
RETRY_S = 0.5

_CODES = {
    Outcome.SUCCEEDED: PoolCode.DONE,
    Outcome.CANCELLED: PoolCode.CANCELLED,
    Outcome.TIMED_OUT: PoolCode.UNABLE,
    Outcome.UNABLE: PoolCode.UNABLE,
}
"""Of a job that has not failed by its own fault."""


class LiveView:
    """Owned by one thread. A store that is away for a while costs news, and nothing else."""

    def __init__(self, store: Store, view: PoolView, clock: Callable[[], float] = time.monotonic) -> None:
        """`view` is what has been read already."""
        self.store, self.view = store, view
        self._clock = clock
        self._watch: Watch | None = None
        self._away_since: float | None = None

    def wait(self, timeout_s: float) -> None:
        """Until something has changed, but no longer. Raises RecordInvalid, and StoreError when the store has been away
        for too long."""
        try:
            if self._watch is None:
                snapshot = self.store.read(SCOPES)
                self.view.read(snapshot)
                self._watch = self.store.watch(SCOPES, snapshot.revision)
            else:
                self.view.changed(self._watch.next(timeout_s))
        except Compacted:
            self.close()
        except StoreRefused:
            raise
        except StoreUnavailable as error:
            self._tolerate(error)
            time.sleep(min(RETRY_S, timeout_s))
        else:
            self._away_since = None

    def _tolerate(self, error: StoreError) -> None:
        now = self._clock()
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since >= OUTAGE_S:
            raise error

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def state(self, job: str) -> JobState | None:
        """None when the pool has forgotten it."""
        return next((one for one in states(self.view, time.time()) if one.job == job), None)

    def waits_for(self, job: Job) -> str:
        """Why it does not run yet; empty when it does, or has ended."""
        waiting = any(one.job == job.job for one in self.view.pool().jobs)
        if not waiting or self.view.plan.run_of(job.job) is not None:
            return ""
        return why_waiting(self.view.pool(), job, time.time())


def code_of(result: JobResult) -> int:
    """The exit code of a command that waits for the job."""
    if result.outcome is Outcome.FAILED:
        return result.code or PoolCode.FAILED
    return _CODES[result.outcome]
