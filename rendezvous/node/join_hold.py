"""Holds back a node whose checks have not passed: why it may not join, and what the job does meanwhile.

Without a lease it has no record, is no node of the job, and watches nothing. It reads the world once after each new
reason: so it ends with the job, and a host of the store stays for the nodes that train.
"""

from __future__ import annotations

from ..records import WORLD_KEY, World
from ..store.requests import Read
from .node_actions import Leave

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
