"""One node's part in the rendezvous, without I/O: what it knows, what it asks of the store, what it must do.

The agent and the simulator drive the same `Participant`: they carry out its `request` (one at a time, so that
nothing races with itself), feed back the answer, deliver the watch's changes and what happened to the workers,
and carry out its `action`. It is level-triggered: every question is answered from what is known now, so a lost reply,
a repeated event or a missed one costs time and never correctness.

What it knows and reports is in its `Session`, how long it waits for the others in its `Deadlines`; what follows is
decided by `decide` (which world comes next?) and `next_action` (what must this node do?). The node with the oldest
record coordinates: it alone follows all records, so a join is not delivered N times to N nodes. Two nodes may for a
moment both believe to coordinate; the compare on `world` lets only one of them publish (I2).

All instants are seconds on this node's monotonic clock.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable

from ...health.hang_report import HangReport, HangSuspicion
from ...health.stragglers import Paces
from ..coordinator.decide import decide
from ..coordinator.exclusions import why_excluded
from ..coordinator.next_world import differences_from_job, why_idle
from ..coordinator.view import Decision, Policy, View, Wait
from ..errors import LeaseExpired, RecordInvalid, StoreError, StoreMismatch
from ..liveness import LeaseValidity, Peer, ProbeResult
from ..messages import MAX_EXCLUSION_REASON
from ..records import (
    NODES_PREFIX,
    WORLD_KEY,
    Condition,
    Failure,
    NodeRecord,
    Phase,
    World,
    life_of,
    node_key,
)
from ..store.interface import (
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
from .deadlines import CoolDown, Deadlines, JoinHold, LeaveTimes
from .node_actions import Action, Leave, Refusal, Stay, Stop, next_action
from .session import MembershipView, NodeSnapshot, Session, newest, snapshot_of, world_of
from .transactions import (
    RETRY,
    Evict,
    PendingRequest,
    RetryPolicy,
    WriteRecord,
    WriteWorld,
)

log = logging.getLogger(__name__)

DUPLICATE_TTLS = 3.0
"""A record under our name that outlives so many times to live belongs to a live agent, not to a dead one; longer
than the store needs, since late keep-alives of the dead may still arrive and clocks differ in rate."""


class Participant:
    """One node's part in the rendezvous. Owned by one thread; only `snapshot` is for others."""

    def __init__(
        self,
        identity: NodeRecord,
        policy: Policy,
        *,
        lease_ttl_s: float,
        rng: random.Random,
        now: float,
        retry: RetryPolicy = RETRY,
        decision: Callable[[View, Policy, float], Decision] = decide,
        held_back: str = "",
    ) -> None:
        """`identity` holds what does not change (node, address, slots, hosts_store), the first port, and the
        name of this life of the agent as incarnation; each rejoin appends a number to it. `lease_ttl_s` is infinite
        where no lease ends by time (`StoreKind.life_s`). `held_back`: why neither the first life nor a later one may
        join before `hold_back` says so; empty: it may."""
        self.identity = identity
        self.policy = policy
        self.waiting_for = "the rendezvous store"
        self.backoff_s = 0.0
        """The coordinator's pause before the next generation; 0 on other nodes, and when there is none."""
        self._lease_ttl_s = lease_ttl_s
        self._decide = decision
        self.wants_port = False
        """The port offered so far belongs to a past generation: give a fresh one through `offer_port`."""
        self._joins = 0
        self._hold = JoinHold(held_back)
        self._session = self._new_session(identity)
        self._generation = 0
        self._started_world: World
        self.hands_over = False
        """Workers are gone, and the next generation waits until the driver has brought to other nodes what only this
        one has: it calls `handed_over`."""
        self._known: World | None = None
        """The newest world of all earlier sessions."""
        self._deadlines = Deadlines(policy, now)
        self._cool_down = CoolDown(life_of(identity.incarnation), policy.cool_down_s)
        self._refusal: Leave | None = None
        self._duplicate_until: float | None = None
        self._pending = PendingRequest(retry, rng, now)
        self._wake_at: float | None = None

        self.snapshot = NodeSnapshot(identity.node, identity.incarnation)
        """For any thread: the state at the end of the last turn."""

    # ---------------------------------------------------------------- what the driver reads

    @property
    def incarnation(self) -> str:
        return self._session.incarnation

    @property
    def world(self) -> World | None:
        """As this node last saw it."""
        return self._session.membership.world

    @property
    def leave_times(self) -> LeaveTimes:
        """How the time that a leave may take is divided."""
        return self._deadlines.leave_times

    def has(self, condition: Condition, generation: int) -> bool:
        """It holds for this node's workers of this generation."""
        return self._session.record.has(condition, generation)

    @property
    def lease(self) -> LeaseId | None:
        """The lease to keep alive."""
        return self._session.lease

    @property
    def subscription(self) -> Subscription | None:
        """The watch to keep open; None while there is nothing to watch yet."""
        return self._session.membership.subscription

    def good_until(self, now: float) -> float:
        """Until then the workers may go on without any news; see `lease_good`."""
        return self._session.validity.good_until(now) if self._session.lease is not None else -math.inf

    def lease_good(self, now: float) -> bool:
        """No other node can have been given this node's place (I10)."""
        return self._session.lease_good(now)

    def take_snapshot(self, undisturbed: int, start_waits_for: str, now: float) -> None:
        """The turn is over. `undisturbed` and `start_waits_for` as the driver's `Effects` have them."""
        waiting_for = start_waits_for or self.waiting_for
        self.snapshot = snapshot_of(self._session, undisturbed, waiting_for, self.backoff_s, now)

    @property
    def held_back(self) -> str:
        """Why this node does not join; empty where nothing of its own hinders it, or where it has joined."""
        return self._hold.why if self._session.lease is None and not self._generation else ""

    def hold_back(self, why: str) -> None:
        """The driver has found that this node is not fit to join; empty: that it is."""
        self._hold.set(why)

    @property
    def differs_from_job(self) -> tuple[str, ...]:
        """How this node's options differ from those of the job, if that job lives."""
        return differences_from_job(self.world, self._session.membership.leader_record, self.identity)

    def action(self, now: float) -> Action:
        """What this node must do now. Repeated until the driver reports that it is done."""
        if self._refusal is not None:
            if self._generation:
                return Stop(self._generation, False, self._refusal.reason)
            return self._refusal
        if self.hands_over:
            return Stay()
        deadlines = self._deadlines_at(now)
        action = next_action(self.world, self._session.local(self._generation, self.policy, deadlines, now))
        if not isinstance(action, Stay):
            return action
        if now >= deadlines.give_up_at:
            waited = f"no world within {self.policy.join_timeout_s:.0f} s of --join-timeout"
            if self.held_back:
                hosts = self.identity.hosts_store and self._hold.job_goes_on
                return action if hosts else Leave(Refusal.UNFIT, f"{waited}: {self.held_back}")
            why = Refusal.STORE_AWAY if self._pending.failures else Refusal.JOIN_TIMEOUT
            return Leave(why, f"{waited}, waiting: {self.waiting_for}")
        return action

    def wake_at(self, now: float) -> float | None:
        """The next instant at which `request` or `action` may answer differently without any event."""
        instants = [self._wake_at, self._pending.not_before, *self._deadlines_at(now).instants]
        instants.append(self._cool_down_at(now).due_at)
        if self._session.lease is not None:
            instants += [*self._session.validity.instants(), self._session.membership.detector.wake_at()]
        return min((at for at in instants if at is not None and now < at < math.inf), default=None)

    def _deadlines_at(self, now: float) -> Deadlines:
        self._deadlines.look(self.world, idle=self._is_idle(now), now=now)
        return self._deadlines

    def _is_idle(self, now: float) -> bool:
        world = self.world
        if self._generation or world is None or not world.trains or not self.lease_good(now):
            return not self._generation
        done = self._session.record.has(Condition.SUCCEEDED, world.generation)
        return world.member(self.incarnation) is not None and not done

    # ---------------------------------------------------------------- while it is excluded

    def recheck_due(self, now: float) -> bool:
        """This node is excluded and its cool-down is over: check it, and call `rechecked` with the result."""
        return self._session.lease is not None and now >= self._cool_down_at(now).due_at

    def recheck_begins(self) -> None:
        """The check of this node is under way: no other is due until it has ended."""
        self._cool_down.begin()

    def rechecked(self, now: float, *, passed: bool, summary: str) -> None:
        """The check of this node has ended."""
        found = self._cool_down.checked(now, passed=passed, summary=summary[:MAX_EXCLUSION_REASON])
        if found is not None:
            self._session.report(recheck=found)

    def _cool_down_at(self, now: float) -> CoolDown:
        membership = self._session.membership
        world = membership.world
        stands = world is not None and world.phase is Phase.STOPPING
        excluded = world.exclusion(self.identity.node) if world is not None else None
        if world is not None:  # before one is known, the old one may still hold
            self._cool_down.look(excluded, membership.world_since if stands else None, now)
        return self._cool_down

    # ---------------------------------------------------------------- what it asks of its peers

    def probes(self, now: float) -> tuple[Peer, ...]:
        """The peers to ask for an introduction now; `probed` follows for each."""
        suspects = self._session.suspects(may_be_unleased=self.policy.unleased_s > 0, now=now)
        return self._session.membership.detector.suspect(suspects, now)

    def probed(self, peer: Peer, finding: ProbeResult, asked_at: float, now: float) -> None:
        validity = self._session.validity
        validity.found(peer, finding, asked_at)
        self._session.membership.detector.found(
            peer, finding, now, validity.ask_again_s(finding, asked_at, now)
        )

    # ---------------------------------------------------------------- what it asks of the store

    def request(self, now: float) -> Request | None:
        """The next question for the store; None while one is unanswered or nothing is needed."""
        if not self._pending.may_ask(now):
            return None
        return self._pending.ask(self._next_request(now), now)

    def _next_request(self, now: float) -> Request | None:
        session, own_key = self._session, node_key(self.identity.node)
        if self._refusal is not None:
            return None
        if self.held_back:
            self.waiting_for = self.held_back
            return self._hold.next_request()
        if session.lease is None:
            return Grant(self._lease_ttl_s) if not self._generation else None
        if session.own_revision is None:
            return Read((own_key,))
        self._settle_unstarted()
        session.compare_ranks()
        if self._generation and now >= self._deadlines_at(now).overdue_at:
            session.mark(self._generation, Condition.OVERDUE)
        if self.wants_port:
            return None
        if (news := session.news) is not None:
            return WriteRecord(Compare(own_key, session.own_revision), news, session.lease)
        membership = session.membership
        if membership.subscription is None:
            return membership.question
        if not self._generation and (reason := session.why_refused(self.policy)) is not None:
            self._refuse(Refusal.UNLIKE_THE_JOB, reason)
        if membership.world is None and self._known is not None and self._known.phase is not Phase.ENDED:
            # The store was replaced by an empty one.
            return WriteWorld(Compare(WORLD_KEY, membership.world_revision), self._known.carried_over())
        if membership.coordinates:
            return self._coordinate(now)
        if membership.leader_gone is not None:
            return Evict((membership.leader_gone,))
        idle = why_idle(membership.world, self.incarnation, membership.leader)
        self.waiting_for = why_excluded(membership.world, session.record) or idle
        return None

    def _coordinate(self, now: float) -> Request | None:
        decision = self._decide(self._session.view(self.policy), self.policy, now)
        if isinstance(decision, Wait):
            self._wake_at, self.backoff_s = decision.until, decision.backoff_s
            self.waiting_for = decision.reason
        elif not self._session.membership.nodes_are_behind:
            self._wake_at, self.backoff_s = None, 0.0
        return self._session.carried_out(decision)

    def _settle_unstarted(self) -> None:
        """A generation that was stopped before this node started it has no workers here either."""
        world = self.world
        if world is None or not (world.drains or world.stops) or self._generation:
            return
        stopped = self._session.record.has_stopped(world.generation)
        if world.member(self.incarnation) is not None and not stopped and not self.hands_over:
            self._settle(world)

    def _settle(self, world: World) -> None:
        session = self._session
        session.mark(world.generation, Condition.STOPPED)
        session.started = world.generation
        if world.members[0].incarnation == self.incarnation:
            self.wants_port = True

    # ---------------------------------------------------------------- what the store answers

    def answered(self, request: Request, answer: Answer, now: float) -> None:
        """The store's answer to the pending request; a late one to an older request is ignored."""
        if not self._pending.ended(request):
            return
        self._pending.failures = 0
        try:
            self._take_in(request, answer, now)
        except (RecordInvalid, StoreMismatch) as error:
            self._refuse(Refusal.STORE_MISMATCH, str(error))

    def _take_in(self, request: Request, answer: Answer, now: float) -> None:
        session = self._session
        if isinstance(request, Grant) and isinstance(answer, int):
            session.lease, session.validity.confirmed_at = answer, self._pending.asked_at
        elif isinstance(request, WriteRecord) and isinstance(answer, Outcome):
            if answer.succeeded:
                written = answer.entries[0]
                assert written is not None, "what was just written is there"
                session.wrote(request.record, written)
            else:
                self._see_own_record(answer.entries[0], now)
        elif isinstance(request, WriteWorld) and isinstance(answer, Outcome):
            session.membership.see_world(answer.entries[0], now)
            for gone, entry in zip(request.evicted, answer.entries[1:], strict=True):
                session.membership.see_node(gone.key, entry, answer.revision, now)
        elif isinstance(request, Evict) and isinstance(answer, Outcome):
            for gone, entry in zip(request.compares, answer.entries, strict=True):
                session.membership.see_node(gone.key, entry, answer.revision, now)
        elif isinstance(request, Read) and request.scopes == (WORLD_KEY,) and isinstance(answer, Snapshot):
            world = next((world_of(entry, self.policy.job) for entry in answer.entries), None)
            self._refusal = self._refusal or self._hold.see_world(world)
        elif isinstance(request, Read) and isinstance(answer, Snapshot):
            own = next((entry for entry in answer.entries if entry.key == node_key(self.identity.node)), None)
            if WORLD_KEY not in request.scopes:
                self._see_own_record(own, now)
            elif own is None:
                self.lease_gone(session.lease)
            else:
                session.membership.read(request, answer, now)

    def failed(self, request: Request, error: StoreError, now: float) -> None:
        """The pending request got no answer: what it did, if anything, is unknown."""
        if not self._pending.ended(request):
            return
        if isinstance(error, StoreMismatch):
            self.store_mismatched(str(error))
            return
        if isinstance(error, LeaseExpired):
            self.lease_gone(self._session.lease)
            return
        if isinstance(request, WriteRecord):
            self._session.own_revision = None
        if not self._pending.failures:  # only then: each try may fail at another member, in other words
            self.waiting_for = f"the rendezvous store: {error}"
        self._pending.retry_later(now)

    def store_mismatched(self, reason: str) -> None:
        """The store that answers now is not this job's, and that one does not come back where it stands."""
        self._refuse(Refusal.STORE_MISMATCH, reason)

    def lease_confirmed(self, lease: LeaseId, asked_at: float) -> None:
        """A keep-alive that was sent at `asked_at` has been answered."""
        if lease == self._session.lease:
            validity = self._session.validity
            validity.confirmed_at = max(validity.confirmed_at, asked_at)

    def lease_gone(self, lease: LeaseId | None) -> None:
        """The others may count this node as gone: workers first, then a new incarnation."""
        if lease is not None and lease == self._session.lease:
            log.warning("lease lost: stopping the workers, then joining again as a new incarnation")
            self._session.lease = None
            self._rejoin_if_idle()

    def changed(self, changes: tuple[Change, ...], now: float) -> None:
        """Changes from the watch of the present subscription, in order."""
        try:
            for change in changes:
                self._see_change(change, now)
        except (RecordInvalid, StoreMismatch) as error:
            self._refuse(Refusal.STORE_MISMATCH, str(error))

    def _see_change(self, change: Change, now: float) -> None:
        key, revision = change.key, change.revision
        if key == WORLD_KEY:
            self._session.membership.see_world(change.entry, now)
        elif key.startswith(NODES_PREFIX):
            self._session.membership.see_change_of_node(key, change.entry, revision, now)
        session = self._session
        if key == node_key(self.identity.node) and session.written and revision > (session.own_revision or 0):
            # Our own writes come back; anything else that happens to our record is another writer's doing.
            self._see_own_record(change.entry, now)

    def lost_track(self) -> None:
        """The watch missed changes: read everything again."""
        self._session.membership.subscription = None

    def _see_own_record(self, entry: Entry | None, now: float) -> None:
        """What stands under our key, after a refused or an unanswered write."""
        session = self._session
        if entry is None:
            if session.written is not None:
                self.lease_gone(session.lease)
            session.own_revision = 0
            return
        record = NodeRecord.from_json(entry.key, entry.value)
        if record.incarnation == session.incarnation:
            session.wrote(record, entry)
            return
        if session.written is not None:
            self.lease_gone(session.lease)
            return
        if self._duplicate_until is None:
            self._duplicate_until = now + DUPLICATE_TTLS * self._lease_ttl_s
        if (
            self._pending.asked_at >= self._duplicate_until
        ):  # an agent that stood still may learn it much later
            self._refuse(
                Refusal.DUPLICATE_NODE,
                f"another live agent of job {self.policy.job!r} is already called {self.identity.node!r}: "
                "give this one another --node-id, or leave it out to get a unique one",
            )
        self.waiting_for = (
            f"another agent is registered as {self.identity.node!r}: if it runs, give this one another --node-id; if "
            f"it has ended, its entry expires within {self._lease_ttl_s:g} s"
        )
        session.own_revision = 0
        self._pending.pause(now)

    def _refuse(self, why: Refusal, reason: str) -> None:
        self._refusal = self._refusal or Leave(why, reason)

    # ---------------------------------------------------------------- what happens on this node

    def workers_started(self, world: World) -> None:
        """The driver carries out a Start: from here on workers of this world exist here."""
        assert world.generation > self._session.started, "a node starts a generation at most once (I4)"
        assert not self._generation, "one generation of workers at a time (I1)"
        self._started_world = world
        self._session.validity.runs(world, self._session.incarnation)
        self._session.started = self._generation = world.generation

    def workers_advanced(self, step: int) -> None:
        """A worker has finished or saved this step."""
        self._session.advanced(self._generation, step)

    def workers_load(self, step: int | None) -> None:
        """The workers go on from the state of this step, or are about to. None: their load was refused."""
        self._session.loaded(self._generation, step)

    def workers_are(self, condition: Condition, generation: int) -> bool:
        """The condition holds from now on for this generation here. True when that is news, and so to be written."""
        return self._session.mark(generation, condition)

    def workers_paced(self, paces: Paces) -> None:
        """How fast the workers here are. Each call is a write to the store: the driver bounds their rate."""
        self._session.report(paces=paces, comparison=self._session.membership.own_comparison)

    def workers_failed(self, failure: Failure) -> None:
        self._session.failed(failure)

    def workers_suspected(self, suspicion: HangSuspicion | None) -> None:
        """The workers here seem to hang, or (None) no longer do."""
        self._session.report(suspicion=suspicion)

    def workers_looked_at(self, report: HangReport) -> None:
        """This node's answer to an inquiry; ignored if its generation is over."""
        if report.generation == self._generation:
            self._session.report(hang_report=report)

    def workers_drained(self, generation: int, *, kept: bool) -> None:
        """Every worker here has ended by itself at the step that all have agreed on, or the next generation can do
        without it. `kept`: this node has the state after that step."""
        self._session.mark(generation, Condition.DRAINED)
        if kept:
            self._session.mark(generation, Condition.STATE_SAVED)

    def became_ready(self) -> None:
        """Workers can start here at once. Until then a world that trains does not wait for this node."""
        self._session.report(ready=True)

    def offer_port(self, port: int) -> None:
        """`port` is bound and listening at this node's address, and no generation has ever been given it."""
        self._session.report(port=port)
        self.wants_port = False

    def workers_gone(self, generation: int) -> None:
        """No process of `generation` is left here."""
        assert generation == self._generation, "workers that were not started cannot end"
        self._generation = 0
        self._session.validity.runs(None, self._session.incarnation)
        self.hands_over = self.leaves_memory(generation)
        if not self.hands_over:
            self._settle(self._started_world)
        self._rejoin_if_idle()

    def leaves_memory(self, generation: int) -> bool:
        """This node leaves, and may have in memory what the world after this generation goes on with.

        That is so in any phase: workers may end by themselves, beside a node that is lost, before it changes. And a
        node that stands by may be the only one with what the world is about to load.
        """
        record, world = self._session.record, self.world
        goes_on = world is not None and world.generation == generation and world.phase is not Phase.ENDED
        leaves = record.leaving and not record.has(Condition.SUCCEEDED, generation)
        return bool(record.memory) and leaves and goes_on

    def handed_over(self) -> None:
        """The others have what only this node had, or will never have it. The next request says that it has stopped."""
        self.hands_over = False

    def leave(self, now: float, ends_at: float = math.inf) -> None:
        """This node was asked to stop: report it, stop with the others, then leave, before its machine goes away at
        `ends_at`."""
        self._deadlines.leave(now, ends_at)
        self._session.report(leaving=True)

    def _new_session(self, record: NodeRecord) -> Session:
        validity = LeaseValidity(self._lease_ttl_s, self.policy.store_outage_grace_s)
        return Session(record, validity, MembershipView(self.policy.job, self.identity.node))

    def _rejoin_if_idle(self) -> None:
        """After a lost lease and with no worker left: everything known is void, join anew."""
        if self._session.lease is not None or self._generation:
            return
        self._joins += 1
        self._hold.begin_again()
        self._known = newest(self._known, self.world)
        seen = self._known.generation if self._known is not None else self.identity.seen
        self._session = self._new_session(self._session.again(self.identity, self._joins, seen))
        # A world that we never saw may have named our port as its master: no workers may meet there again.
        self.wants_port = True
        self._pending.forget()
        self._duplicate_until = None
