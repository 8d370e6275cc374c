"""This node's part in a rendezvous whose workers another program runs: torchrun's agent.

A thread drives the `Participant`, by the same `Driver` as the main loop that has workers of its own. The other program
*wants a place* in a world when it has no workers, and *gives it back*, saying how they ended, when they are gone. It
asks whether they must end whenever it likes: the answer lies ready in a frozen `Status`.

Invariants: only the thread touches the participant. Other threads never wait for the store. The lease is renewed
only while the thread turns: one that has ended or stands still sees no other world, and torchrun's agent ends the
workers.
"""

from __future__ import annotations

import enum
import logging
import math
import queue
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ...rendezvous.coordinator.decide import decide
from ...rendezvous.coordinator.restarts import STABLE_AFTER_S, RestartPolicy
from ...rendezvous.coordinator.view import Decision, Policy, View
from ...rendezvous.errors import StoreError, StoreUnavailable
from ...rendezvous.node.driver import Driver
from ...rendezvous.node.node_actions import Action, Drain, Leave, Start, Stay, Stop
from ...rendezvous.node.participant import Participant
from ...rendezvous.records import (
    MAX_TEXT,
    WORLD_KEY,
    Cause,
    CauseKind,
    Condition,
    Failure,
    NodeRecord,
    Phase,
    Result,
    World,
)
from ...rendezvous.store.interface import Compare, Put, Store
from ...threads import Thread
from ...worker.wire.shared_progress import clock
from ..common.events import Event, ThreadFailed, run_next
from ..common.ports import OfferedPort
from ..main.heartbeat import STUCK_AFTER_S
from ..rendezvous_io.store_link import PeerLink, StoreLink

log = logging.getLogger(__name__)

NEVER_GIVE_UP = RestartPolicy(max_failures=sys.maxsize)
"""torchrun counts its restarts itself, and closes the job when they are used up. The back-off is ours."""

TURNS_EVERY_S = 1.0
"""At least, so that waiting for events differs from standing still."""

LONGEST_TURN_S = 5.0
"""For the thread to end: it waits for nothing but events."""

STANDS_STILL = "the rendezvous thread stands still"

CLOSING_TRIES = 20
"""The world changes a few times in a second at most; each try reads it again."""


class PlaceEnd(enum.Enum):
    """How the workers of a place ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    """Because they had to."""


@dataclass(frozen=True, slots=True)
class WorldPlace:
    """This node's place in a world. `listener` is bound to the world's master, on the first node only."""

    world: World
    rank: int
    listener: socket.socket | None

    @property
    def generation(self) -> int:
        return self.world.generation


@dataclass(frozen=True, slots=True)
class Status:
    """What the other program may know, as of the thread's last turn."""

    place: WorldPlace | None = None
    """Taken and not given back yet."""
    stop: str = ""
    """Why the workers of `place` must end; empty while they may go on."""
    finishing: bool = False
    """The workers here ended with success, and those of other nodes still run in the same world."""
    leave: Leave | None = None
    """There will be no place any more."""
    problem: str = ""
    """This thread has ended: by mistake, without a store, or because the node has left."""


def decide_for_torchrun(view: View, policy: Policy, now: float) -> Decision:
    """As everywhere, but a node that has finished takes no further part: torchrun's agent does not start again."""
    world = view.world
    finishing = world.generation if world is not None and world.trains else 0

    def as_seen(node: NodeRecord) -> NodeRecord:
        finished = Condition.SUCCEEDED in node.conditions and node.generation != finishing
        return replace(node, leaving=True) if finished else node

    return decide(replace(view, nodes=tuple(map(as_seen, view.nodes))), policy, now)


class Membership:
    """This node's part in the rendezvous, in a thread of its own. All methods are for the other program's threads."""

    def __init__(
        self,
        store: Store,
        identity: NodeRecord,
        policy: Policy,
        port: OfferedPort,
        *,
        lease_ttl_s: float,
        clock: Callable[[], float] = clock,
        rng: random.Random | None = None,
    ) -> None:
        rng = rng or random.SystemRandom()
        self._store = store
        self._port = port
        self._clock = clock
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._participant = Participant(
            identity, policy, lease_ttl_s=lease_ttl_s, rng=rng, now=clock(), decision=decide_for_torchrun
        )
        self._participant.became_ready()
        self._turned_at = clock()
        self._link = StoreLink(
            store, self._participant, lease_ttl_s, self._events.put, clock, rng, self._turns
        )
        peers = PeerLink(self._participant.probed, self._events.put, clock)
        self._driver = Driver(self._participant, self._link, peers.ask, self)
        self._action: Action = Stay()
        """The newest one."""
        self._thread = Thread(self._run, "rendezvous", self._ended)
        self._changed = threading.Condition()
        self._status = Status()
        self._wanted = False
        self._place: WorldPlace | None = None
        self._taken_at = 0.0
        self._finished = 0
        """The generation in which the workers here succeeded."""
        self._problem = ""

    def start(self) -> None:
        self._link.start()
        self._thread.start()

    @property
    def status(self) -> Status:
        status = self._status
        if status.place is not None and not self._turns():
            return replace(status, stop=status.stop or STANDS_STILL)
        return status

    def wait(self, condition: Callable[[Status], object], timeout_s: float | None = None) -> Status:
        """Until the condition holds, the time is over, or there is a problem, as a thread that stands still."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not condition(self._status) and not self._status.problem:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    break
                stood_still = not self._turns()
                self._changed.wait(min(TURNS_EVERY_S, left_s))
                if stood_still and not self._turns():  # twice: this process may have been stopped meanwhile
                    return replace(self._status, problem=STANDS_STILL)
            return self._status

    def wake(self) -> None:
        """Those who wait look again at their condition, which may hang on more than the status."""
        with self._changed:
            self._changed.notify_all()

    def want_place(self) -> None:
        self._events.put(self._place_wanted)

    def give_back(self, place: WorldPlace, end: PlaceEnd) -> Status:
        """No worker of this place is left here. Returns when that is known to the thread."""
        self._events.put(partial(self._end, place, end))
        return self.wait(lambda status: status.place is not place)

    def end_job(self, reason: str) -> None:
        """Close the rendezvous on all nodes. Raises StoreError."""
        identity, policy = self._participant.identity, self._participant.policy
        for _ in range(CLOSING_TRIES):
            found = self._store.read((WORLD_KEY,)).entries
            if not found:
                return  # nobody has met
            world = World.from_json(found[0].value)
            if world.phase is Phase.ENDED:
                return
            failure = Failure(world.generation, reason[:200], reason[:MAX_TEXT])
            cause = Cause(CauseKind.FAILURE, identity.node, reason[:MAX_TEXT], failure)
            ended = replace(world, phase=Phase.ENDED, cause=cause, result=Result.RESTARTS_EXHAUSTED)
            compare = Compare(WORLD_KEY, found[0].mod_revision)
            if self._store.transact((compare,), (Put(WORLD_KEY, ended.to_json()),)).succeeded:
                return
        raise StoreUnavailable(f"the world of job {policy.job!r} changes all the time: it could not be ended")

    def close(self) -> None:
        """Leave at once: the lease is given back, and no node waits for its end."""
        self._events.put(partial(self._give_up, "this node has left the rendezvous"))
        self._thread.join(LONGEST_TURN_S)
        self._link.close()
        lease = self._participant.snapshot.lease
        try:
            if lease is not None:
                self._store.revoke(lease)
        except StoreError as error:
            log.warning("left; could not sign off, the others notice when the lease ends: %s", error)
        self._store.close()
        self._port.listener.close()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._problem:
            again_at = self._turn()
            pause_s = TURNS_EVERY_S if again_at is None else max(0.0, again_at - self._clock())
            run_next(self._events, min(TURNS_EVERY_S, pause_s), self._thread_failed)
        self._ended()

    def _ended(self) -> None:
        """By itself, or because it failed or could not even begin."""
        problem = self._problem or "the rendezvous thread has failed; the log says why"
        self._publish(replace(self._status, problem=problem))

    def _turns(self) -> bool:
        """For any thread."""
        return self._clock() < self._turned_at + STUCK_AFTER_S and not self._status.problem

    def _turn(self) -> float | None:
        """Do all that can be done now; the instant at which there is more to do."""
        now = self._clock()
        participant = self._participant
        if participant.recheck_due(now):  # torchrun's agent has no checks: the cool-down is all
            participant.recheck_begins()
            participant.rechecked(now, passed=True, summary="")
        again_at, action = self._driver.turn(now), self._action
        self._publish(
            Status(
                self._place,
                action.reason if isinstance(action, Stop) else "",
                self._is_finishing(now),
                action if isinstance(action, Leave) else None,
                self._problem,
            )
        )
        self._turned_at = now
        return again_at

    @property
    def undisturbed(self) -> int:
        stops = self._place is None or isinstance(self._action, Stop)
        return 0 if stops or self._place is None else self._place.generation

    @property
    def start_waits_for(self) -> str:
        return ""

    def new_port(self) -> int:
        return self._port.renew()

    def advance(self, now: float) -> bool:
        if self._place is not None and now >= self._taken_at + STABLE_AFTER_S:
            self._participant.workers_are(Condition.STABLE, self._place.generation)
        return False

    def carry_out(self, action: Action, now: float) -> bool:
        self._action = action
        if isinstance(action, Drain):  # torchrun's workers look at no flag: they will be signalled
            return self._participant.workers_are(Condition.NOTIFIED, action.generation)
        if isinstance(action, Start) and self._wanted:
            self._take(action, now)
            return True
        return False

    def _take(self, start: Start, now: float) -> None:
        self._participant.workers_started(start.world)
        rank = start.world.members.index(start.member)
        self._place = WorldPlace(start.world, rank, self._port.listener if rank == 0 else None)
        self._taken_at, self._wanted = now, False

    def _is_finishing(self, now: float) -> bool:
        participant, world = self._participant, self._participant.world
        return (
            world is not None
            and world.trains
            and world.generation == self._finished
            and participant.lease_good(now)
        )

    def _place_wanted(self) -> None:
        self._wanted = True

    def _thread_failed(self, failure: ThreadFailed) -> None:
        self._give_up(failure.reason)

    def _give_up(self, problem: str) -> None:
        self._problem = problem

    def _end(self, place: WorldPlace, end: PlaceEnd) -> None:
        if place is not self._place:
            return
        participant, generation = self._participant, place.generation
        if end is PlaceEnd.FAILED:
            node = participant.identity.node
            summary = f"workers on node {node} failed; torchrun on that node says how"
            participant.workers_failed(Failure(generation, f"workers on node {node}", summary))
        elif end is PlaceEnd.SUCCEEDED:
            participant.workers_are(Condition.SUCCEEDED, generation)
            self._finished = generation
        self._place = None
        participant.workers_gone(generation)

    def _publish(self, status: Status) -> None:
        if status == self._status:
            return
        if status.stop and not self._status.stop and status.place is not None:
            log.warning("the workers of generation %d must end: %s", status.place.generation, status.stop)
        with self._changed:
            self._status = status
            self._changed.notify_all()
