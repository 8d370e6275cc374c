"""A node's checks of itself: those that hold back its join, and the one by which it comes back from an exclusion.

A node whose checks have not passed (`JoinHold`) has no lease and so no record, is no node of the job, and watches
nothing. It reads the world once after each new reason: so it ends with the job, and a host of the store stays for the
nodes that train.

An excluded node checks itself after a cool-down (`CoolDown`); a record of a passed check readmits it. The first
cool-down is `first_s`; it is twice as long for each further exclusion of this node, and for each check that has failed
since, up to `MOST_S`. The check is due at once where

- the agent was started again since the exclusion: an operator has looked at the node;
- the job stands still for `STANDSTILL_S`: it may lack just this node.

Only an operator ends an exclusion that an operator has asked for. Instants are seconds on this node's monotonic clock.
"""

from __future__ import annotations

import math

from ..messages import Exclusion, Recheck
from ..records import WORLD_KEY, World
from ..store.interface import Read
from .node_actions import Leave

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


READ_WORLD = Read((WORLD_KEY,))
"""Its value: requests in flight are compared by identity, so each look sends an object of its own."""


class JoinHold:
    """`why` is a sentence for people; empty: the node may join."""

    def __init__(self, first: str = "") -> None:
        """`first` is the reason before the driver has found anything, also for each later life of the node."""
        self._first = first
        self.why = first
        self._read_due = False
        self._before: World | None = None
        self._world: World | None = None
        """As seen at the first and at the newest look."""
        self._seen = False

    def begin_again(self) -> None:
        self.why = self._first

    def set(self, why: str) -> None:
        self.why, self._read_due = why, bool(why)

    def next_request(self) -> Read | None:
        """What to ask of the store now."""
        due, self._read_due = self._read_due, False
        return Read(READ_WORLD.scopes) if due else None

    def see_world(self, world: World | None) -> Leave | None:
        """What follows: a job that ends while this node is held back ends for it, too."""
        if not self._seen:
            self._seen, self._before = True, world
        self._world = world
        if world is None or world.result is None:
            return None
        before = self._before
        ended_before = (
            before is not None and before.result is not None and before.generation == world.generation
        )
        return None if ended_before else Leave(world.result, world.cause.detail)

    @property
    def job_goes_on(self) -> bool:
        """Other nodes had a world when this one looked."""
        return bool(self.why) and self._world is not None and self._world.result is None
