"""How long this node waits for the others, and what its own checks hold back: its join, its return.

Three clocks, all started by what this node itself sees, and so never compared with another node's:

- nothing trains here, and this node neither stands by a world that trains nor has done its part of it: after
  `join_timeout_s` the node gives up;
- a drain is under way: after `drain_timeout_s` the workers are signalled;
- the node was asked to leave: it waits a little for the coordinator to stop everybody, then stops its workers alone,
  and when it has none, it stays a little longer than the others' drain may take. Where its machine goes away at a known
  instant, `leave_times` divides what is left, and none of these waits is longer.

A node whose checks have not passed (`JoinHold`) has no lease and so no record, is no node of the job, and watches
nothing. It reads the world once after each new reason: so it ends with the job, and a host of the store stays for the
nodes that train.

An excluded node checks itself after a cool-down (`CoolDown`); a record of a passed check readmits it. The first
cool-down is `first_s`; it is twice as long for each further exclusion of this node, and for each check that has failed
since, up to `MOST_S`. The check is due at once where

- the agent was started again since the exclusion: an operator has looked at the node;
- the job stands still for `STANDSTILL_S`: it may lack just this node.

Only an operator ends an exclusion that an operator has asked for. Instants are seconds on this node's monotonic clock;
infinity is never.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..coordinator.view import Policy
from ..messages import Exclusion, Recheck
from ..records import WORLD_KEY, World
from ..store.interface import Read
from .node_actions import Leave

LEAVE_TOGETHER_S = 3.0
"""How long a leaving node waits for the coordinator to stop everybody, before it stops its workers alone."""

LINGER_S = 1.0
"""How long a leaving node whose workers have ended waits for the others beyond the time of a drain."""


@dataclass(frozen=True, slots=True)
class LeaveTimes:
    """By when the parts of a leave are over, where the machine goes away. Without such an end: never."""

    drained_by: float = math.inf
    """Workers end by themselves until then. Then this node asks all nodes to stop."""
    drain_ended_by: float = math.inf
    """The other nodes may stop with this one until then. Then it stops its workers alone."""
    stopped_by: float = math.inf
    """This node kills the workers that are left, and waits for no other node any more."""
    saved_by: float = math.inf
    """The disk writer saves until then what only this node has. Then the log says what is lost."""


TOGETHER_S = 0.5
"""How long a node whose machine goes away waits for the others to end a drain with it, before it stops its workers."""


def leave_times(now: float, ends_at: float) -> LeaveTimes:
    """`ends_at` is when the machine goes away; infinity: not known.

    Two thirds of the time for a common last step, a sixth for those who have not come to one, and the rest for the
    disk and the goodbye.
    """
    if ends_at == math.inf:
        return LeaveTimes()
    left_s = max(0.0, ends_at - now)
    drained_by, stopped_by = now + left_s * 2 / 3, now + left_s * 5 / 6
    together_s = min(TOGETHER_S, (stopped_by - drained_by) / 2)
    return LeaveTimes(drained_by, drained_by + together_s, stopped_by, ends_at - min(1.0, left_s / 10))


class Deadlines:
    """The three clocks of one agent, in all its incarnations. Call `look` before you read any of them."""

    def __init__(self, policy: Policy, now: float) -> None:
        self._policy = policy
        self._idle_since = now
        """Infinity while something trains."""
        self._leaving_since = math.inf
        self._ends_at = math.inf
        self.leave_times = LeaveTimes()
        self._drain = 0, math.inf
        """The newest generation that drains or has drained, and the instant at which this node first saw so."""
        self._drains = False

    def leave(self, now: float, ends_at: float) -> None:
        """This node was asked to leave. The first call begins the leave; a later one may bring another `ends_at`."""
        self._leaving_since = min(self._leaving_since, now)
        if ends_at != self._ends_at:
            self._ends_at, self.leave_times = ends_at, leave_times(now, ends_at)

    def look(self, world: World | None, *, idle: bool, now: float) -> None:
        """What there is to wait for. `idle`: nothing trains here, and no other node trains for this one."""
        if not idle:
            self._idle_since = math.inf
        else:
            self._idle_since = min(self._idle_since, now)
        self._drains = world is not None and world.drains
        if world is not None and world.drains and self._drain[0] != world.generation:
            self._drain = world.generation, now

    @property
    def give_up_at(self) -> float:
        """The end of the join timeout, which does not cut a drain short."""
        over_at = self._idle_since + self._policy.join_timeout_s
        return max(over_at, self.drain_over_at) if self._drains else over_at

    @property
    def leave_alone_at(self) -> float:
        """When a leaving node no longer waits for the others to stop with it."""
        return min(self._leaving_since + LEAVE_TOGETHER_S, self.leave_times.drained_by)

    @property
    def drain_over_at(self) -> float:
        """When the workers have had the whole time of the drain that is under way to end by themselves."""
        if not self._drains:
            return math.inf
        return min(self._drain[1] + self._policy.drain_timeout_s, self.leave_times.drain_ended_by)

    @property
    def overdue_at(self) -> float:
        """When all are to stop, because this node cannot wait for the end of the drain."""
        return self.leave_times.drained_by if self._drains else math.inf

    @property
    def wait_over_at(self) -> float:
        """When a leaving node without workers no longer stays for the others."""
        since = self.drain_over_at if self._drains else self.leave_alone_at + self._policy.drain_timeout_s
        return min(since + LINGER_S, self.leave_times.stopped_by)

    @property
    def instants(self) -> tuple[float, ...]:
        return self.give_up_at, self.leave_alone_at, self.overdue_at, self.drain_over_at, self.wait_over_at


MOST_S = 3600.0

STANDSTILL_S = 15.0
"""Longer than the longest pause before a restart."""


class CoolDown:
    """The cool-down of one agent, in all its incarnations. Call `look` before you read `due_at`."""

    def __init__(self, life: str, first_s: float) -> None:
        self._life, self._first_s = life, first_s
        self._times = 0
        """The number of the exclusion whose cool-down runs; 0: there is none."""
        self._ends_at = math.inf
        self._stood_still_at = math.inf
        self._failed = 0
        self._checking = False

    def look(self, exclusion: Exclusion | None, stands_since: float | None, now: float) -> None:
        """`exclusion` of this node, while it is in force; `stands_since`: when the job was seen to stand still."""
        mine = exclusion if exclusion is not None and not exclusion.by_operator else None
        if (mine.times if mine is not None else 0) != self._times:
            self._times, self._failed, self._checking = mine.times if mine is not None else 0, 0, False
            self._ends_at = math.inf
            if mine is not None:
                self._ends_at = now + self._length_s if mine.life == self._life else now
        self._stood_still_at = stands_since + STANDSTILL_S if stands_since is not None else math.inf

    @property
    def due_at(self) -> float:
        """When this node is to check itself; infinity: not at all, or a check is under way."""
        if not self._times or self._checking:
            return math.inf
        # A check that has failed is not repeated at once, however long the job stands still.
        return min(self._ends_at, self._stood_still_at) if not self._failed else self._ends_at

    def begin(self) -> None:
        """The check that was due begins."""
        self._checking = True

    def checked(self, now: float, *, passed: bool, summary: str) -> Recheck | None:
        """The result for this node's record; None if the exclusion is over meanwhile."""
        if not self._times:
            return None
        if not passed:
            self._checking = False
            self._failed += 1
            self._ends_at = now + self._length_s
        return Recheck(self._times, passed, summary)

    @property
    def _length_s(self) -> float:
        return min(self._first_s * 2.0 ** min(self._times - 1 + self._failed, 30), MOST_S)


class JoinHold:
    """`why` is a sentence for people; empty: the node may join."""

    def __init__(self, first: str = "") -> None:
        """`first` is the reason before the driver has found anything, also for each later life of the node."""
        self._first = self.why = first
        self._look_due = False
        self._ended: int | None = None
        """The generation with which the job had ended at the first look, 0 where it had not; None: not looked yet."""
        self.job_goes_on = False
        """The other nodes had a world at the newest look."""

    def begin_again(self) -> None:
        self.why = self._first

    def set(self, why: str) -> None:
        self.why, self._look_due = why, bool(why)

    def next_request(self) -> Read | None:
        """What to ask of the store now: the world."""
        due, self._look_due = self._look_due, False
        return Read((WORLD_KEY,)) if due else None

    def see_world(self, world: World | None) -> Leave | None:
        """What follows: a job that ends while this node is held back ends for it, too."""
        result = world.result if world is not None else None
        if self._ended is None:
            self._ended = world.generation if world is not None and result is not None else 0
        self.job_goes_on = world is not None and result is None
        if world is None or result is None or world.generation == self._ended:
            return None
        return Leave(result, world.cause.detail)
