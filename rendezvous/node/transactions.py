"""What a node of a job writes to the store: the transactions of a `Participant`."""

from __future__ import annotations

from dataclasses import dataclass

from ..records import STOP_KEY, WORLD_KEY, NodeRecord, StopAt, World
from ..store.interface import Compare, Delete, LeaseId, Put

MOST_EVICTED = 32
"""With one write: each costs the store two operations, and a whole rack may be lost at once."""


@dataclass(frozen=True, slots=True)
class WriteRecord:
    compare: Compare
    record: NodeRecord
    lease: LeaseId

    @property
    def compares(self) -> tuple[Compare, ...]:
        return (self.compare,)

    @property
    def writes(self) -> tuple[Put | Delete, ...]:
        return (Put(self.compare.key, self.record.to_json(), self.lease),)


@dataclass(frozen=True, slots=True)
class WriteWorld:
    compare: Compare
    world: World
    evicted: tuple[Compare, ...] = ()
    """Records to delete with it, at most MOST_EVICTED: their nodes are gone, and these lives of them are not in
    `world`."""

    @property
    def compares(self) -> tuple[Compare, ...]:
        return (self.compare, *self.evicted)

    @property
    def writes(self) -> tuple[Put | Delete, ...]:
        return (Put(WORLD_KEY, self.world.to_json()), *(Delete(gone.key) for gone in self.evicted))


@dataclass(frozen=True, slots=True)
class Evict:
    """Delete the records of nodes that are gone, at most MOST_EVICTED.

    Of the coordinator, so that the next oldest node takes its place; of others when no world can be written with which
    they would go, or more than go with it, so that the nodes' next agents get their names.
    """

    compares: tuple[Compare, ...]

    @property
    def writes(self) -> tuple[Put | Delete, ...]:
        return tuple(Delete(gone.key) for gone in self.compares)


@dataclass(frozen=True, slots=True)
class WriteStop:
    """Write where the workers stop, while the world is still the one that waits for it."""

    world: Compare
    compare: Compare
    stop: StopAt

    @property
    def compares(self) -> tuple[Compare, ...]:
        return (self.world, self.compare)

    @property
    def writes(self) -> tuple[Put | Delete, ...]:
        return (Put(STOP_KEY, self.stop.to_json()),)


@dataclass(frozen=True, slots=True)
class Forget:
    """Delete a request to leave that was read."""

    compare: Compare

    @property
    def compares(self) -> tuple[Compare, ...]:
        return (self.compare,)

    @property
    def writes(self) -> tuple[Put | Delete, ...]:
        return (Delete(self.compare.key),)
