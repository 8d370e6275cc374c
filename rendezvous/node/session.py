"""What belongs to one incarnation of this node, and is forgotten with it.

Its lease, what it has learned of the job (`MembershipView`), why its workers may go on (`LeaseValidity`), and its
record: what it reports, and what of that stands in the store as far as is known.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import attrgetter

from ..coordinator.view import Policy, View
from ..liveness.absence import may_still_train
from ..liveness.failure_detector import Suspects, out_of_sight, slow_to_go_on, slow_to_stop
from ..liveness.lease_validity import LeaseValidity
from ..records import Condition, Failure, GenerationProgress, NodeRecord, Phase, Result, World, life_of
from ..statements.inquiry import Suspicion, Testimony
from ..store.interface import Entry, LeaseId
from .membership_view import MembershipView

_NEWS = attrgetter(*(one.name for one in fields(NodeRecord) if one.name not in ("step", "progress")))
"""All of a record but the steps."""


@dataclass(slots=True)
class Session:
    """The state of one incarnation. Changed by `Participant` alone."""

    record: NodeRecord
    """This node's record as it should be."""
    validity: LeaseValidity
    membership: MembershipView
    lease: LeaseId | None = None
    written: NodeRecord | None = None
    """The record as this incarnation last knew it to be in the store; None before the first."""
    own_revision: int | None = 0
    """mod_revision of our record; None after a write whose outcome is unknown."""
    created_revision: int = 0
    started: int = 0
    """The highest generation that was started here, or will not be any more."""

    @property
    def incarnation(self) -> str:
        return self.record.incarnation

    @property
    def news(self) -> NodeRecord | None:
        """What to write, if anything. Steps alone are not worth it: the newest travels with the next change."""
        written = self.written
        return None if written is not None and _NEWS(written) == _NEWS(self.record) else self.record

    def wrote(self, record: NodeRecord, entry: Entry) -> None:
        """`record` is ours, and stands in the store as `entry`."""
        self.written = record
        self.own_revision, self.created_revision = entry.mod_revision, entry.create_revision

    def came_after_world(self, policy: Policy) -> bool:
        """The world in the store has not changed since this agent came. One that joins again was there before."""
        joined_once = life_of(self.incarnation) == self.incarnation
        newer = self.created_revision > self.membership.world_revision
        return policy.store_outlives_job and joined_once and newer

    def came_after_end(self, policy: Policy) -> bool:
        """The job in the store had ended before this agent came."""
        world = self.membership.world
        return world is not None and world.phase is Phase.ENDED and self.came_after_world(policy)

    def runs_again(self, policy: Policy) -> bool:
        """This agent is of a new run of the job."""
        world = self.membership.world
        succeeded = world is not None and world.result is Result.SUCCEEDED
        return self.came_after_end(policy) and (policy.runs_again or not succeeded)

    def view(self, policy: Policy) -> View:
        """What the coordinator decides from."""
        membership, gone = self.membership, self.membership.detector.gone
        return View(
            tuple(node for node in membership.nodes if node.incarnation not in gone),
            membership.world,
            membership.world_since,
            membership.arrivals,
            membership.ready_since,
            gone,
            self.runs_again(policy),
            self.came_after_world(policy),
            membership.succeeded_since,
            membership.inquiry_since,
        )

    def mark(self, generation: int, condition: Condition) -> bool:
        """The condition holds for this node's workers of the generation. True when that is news."""
        before = self.record
        self.record = before.having(generation, condition)
        return not before.has(condition, generation)

    def advanced(self, generation: int, step: int) -> None:
        progress = self._progress(generation)
        reached = step if progress.reached is None else max(progress.reached, step)
        step = max(self.record.step, step)
        self.record = replace(self.record, step=step, progress=replace(progress, reached=reached))

    def loaded(self, generation: int, step: int | None) -> None:
        self.record = replace(self.record, progress=replace(self._progress(generation), loaded=step))

    def failed(self, failure: Failure) -> None:
        """The first failure of a generation counts, as the others follow from it; but no collateral before a root."""
        first = self.record.failure
        root = first is not None and first.collateral and not failure.collateral
        if first is None or first.generation < failure.generation or root:
            self.record = replace(self.record, failure=failure)

    def suspects_hang(self, suspicion: Suspicion | None) -> None:
        """The workers here seem to hang, or no longer do."""
        self.record = replace(self.record, suspicion=suspicion)

    def testifies(self, testimony: Testimony) -> None:
        self.record = replace(self.record, testimony=testimony)

    def answered(self, generation: int) -> int:
        """The newest inquiry of this generation that is answered, 0 without any."""
        said = self.record.testimony
        return said.inquiry if said is not None and said.generation == generation else 0

    def _progress(self, generation: int) -> GenerationProgress:
        known = self.record.progress
        return known if known and known.generation == generation else GenerationProgress(generation)

    def suspects(self, *, may_be_unleased: bool, now: float) -> Suspects:
        """The peers to ask who they are. `may_be_unleased`: members may train whose leases the store has lost."""
        membership = self.membership
        world = membership.world
        cut_off = self.validity.suspects(now)
        if cut_off or world is None:
            return cut_off
        if membership.coordinates:
            missing = may_still_train(world, membership.nodes) if may_be_unleased else ()
            return slow_to_stop(world, membership.nodes, self.incarnation) or out_of_sight(missing)
        leader = membership.leader_record
        if leader is None or self.written is None:
            return {}
        return slow_to_go_on(world, leader, self.written, membership.detector.gone)


def newest(one: World | None, other: World | None) -> World | None:
    """The one of the higher generation; of one generation `other`."""
    if one is None or (other is not None and other.generation >= one.generation):
        return other
    return one
