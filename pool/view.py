"""What a store holds of a pool, read once and kept up to date by a watch: for daemons, and for commands that look."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ..rendezvous.errors import RecordInvalid
from ..rendezvous.store.interface import Change, Entry, Snapshot
from .records import (
    CANCELS_PREFIX,
    JOBS_PREFIX,
    NODES_PREFIX,
    PLAN_KEY,
    RECORDS,
    RESULTS_PREFIX,
    Cancel,
    Job,
    JobResult,
    Plan,
    PoolNode,
    Record,
)
from .schedule import Pool, what_is_missing, why_waiting

log = logging.getLogger(__name__)

SCOPES = (PLAN_KEY, *RECORDS)
"""All that a pool has in its store. The runs of its jobs have keys of their own beside them."""

_R = TypeVar("_R", bound=Record)


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """How many of each there are."""

    nodes: int = 0
    idle_nodes: int = 0
    """Without a job, and ready for one."""
    queued_jobs: int = 0
    running_jobs: int = 0


class PoolView:
    """The pool as the store showed it. A value that cannot be read is ignored with a warning, but for the plan."""

    def __init__(self) -> None:
        self.plan = Plan()
        self.plan_revision = 0
        """0: there is none yet."""
        self.version = 0
        """Another number whenever something has changed."""
        self._records: dict[str, tuple[Entry, Record]] = {}

    def read(self, snapshot: Snapshot) -> None:
        """Takes the place of all that was known. Raises RecordInvalid for a plan that cannot be read."""
        self.plan, self.plan_revision = Plan(), 0
        self.version += 1
        self._records.clear()
        for entry in snapshot.entries:
            self._see(entry.key, entry)

    def changed(self, changes: Iterable[Change]) -> None:
        """In the order of their revisions. Raises RecordInvalid for a plan that cannot be read."""
        for change in changes:
            self._see(change.key, change.entry)

    def _see(self, key: str, entry: Entry | None) -> None:
        self.version += 1
        if key == PLAN_KEY:
            self.plan = Plan.from_json(key, entry.value) if entry is not None else Plan()
            self.plan_revision = entry.mod_revision if entry is not None else 0
            return
        prefix = next((prefix for prefix in RECORDS if key.startswith(prefix)), None)
        if prefix is None:
            return
        self._records.pop(key, None)
        if entry is None:
            return
        try:
            self._records[key] = entry, RECORDS[prefix].from_json(key, entry.value)
        except RecordInvalid as error:
            log.warning("ignoring what is no record of this pool: %s", error)

    def entry(self, key: str) -> Entry | None:
        known = self._records.get(key)
        return known[0] if known is not None else None

    def oldest(self, prefix: str) -> str | None:
        """The key that has been there for longest."""
        keys = [
            (entry.create_revision, key)
            for key, (entry, record) in self._records.items()
            if key.startswith(prefix) and record.key == key
        ]
        return min(keys)[1] if keys else None

    @property
    def nodes(self) -> tuple[PoolNode, ...]:
        """Live ones, oldest record first."""
        return self._all(NODES_PREFIX, PoolNode)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Also those that have ended; first come first."""
        return self._all(JOBS_PREFIX, Job)

    @property
    def results(self) -> tuple[JobResult, ...]:
        """Oldest first."""
        return self._all(RESULTS_PREFIX, JobResult)

    def result_of(self, job: str) -> JobResult | None:
        return next((result for result in self.results if result.job == job), None)

    def counts(self) -> PoolCounts:
        seated = {seat.incarnation for run in self.plan.runs for seat in run.seats}
        known = {result.job for result in self.results} | {run.job for run in self.plan.runs}
        nodes = self.nodes
        return PoolCounts(
            nodes=len(nodes),
            idle_nodes=sum(node.takes_jobs and node.incarnation not in seated for node in nodes),
            queued_jobs=sum(job.job not in known for job in self.jobs),
            running_jobs=len(self.plan.runs),
        )

    def pool(self, lost: frozenset[str] = frozenset()) -> Pool:
        """What the coordinator decides from."""
        results = self.results
        ended = {result.job for result in results}
        cancels = {
            key.removeprefix(CANCELS_PREFIX): record.cancelled_by
            for key, (_, record) in self._records.items()
            if isinstance(record, Cancel)
        }
        return Pool(
            nodes=self.nodes,
            jobs=tuple(job for job in self.jobs if job.job not in ended),
            plan=self.plan,
            cancelled=cancels,
            results=tuple(result.job for result in results),
            lost=lost,
        )

    def _all(self, prefix: str, kind: type[_R]) -> tuple[_R, ...]:
        """Of those whose key says the same as their content."""
        found = [
            (entry.create_revision, record)
            for key, (entry, record) in self._records.items()
            if key.startswith(prefix) and isinstance(record, kind) and record.key == key
        ]
        return tuple(record for _, record in sorted(found, key=lambda one: one[0]))


@dataclass(frozen=True, slots=True)
class JobState:
    """One job as people see it."""

    job: str
    name: str
    state: str
    """waiting, running, ending, or its outcome."""
    detail: str
    nodes: tuple[str, ...]
    submitted_at: float
    submitted_by: str
    code: int | None = None
    """Exit code of the agent that has decided how it ended."""
    started_at: float | None = None
    """Of the newest attempt."""
    ended_at: float | None = None
    logs: tuple[str, ...] = ()
    """NODE:PATH of what its agents print."""


def states(view: PoolView, now: float) -> Iterator[JobState]:
    results = {result.job: result for result in view.results}
    pool, live = view.pool(), {node.node: node for node in view.nodes}
    for job in view.jobs:
        code = started_at = ended_at = None
        logs: dict[str, str] = {}
        run, result = view.plan.run_of(job.job), results.get(job.job)
        if result is not None:
            state, detail, nodes = result.outcome.value, result.reason, result.nodes
            code, started_at, ended_at, logs = result.code, result.started_at, result.ended_at, result.logs
        elif run is not None:
            state = "running" if run.ending is None else "ending"
            told = filter(None, (f"attempt {run.attempt}", what_is_missing(pool, job, run)))
            detail = "; ".join(told) if run.ending is None else run.ending.reason
            nodes, started_at = tuple(seat.node for seat in run.seats), run.started_at
            logs = {name: live[name].log_of(job.job) for name in nodes if name in live}
        else:
            state, detail, nodes = "waiting", why_waiting(pool, job, now), ()
        places = tuple(f"{node}:{path}" for node, path in logs.items())
        yield JobState(
            job=job.job,
            name=job.name,
            state=state,
            detail=detail,
            nodes=nodes,
            submitted_at=job.submitted_at,
            submitted_by=job.submitted_by,
            code=code,
            started_at=started_at,
            ended_at=ended_at,
            logs=places,
        )
