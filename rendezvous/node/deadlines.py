"""How long this node waits for the others: for a world to train in, in a drain, and before it leaves.

Three clocks, all started by what this node itself sees, and so never compared with another node's:

- nothing trains here, and this node neither stands by a world that trains nor has done its part of it: after
  `join_timeout_s` the node gives up;
- a drain is under way: after `drain_timeout_s` the workers are signalled;
- the node was asked to leave: it waits a little for the coordinator to stop everybody, then stops its workers alone,
  and when it has none, it stays a little longer than the others' drain may take. Where its machine goes away at a known
  instant, `leave_times` divides what is left, and none of these waits is longer.

Instants are seconds on this node's monotonic clock; infinity is never.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..coordinator.view import Policy
from ..records import World

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
