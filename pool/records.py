"""What the daemons of a pool and its commands write for each other, and all of it as the store shows it.

    nodes/NODE      `PoolNode`    by its daemon, under its lease
    jobs/JOB        `Job`         by `submit`, and once more by `cancel`
    results/JOB     `JobResult`   by the coordinator, once, as the job ends
    plan            `Plan`        by the coordinator, by compare-and-set: which nodes run which job

A job without a result that is in the plan runs; one that is not waits, and the store's order of the keys `jobs/` is the
queue. A run of a job is a job of the rendezvous like any other, with the job's id as its --rdzv-id.

Like the records of the rendezvous all are small, frozen and checked as they are read. Instants are seconds of the wall
clock, as the coordinator saw it: they are for people and for pauses, and no promise depends on them.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypeVar

from ..codec import AtMost, Count, Positive, Text, Within
from ..rendezvous.errors import RecordInvalid
from ..rendezvous.records import Endpoint
from ..rendezvous.records import Record as StoredRecord
from ..rendezvous.store.interface import Change, Entry, Snapshot
from ..rendezvous.text import Name, clean, line

log = logging.getLogger(__name__)

SCHEMA = 6
"""Version of all records of a pool. A reader refuses any other."""

PLAN_KEY = "plan"
NODES_PREFIX = "nodes/"
JOBS_PREFIX = "jobs/"
RESULTS_PREFIX = "results/"

MAX_JOB_CHARS = 96 * 1024
"""Of one job: a thousand of them must fit into a store."""
MAX_RECORD_CHARS = 1024 * 1024
MOST_WORDS = 1024
MOST_NODES = 4096
MAX_WORD = 32 * 1024
MAX_REASON = 1024


def short(text: str, most_chars: int = MAX_REASON) -> str:
    """A reason that fits into a record, as all nodes read it.

    >>> short("no such directory", 10)
    'no such...'
    """
    text = clean(text)
    return text if len(text) <= most_chars else f"{text[: most_chars - 3]}..."


Instant = Annotated[float, Within(0, 2**40)]
Word = Annotated[str, Text(MAX_WORD)]
Words = Annotated[tuple[Word, ...], AtMost(MOST_WORDS)]
Reason = Annotated[str, line(MAX_REASON)]


class Record(StoredRecord):
    """Base of what has a key of its own. What is read and what is written is checked in the same way."""

    __slots__ = ()
    schema: ClassVar[int] = SCHEMA
    most_chars: ClassVar[int] = MAX_RECORD_CHARS

    @property
    def key(self) -> str:
        raise NotImplementedError

    def to_json(self) -> str:
        """Raises RecordInvalid for what its readers would refuse."""
        text = super().to_json()
        self.read(self.key, text)
        return text


_R = TypeVar("_R", bound=Record)


class Outcome(enum.Enum):
    """How a job ends, or one node's part of it."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """By the job's own fault: on other nodes it would fail, too."""
    CANCELLED = "cancelled"
    UNABLE = "unable"
    """Its nodes were lost, or could not run it, too often. Of one node: it cannot run it now, or was asked to leave it;
    another one may."""


@dataclass(frozen=True, slots=True)
class Job(Record):
    """A command line and where to run it, as it was submitted."""

    most_chars: ClassVar[int] = MAX_JOB_CHARS
    job: Name
    name: Annotated[str, line(128)]
    """For people; two jobs may have the same one."""
    options: Words
    """Of the agents that run it, as words of a command line: what the pool does not decide."""
    command: Words
    """What to run, as the last words of an agent's command line."""
    environment: dict[Word, Word]
    """Set for the workers, besides the daemon's own."""
    directory: Annotated[str, Text(4096)]
    min_nodes: Annotated[int, Within(1, MOST_NODES)]
    max_nodes: Annotated[int, Within(1, MOST_NODES)]
    """A multiple of `nodes_multiple_of`, as `min_nodes` is."""
    submitted_at: Instant
    submitted_by: Annotated[str, line(256)]
    nodes_multiple_of: Annotated[int, Within(1, MOST_NODES)] = 1
    """Of its nodes only so many train together as are a multiple of it; others would stand by."""
    cancelled_by: Annotated[str, line(256)] = ""
    """The user who wants its end; empty: none does."""

    @property
    def key(self) -> str:
        return JOBS_PREFIX + self.job


@dataclass(frozen=True, slots=True)
class AllocationEnd:
    """The end of one allocation: all processes of the job are gone from this node."""

    job: Name
    allocation_id: Positive
    outcome: Outcome
    code: Annotated[int, Within(-255, 255)]
    """Exit code of the job's agent; below 0: of the signal that ended it."""
    reason: Reason


@dataclass(frozen=True, slots=True)
class PoolNode(Record):
    """What one daemon reports about its node."""

    node: Name
    incarnation: Name
    most_nodes: Annotated[int, Within(1, MOST_NODES)] = MOST_NODES
    """No job may need more; what its operator expects of the pool."""
    running: Count = 0
    """The id of the allocation whose processes are here; 0 when there are none."""
    ended: AllocationEnd | None = None
    """The newest allocation that has ended in this life."""
    leaving: bool = False
    """It takes no allocation any more."""
    problem: Reason = ""
    """Why it must not be given a job now; empty when it may."""
    http: Endpoint | None = None
    """Where its daemon answers; None when other nodes cannot reach that."""
    token: Annotated[str, Text(128)] = field(default="", repr=False)
    """Opens the logs of jobs there, of this life: who may read the store may read them."""

    @property
    def key(self) -> str:
        return NODES_PREFIX + self.node

    @property
    def may_take_jobs(self) -> bool:
        """Now, or when the one that runs there has ended."""
        return not self.leaving and not self.problem

    @property
    def takes_jobs(self) -> bool:
        return self.may_take_jobs and not self.running


@dataclass(frozen=True, slots=True)
class Allocation:
    """One node's place in a run. The id is of this allocation alone, so that a node takes it once."""

    node: Name
    incarnation: Name
    id: Positive
    leaving: bool = False
    """The node is to leave the job; its allocation is kept until it has."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node has ended a job that it was not asked to leave, and that has no outcome."""

    reason: Reason
    until: Instant
    """It is not asked again before."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The newest attempt of a job, and what is known of those before it."""

    job: Name
    attempt: Positive
    started_at: Instant
    allocations: Annotated[tuple[Allocation, ...], AtMost(MOST_NODES)]
    ending: JobResult | None = None
    """The outcome is known, since its `ended_at`, and the nodes are about to end."""
    left: Annotated[tuple[Name, ...], AtMost(MOST_NODES)] = ()
    """Nodes that had an allocation and have none any more."""
    in_vain: Count = 0
    """Attempts that have ended, the newest in a row, that were short and did not end by plan."""
    refusals: dict[Name, Refusal] = field(default_factory=dict)
    """By node."""

    @property
    def staying(self) -> tuple[Allocation, ...]:
        return tuple(allocation for allocation in self.allocations if not allocation.leaving)

    @property
    def is_over(self) -> bool:
        """Without an outcome: the job waits for nodes again."""
        return not self.allocations and self.ending is None


@dataclass(frozen=True, slots=True)
class Plan(Record):
    """Which nodes run which job: nothing runs that is not in here."""

    allocation_ids: Count = 0
    """How many have been given."""
    attempts: Annotated[tuple[Attempt, ...], AtMost(MOST_NODES)] = ()
    """The newest of each job that has had nodes; oldest job first."""

    @property
    def key(self) -> str:
        return PLAN_KEY

    @property
    def runs(self) -> tuple[Attempt, ...]:
        """Those that have nodes, or are about to end."""
        return tuple(run for run in self.attempts if not run.is_over)

    def run_of(self, job: str) -> Attempt | None:
        return next((run for run in self.runs if run.job == job), None)

    def refusals_of(self, job: str) -> Mapping[str, Refusal]:
        return next((run.refusals for run in self.attempts if run.job == job), {})

    def allocation_of(self, node: str, incarnation: str) -> tuple[Attempt, Allocation] | None:
        """A node has one allocation at most."""
        for run in self.runs:
            for allocation in run.allocations:
                if (allocation.node, allocation.incarnation) == (node, incarnation):
                    return run, allocation
        return None


@dataclass(frozen=True, slots=True)
class JobResult(Record):
    """How a job has ended. It stays when the job's processes and nodes are long gone."""

    job: Name
    outcome: Outcome
    reason: Reason
    code: Annotated[int, Within(-255, 255)]
    """Exit code of the agent that has decided it; for people and for `wait`."""
    attempts: Count
    started_at: Instant | None
    """Of the newest attempt; None when it never ran."""
    ended_at: Instant
    nodes: Annotated[tuple[Name, ...], AtMost(MOST_NODES)]
    """That had a part in the newest attempt."""

    @property
    def key(self) -> str:
        return RESULTS_PREFIX + self.job


RECORDS: Mapping[str, type[Record]] = {
    NODES_PREFIX: PoolNode,
    JOBS_PREFIX: Job,
    RESULTS_PREFIX: JobResult,
}

SCOPES = (PLAN_KEY, *RECORDS)
"""All that a pool has in its store. The runs of its jobs have keys of their own beside them."""


@dataclass(frozen=True, slots=True)
class Pool:
    """What the coordinator knows."""

    nodes: tuple[PoolNode, ...]
    """Live ones, oldest record first."""
    jobs: tuple[Job, ...]
    """Those without a result, first come first."""
    plan: Plan = field(default_factory=Plan)
    results: tuple[str, ...] = ()
    """The jobs that have ended, oldest first."""
    lost: frozenset[str] = frozenset()
    """Incarnations of allocations whose nodes have been missing for long enough."""


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
        self._records: dict[str, tuple[Entry, Record]] = {}

    def read(self, snapshot: Snapshot) -> None:
        """Takes the place of all that was known. Raises RecordInvalid for a plan that cannot be read."""
        self.plan, self.plan_revision = Plan(), 0
        self._records.clear()
        for entry in snapshot.entries:
            self._see(entry.key, entry)

    def changed(self, changes: Iterable[Change]) -> None:
        """In the order of their revisions. Raises RecordInvalid for a plan that cannot be read."""
        for change in changes:
            self._see(change.key, change.entry)

    def _see(self, key: str, entry: Entry | None) -> None:
        if key == PLAN_KEY:
            self.plan = Plan.read(key, entry.value) if entry is not None else Plan()
            self.plan_revision = entry.mod_revision if entry is not None else 0
            return
        prefix = next((prefix for prefix in RECORDS if key.startswith(prefix)), None)
        if prefix is None:
            return
        self._records.pop(key, None)
        if entry is None:
            return
        try:
            record = RECORDS[prefix].read(key, entry.value)
            if record.key != key:
                raise RecordInvalid(key, f"it is the record of {record.key!r}")
            self._records[key] = entry, record
        except RecordInvalid as error:
            log.warning("ignoring what is no record of this pool: %s", error)

    def entry(self, key: str) -> Entry | None:
        known = self._records.get(key)
        return known[0] if known is not None else None

    @property
    def nodes(self) -> tuple[PoolNode, ...]:
        """Live ones, oldest record first."""
        return self._all(PoolNode)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Also those that have ended; first come first."""
        return self._all(Job)

    @property
    def results(self) -> tuple[JobResult, ...]:
        """Oldest first."""
        return self._all(JobResult)

    def result_of(self, job: str) -> JobResult | None:
        known = self._records.get(RESULTS_PREFIX + job)
        return known[1] if known is not None and isinstance(known[1], JobResult) else None

    def counts(self) -> PoolCounts:
        taken = {one.incarnation for run in self.plan.runs for one in run.allocations}
        known = {result.job for result in self.results} | {run.job for run in self.plan.runs}
        nodes = self.nodes
        return PoolCounts(
            nodes=len(nodes),
            idle_nodes=sum(node.takes_jobs and node.incarnation not in taken for node in nodes),
            queued_jobs=sum(job.job not in known for job in self.jobs),
            running_jobs=len(self.plan.runs),
        )

    def pool(self, lost: frozenset[str] = frozenset()) -> Pool:
        """What the coordinator decides from."""
        results = self.results
        ended = {result.job for result in results}
        return Pool(
            nodes=self.nodes,
            jobs=tuple(job for job in self.jobs if job.job not in ended),
            plan=self.plan,
            results=tuple(result.job for result in results),
            lost=lost,
        )

    def _all(self, kind: type[_R]) -> tuple[_R, ...]:
        """In the order in which they came."""
        found = [
            (entry.create_revision, record)
            for entry, record in self._records.values()
            if isinstance(record, kind)
        ]
        return tuple(record for _, record in sorted(found, key=lambda one: one[0]))
