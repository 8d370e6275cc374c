"""Which node runs which job next, given the queue and what all nodes report: the decision of the pool's coordinator.

`decide` is a pure function over frozen data: it reads no clock, no store, no process. Its rules:

- One queue, first come first served. A job starts when its `min_nodes` are idle at once, never with fewer.
- A run takes idle nodes up to its `max_nodes`, while no job of the queue waits for them. It gives those beyond its
  `min_nodes` back, youngest run first, when that lets the next job start. Of a job that trains on multiples of nodes
  it takes only what makes a larger multiple.
- A run that has lost nodes gets others before any younger job does.
- Who cannot be served holds up those after it, so that it does not starve. Only a job that is too large for the pool as
  it is now, were it empty, lets others pass.

The clock of the wall may jump back, or be that of another coordinator: no instant in the future holds anything up for
longer than its pause.

A node keeps its allocation until it says itself that no process of the job is left there, or is lost. So it is in one
job at most, and an allocation that is given back is a planned leave of the engine: it loses no step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..agent.common.exits import ExitCode
from ..rendezvous.records import STOP_KEY, WORLD_KEY
from ..rendezvous.store.interface import Compare, Delete, Put, run_prefix
from ..rendezvous.text import counted, shortened
from .records import (
    JOBS_PREFIX,
    MOST_NODES,
    PLAN_KEY,
    RESULTS_PREFIX,
    Allocation,
    AllocationEnd,
    Attempt,
    Job,
    JobResult,
    Outcome,
    Plan,
    Pool,
    PoolNode,
    Refusal,
    short,
)

MOST_ATTEMPTS = 3
"""In a row, of a job that all its nodes have left without an outcome."""
STEADY_S = 3600.0
"""An attempt that has lasted so long was not in vain."""
END_GRACE_S = 30.0
"""A run whose outcome is known ends by itself; nodes that have not after so long are asked to."""
REFUSAL_S = 30.0
"""A node that could not run a job is not asked again before that."""
MOST_REFUSALS, REFUSAL_CHARS = 500, 200
"""Of all jobs together, the newest of each: a plan must fit into a store, whatever its nodes say."""
MOST_RESULTS = 1000
"""The results of so many jobs are kept."""
REFUSES = {ExitCode.UNLIKE_THE_JOB, ExitCode.MISMATCH, ExitCode.BAD_CONFIG}
"""Of the agent that leaves a job last: no other attempt helps, so the job has failed."""
MOST_AT_ONCE = 15
"""Results written, or deleted, and attempts begun, by one decision: a transaction is bounded."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the coordinator writes: all of it, or nothing."""

    plan: Plan
    results: tuple[JobResult, ...] = ()
    forgotten: tuple[str, ...] = ()
    """Jobs of which nothing is kept any more."""
    begun: tuple[str, ...] = ()
    """Jobs that get their first nodes, or nodes again: the end of one may be news that is not here yet, as a store may
    tell of the plan before it tells of a result that was written with it."""
    plan_revision: int = 0
    """Of the plan that it takes the place of; 0: there is none."""

    @property
    def compares(self) -> tuple[Compare, ...]:
        unwritten = (*(result.key for result in self.results), *(RESULTS_PREFIX + job for job in self.begun))
        return (Compare(PLAN_KEY, self.plan_revision), *(Compare(key, 0) for key in unwritten))

    @property
    def writes(self) -> tuple[Put | Delete, ...]:
        writes: list[Put | Delete] = [Put(PLAN_KEY, self.plan.to_json())]
        for result in self.results:
            writes.append(Put(result.key, result.to_json()))
        for job in self.forgotten:
            left = (run_prefix(job) + key for key in (WORLD_KEY, STOP_KEY))
            writes += [Delete(key) for key in (JOBS_PREFIX + job, RESULTS_PREFIX + job, *left)]
        return tuple(writes)


def decide(pool: Pool, now: float) -> Decision | None:
    """None when all is as it should be. `now` is the wall clock."""
    draft = _Draft(pool, now)
    draft.fold_reports()
    draft.serve_claims()
    draft.hand_out_surplus()
    decision = Decision(draft.plan(), tuple(draft.results), _too_old(pool.results), tuple(draft.begun))
    return decision if decision != Decision(pool.plan) else None


def why_waiting(pool: Pool, job: Job, now: float) -> str:
    """For people: what a job of the queue waits for. It is one of `pool.jobs`."""
    draft = _Draft(pool, now)
    takers, cannot = len(draft.usable(job, draft.takers)), _who_cannot(pool, job)
    if takers < job.min_nodes:
        return f"needs {counted(job.min_nodes, 'node')}; the pool has {takers} that can run it{cannot}"
    ids = [one.job for one in pool.jobs if one.job == job.job or pool.plan.run_of(one.job) is None]
    if before := ids.index(job.job):
        return f"behind {counted(before, 'other job')} of the queue{cannot}"
    return f"needs {counted(job.min_nodes, 'node')}; {len(draft.usable(job, draft.idle))} idle{cannot}"


def _who_cannot(pool: Pool, job: Job) -> str:
    refusals = pool.plan.refusals_of(job.job)
    unfit = ((node.node, node.problem) for node in pool.nodes if node.problem)
    reasons = [*((name, one.reason) for name, one in refusals.items()), *unfit]
    return f" ({shortened((f'{name}: {reason}' for name, reason in reasons), '; ')})" if reasons else ""


class _Draft:
    """The plan while it is being changed."""

    def __init__(self, pool: Pool, now: float) -> None:
        self._pool, self._now = pool, now
        self._jobs = {job.job: job for job in pool.jobs}
        self._places = {job.job: place for place, job in enumerate(pool.jobs)}
        self._live = {node.incarnation: node for node in pool.nodes}
        self.takers = [node for node in pool.nodes if node.may_take_jobs]
        self._names = {node.node for node in pool.nodes}
        self._ends = {
            node.ended.job: (node.node, node.ended)
            for node in reversed(pool.nodes)
            if node.ended is not None and node.ended.outcome is not Outcome.UNABLE
        }
        self._runs = {run.job: run for run in pool.plan.attempts}
        # A store that was restored from a snapshot has forgotten ids that nodes have taken since.
        known = (node.ended.allocation_id for node in pool.nodes if node.ended)
        self._allocation_ids = max(pool.plan.allocation_ids, *known, 0)
        self._left_by_plan: set[str] = set()
        """Jobs."""
        self.results: list[JobResult] = []
        self.begun: list[str] = []
        self.idle: list[PoolNode] = []
        """Not allocated, and no process of a job is left there."""
        self._find_idle()

    def _find_idle(self) -> None:
        taken = {one.incarnation for run in self._runs.values() for one in run.allocations}
        self.idle = [node for node in self._pool.nodes if node.takes_jobs and node.incarnation not in taken]

    # ------------------------------------------------------------ what nodes and people say

    def fold_reports(self) -> None:
        folded = [self._fold(run) for run in self._pool.plan.runs]
        self._runs.update((run.job, run) for run in folded)
        for job in self._pool.jobs:
            run = self._runs.get(job.job)
            if (run is None or run.is_over) and (ending := self._known_end(job.job)) is not None:
                self._end(job.job, ending, run)
        for run in folded:
            if not run.allocations and run.job in self._runs:
                self._leave_empty(run)
        self._find_idle()

    def _fold(self, run: Attempt) -> Attempt:
        allocations, left, refusals = [], dict.fromkeys(run.left), dict(run.refusals)
        refused: JobResult | None = None
        for allocation in run.allocations:
            node = self._live.get(allocation.incarnation)
            if node is None:
                if allocation.incarnation not in self._pool.lost and allocation.node not in self._names:
                    allocations.append(allocation)
                else:
                    left[allocation.node] = None
            elif node.ended is not None and node.ended.allocation_id > allocation.id:
                left[allocation.node] = None
            elif node.ended is not None and node.ended.allocation_id == allocation.id:
                left[allocation.node] = None
                if allocation.leaving or node.leaving:
                    self._left_by_plan.add(run.job)
                elif node.ended.outcome is Outcome.UNABLE:
                    # What has ended on a node that was not asked to leave is not tried there again at once.
                    refusals.pop(allocation.node, None)
                    reason = short(node.ended.reason, REFUSAL_CHARS)
                    refusals[allocation.node] = Refusal(reason, self._now + REFUSAL_S)
                if node.ended.code in REFUSES:
                    refused = self._ending_by(node.node, node.ended, Outcome.FAILED)
            else:
                allocations.append(replace(allocation, leaving=allocation.leaving or node.leaving))
        ending = run.ending or self._known_end(run.job) or (None if allocations else refused)
        if ending is not None and (
            ending.outcome is Outcome.CANCELLED
            or not ending.ended_at <= self._now < ending.ended_at + END_GRACE_S
        ):
            allocations = [replace(allocation, leaving=True) for allocation in allocations]
        gone = tuple(left)[-MOST_NODES:]
        return replace(run, allocations=tuple(allocations), ending=ending, left=gone, refusals=refusals)

    def _known_end(self, job: str) -> JobResult | None:
        """What a node reports that had a part in it, also if it was taken for lost since; else that it is cancelled."""
        if (known := self._ends.get(job)) is not None:
            return self._ending_by(*known, known[1].outcome)
        if (record := self._jobs.get(job)) is None:
            return self._ending(job, Outcome.CANCELLED, "its record was deleted")
        if record.cancelled_by:
            return self._ending(job, Outcome.CANCELLED, f"cancelled by {record.cancelled_by}")
        return None

    def _ending_by(self, node: str, end: AllocationEnd, outcome: Outcome) -> JobResult:
        return self._ending(end.job, outcome, f"{node}: {end.reason}", end.code)

    def _ending(self, job: str, outcome: Outcome, reason: str, code: int = 0) -> JobResult:
        return JobResult(job, outcome, short(reason), code, 0, None, self._now, ())

    def _leave_empty(self, run: Attempt) -> None:
        """All its nodes are gone: it is over, or waits at its old place in the queue."""
        ending, in_vain = run.ending, run.in_vain
        if self._now >= run.started_at + STEADY_S:
            in_vain = 0
        elif run.job not in self._left_by_plan:
            in_vain += 1
        if ending is None and in_vain >= MOST_ATTEMPTS:
            reasons = shortened(
                (f"{name}: {one.reason}" for name, one in run.refusals.items()), separator="; "
            )
            why = f"{in_vain} attempts without an outcome ({reasons or 'all its nodes were lost'})"
            ending = self._ending(run.job, Outcome.UNABLE, why)
        if ending is not None:
            self._end(run.job, ending, run)
            return
        # Its nodes are told no more: the plan of many large jobs that wait again would be too long for the store.
        self._runs[run.job] = replace(run, in_vain=in_vain, left=())

    def _end(self, job: str, ending: JobResult, run: Attempt | None) -> None:
        if len(self.results) == MOST_AT_ONCE:
            if run is not None:
                self._runs[job] = replace(run, ending=ending)
            return
        before = self._pool.plan.run_of(job)
        part = (*(run.left if run else ()), *(one.node for one in (before.allocations if before else ())))
        names = tuple(dict.fromkeys(part))
        result = replace(ending, ended_at=self._now, nodes=names)
        if run is not None:
            result = replace(result, attempts=run.attempt, started_at=run.started_at)
        self.results.append(result)
        self._runs.pop(job, None)
        self._jobs.pop(job, None)

    # ------------------------------------------------------------ who gets what

    def serve_claims(self) -> None:
        """Gives jobs their least, oldest first."""
        for job in self._pool.jobs:
            run = self._runs.get(job.job)
            if job.job not in self._jobs or job.cancelled_by or (run is not None and run.ending):
                continue
            need = job.min_nodes - (len(run.staying) if run is not None else 0)
            if need <= 0:
                continue
            usable = self.usable(job, self.idle)
            if len(usable) >= need:
                if (run is None or run.is_over) and len(self.begun) == MOST_AT_ONCE:
                    self.idle = []  # the rest with the next decision
                    return
                self._allocate(job, usable[:need])
                continue
            if len(self.usable(job, self.takers)) < job.min_nodes:
                continue  # the pool could not run it, were it empty
            if self._reclaim(job, need - len(usable)):
                # They wait for it, too: who got them meanwhile would have to give them back.
                self.idle = [node for node in self.idle if node not in usable]
            return

    def hand_out_surplus(self) -> None:
        for job in self._pool.jobs:
            run = self._runs.get(job.job)
            if not self.idle:
                return
            if run is None or not run.allocations or run.ending is not None or job.job not in self._jobs:
                continue
            room = job.max_nodes - len(run.allocations)
            if room > 0 and (usable := self.usable(job, self.idle)[:room]):
                beyond = (len(run.staying) + len(usable)) % job.nodes_multiple_of
                self._allocate(job, usable[: max(0, len(usable) - beyond)])

    def _reclaim(self, job: Job, missing: int) -> bool:
        """Asks runs to give nodes back, if that is enough for the job. Counts those that are leaving already."""
        coming = 0
        surplus: list[tuple[str, Allocation]] = []
        """The job and the allocation."""
        for run in sorted(self._runs.values(), key=lambda run: -self._place(run.job)):
            owner = self._jobs.get(run.job)
            present = sum(one.incarnation in self._live for one in run.staying)
            spare = present - owner.min_nodes if owner is not None else 0
            for allocation in reversed(run.allocations):
                node = self._live.get(allocation.incarnation)
                if run.job == job.job or node is None or not node.may_take_jobs or self.refuses(job, node):
                    continue
                if allocation.leaving or run.ending is not None:
                    coming += 1
                elif spare > 0:
                    spare -= 1
                    surplus.append((run.job, allocation))
        if coming + len(surplus) < missing:
            return False
        for name, allocation in surplus[: max(0, missing - coming)]:
            run = self._runs[name]
            rest = (replace(one, leaving=True) if one == allocation else one for one in run.allocations)
            self._runs[name] = replace(run, allocations=tuple(rest))
        return True

    def _allocate(self, job: Job, nodes: Iterable[PoolNode]) -> None:
        run = self._runs.get(job.job)
        if run is None or run.is_over:
            self.begun.append(job.job)
        if run is None:
            run = Attempt(job.job, 1, self._now, ())
        elif run.is_over:
            run = replace(run, attempt=run.attempt + 1, started_at=self._now)
        for node in nodes:
            self._allocation_ids += 1
            new = Allocation(node.node, node.incarnation, self._allocation_ids)
            run = replace(run, allocations=(*run.allocations, new))
            self.idle.remove(node)
        self._runs[job.job] = run

    def refuses(self, job: Job, node: PoolNode) -> bool:
        run = self._runs.get(job.job)
        refusal = run.refusals.get(node.node) if run is not None else None
        return refusal is not None and refusal.until - REFUSAL_S <= self._now < refusal.until

    def usable(self, job: Job, nodes: list[PoolNode]) -> list[PoolNode]:
        """Those that can run it."""
        return [node for node in nodes if not self.refuses(job, node)] if job.job in self._runs else nodes

    def _place(self, job: str) -> int:
        """In the queue: older jobs have lower numbers."""
        return self._places.get(job, -1)

    def plan(self) -> Plan:
        known = (run for run in self._runs.values() if run.job in self._places or not run.is_over)
        runs = sorted(known, key=lambda run: self._place(run.job))
        most = max(1, MOST_REFUSALS // max(1, sum(bool(run.refusals) for run in runs)))
        few = (replace(run, refusals=dict(list(run.refusals.items())[-most:])) for run in runs)
        return Plan(self._allocation_ids, tuple(few))


def _too_old(results: tuple[str, ...]) -> tuple[str, ...]:
    return results[: max(0, len(results) - MOST_RESULTS)][:MOST_AT_ONCE]
