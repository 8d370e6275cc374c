"""One daemon's part in a pool, without I/O: what it knows, what it asks of the store, which allocation it must take.

Like the `Participant` of the rendezvous it is driven by one thread, which carries out its `request`, feeds back the
answer and the watch's changes, and does what `to_start` and `must_leave` say. It is level-triggered: every question is
answered from what is known now. The node with the oldest record coordinates; of two that both believe to, the compare
on the plan lets one write.

All instants are seconds on this node's monotonic clock, but for `wall`, which only reaches the coordinator's decision.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..rendezvous.errors import LeaseExpired, RecordInvalid, StoreError, StoreMismatch
from ..rendezvous.node.transactions import RETRY, PendingRequest, WriteRecord
from ..rendezvous.store.interface import (
    Answer,
    Change,
    Compare,
    Entry,
    Grant,
    LeaseId,
    Outcome,
    Read,
    Request,
    Snapshot,
    Subscription,
)
from .records import (
    SCOPES,
    Allocation,
    AllocationEnd,
    Attempt,
    Job,
    Pool,
    PoolNode,
    PoolView,
    short,
)
from .records import Outcome as JobOutcome
from .schedule import Decision, decide

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assignment:
    """This node is to run a part of this job."""

    job: Job
    run: Attempt
    allocation: Allocation


class PoolMember:
    """One daemon's part in a pool. Owned by one thread."""

    def __init__(
        self,
        identity: PoolNode,
        *,
        lease_ttl_s: float,
        rng: random.Random,
        now: float,
        wall: Callable[[], float],
        decide: Callable[[Pool, float], Decision | None] = decide,
    ) -> None:
        self.record = identity
        """As this node would have it written."""
        self.view = PoolView()
        self.lease: LeaseId | None = None
        self.subscription: Subscription | None = None
        self.waiting_for = "the pool's store"
        self.mismatch: str | None = None
        """Why this daemon can take no part; None as long as it can."""
        self._lease_ttl_s = lease_ttl_s
        self._wall = wall
        self._decide = decide
        self._pending = PendingRequest(RETRY, rng, now)
        self._written: PoolNode | None = None
        self._own_revision = 0
        self._name_taken = False
        """Another daemon's record stands under this node's name."""
        self._confirmed_at = now
        """When the newest answer about the lease was asked for."""
        self._missing_since: dict[str, float] = {}
        """Allocations whose nodes have no record: since when."""

    # ---------------------------------------------------------------- what the driver reads

    @property
    def tracks(self) -> bool:
        """It has a record in the pool, and follows all others."""
        return self.subscription is not None and self._written is not None

    def is_current(self, now: float) -> bool:
        """It tracks the pool, and the pool has not forgotten it."""
        return self.tracks and now < self._confirmed_at + self._lease_ttl_s

    @property
    def coordinates(self) -> bool:
        oldest = next(iter(self.view.nodes), None)
        return self.tracks and oldest is not None and oldest.node == self.record.node

    @property
    def to_start(self) -> Assignment | None:
        """An allocation that it has not taken yet; none is taken twice."""
        found = self._untaken
        if found is None or self._is_over(*found):
            return None
        job = next((job for job in self.view.jobs if job.job == found[0].job), None)
        return Assignment(job, *found) if job is not None else None

    @property
    def must_leave(self) -> bool:
        """The allocation whose processes run here is to be left, or is not this node's any more."""
        if not self.record.running or not self.tracks:
            return False
        found = self._allocation
        return found is None or found[1].id != self.record.running or found[1].leaving

    @property
    def has_departed(self) -> bool:
        """No allocation of this life is in the plan any more, as far as it can be known, and none can follow."""
        if self.record.ended is None and (not self.tracks or self._allocation is None):
            return True
        return self.tracks and self._written == self.record and self._allocation is None

    @property
    def _allocation(self) -> tuple[Attempt, Allocation] | None:
        return self.view.plan.allocation_of(self.record.node, self.record.incarnation)

    @property
    def _untaken(self) -> tuple[Attempt, Allocation] | None:
        """The allocation that this node has and has not taken in this life, if it knows the plan."""
        found = self._allocation if self.tracks and not self.record.running else None
        ended = self.record.ended
        return None if found is None or (ended and ended.allocation_id >= found[1].id) else found

    def _is_over(self, run: Attempt, allocation: Allocation) -> bool:
        return allocation.leaving or run.ending is not None or self.record.leaving

    def _decline(self) -> None:
        """An allocation that is to be left before it was taken is left at once."""
        if (found := self._untaken) is not None and self._is_over(*found):
            run, allocation = found
            end = AllocationEnd(run.job, allocation.id, JobOutcome.UNABLE, 0, "before it began")
            self.record = replace(self.record, ended=end)

    def request(self, now: float) -> Request | None:
        """What to ask of the store next; None while an answer is due, or nothing is wanted."""
        if self.mismatch is not None or not self._pending.may_ask(now):
            return None
        self._decline()
        return self._pending.ask(self._next_request(now), now)

    def _next_request(self, now: float) -> Request | None:
        if self.lease is None:
            return Grant(self._lease_ttl_s)
        if self.subscription is None:
            return Read(SCOPES)
        if self._name_taken:
            return None
        if self._written != self.record:
            return WriteRecord(Compare(self.record.key, self._own_revision), self.record, self.lease)
        if not self.coordinates:
            return None
        decision = self._decide(self.view.pool(self._lost(now)), self._wall())
        return replace(decision, plan_revision=self.view.plan_revision) if decision is not None else None

    def wake_at(self, now: float) -> float | None:
        """The instant at which there is more to do without any event. A coordinator turns once a second besides:
        pauses need no more."""
        at = self._pending.not_before
        return at if at > now else None

    def _lost(self, now: float) -> frozenset[str]:
        """A record that is gone may come back: with a store's outage all leases end at once."""
        live = {node.incarnation for node in self.view.nodes}
        missing = {one.incarnation for run in self.view.plan.runs for one in run.allocations} - live
        self._missing_since = {one: self._missing_since.get(one, now) for one in missing}
        return frozenset(
            one for one, since in self._missing_since.items() if now >= since + self._lease_ttl_s
        )

    # ---------------------------------------------------------------- what the store answers

    def answered(self, request: Request, answer: Answer, now: float) -> None:
        if not self._pending.ended(request):
            return
        self._pending.failures = 0
        try:
            if isinstance(request, Grant) and isinstance(answer, int):
                self.lease, self._confirmed_at = answer, self._pending.asked_at
            elif isinstance(request, Read) and isinstance(answer, Snapshot):
                self.view.read(answer)
                self._see_own(self.view.entry(self.record.key))
                self.subscription = Subscription(SCOPES, answer.revision)
            elif isinstance(answer, Outcome):
                if isinstance(request, WriteRecord):
                    self._see_own(answer.entries[0])
                if not answer.succeeded:
                    self.subscription = None  # all is read again: this may be old
        except RecordInvalid as error:
            self.mismatch = str(error)

    def failed(self, request: Request, error: StoreError, now: float) -> None:
        """What the request did, if anything, is unknown: all is read again."""
        if not self._pending.ended(request):
            return
        if isinstance(error, StoreMismatch):
            self.mismatch = str(error)
            return
        if isinstance(error, LeaseExpired):
            self.lease_gone(self.lease)
            return
        if not isinstance(request, Grant):
            self.subscription = None
        self.waiting_for = f"the pool's store: {error}"
        self._pending.retry_later(now)

    def lease_gone(self, lease: LeaseId | None) -> None:
        """The others may count this node as lost. Its allocation's processes have a lease of their own, and run on."""
        if lease is not None and lease == self.lease:
            log.warning("this node's lease in the pool was lost; joining it again")
            self.lease = self.subscription = self._written = None
            self._own_revision = 0

    def lease_confirmed(self, lease: LeaseId, asked_at: float) -> None:
        """What runs here has a lease of its own: this one only says that the pool's store answers."""
        if lease == self.lease:
            self._confirmed_at = asked_at

    def store_mismatched(self, reason: str) -> None:
        """The store that answers now is not this pool's."""
        self.mismatch = self.mismatch or reason

    def changed(self, changes: tuple[Change, ...], now: float) -> None:
        try:
            self.view.changed(changes)
        except RecordInvalid as error:
            self.mismatch = str(error)
            return
        for change in changes:
            if change.key == self.record.key and change.revision > self._own_revision:
                self._see_own(change.entry)

    def lost_track(self) -> None:
        """The watch missed changes: read everything again."""
        self.subscription = None

    def _see_own(self, entry: Entry | None) -> None:
        """What stands under this node's key."""
        record = PoolNode.read(entry.key, entry.value) if entry is not None else None
        if entry is not None and record is not None and record.incarnation == self.record.incarnation:
            self._written, self._own_revision, self._name_taken = record, entry.mod_revision, False
            return
        if self._written is not None:
            self.lease_gone(self.lease)
        self._own_revision, self._name_taken = 0, record is not None
        if self._name_taken:
            self.waiting_for = (
                f"an earlier daemon named {self.record.node} to be forgotten; if that one lives, give this one another"
                " --node-id"
            )

    # ---------------------------------------------------------------- what happens on this node

    def started(self, allocation_id: int) -> None:
        """Processes of this allocation are here from now on."""
        assert not self.record.running, "a node is in one job at most"
        self.record = replace(self.record, running=allocation_id)

    def ended(self, end: AllocationEnd) -> None:
        """No process of the allocation is left here."""
        assert self.record.running == end.allocation_id, "an allocation that was not taken cannot end"
        self.record = replace(self.record, running=0, ended=replace(end, reason=short(end.reason)))

    def report_problem(self, problem: str) -> None:
        """Why this node must not be given a job now; empty when it may."""
        self.record = replace(self.record, problem=short(problem))

    def leave(self) -> None:
        """It takes no allocation any more."""
        self.record = replace(self.record, leaving=True)
