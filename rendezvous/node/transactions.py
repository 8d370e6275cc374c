"""What a node of a job asks of the store: the transactions of a `Participant`, and the one request under way."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..records import STOP_KEY, WORLD_KEY, Record, StopAt, World
from ..store.interface import Compare, Delete, LeaseId, Put, Request

MOST_EVICTED = 32
"""With one write: each costs the store two operations, and a whole rack may be lost at once."""


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class WriteRecord(Generic[R]):
    """What a node reports about itself: of a job, or of a pool."""

    compare: Compare
    record: R
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
class RetryPolicy:
    """After an unanswered request: full jitter up to a doubling wait; unlimited, the lease decides when to stop."""

    first_wait_s: float = 0.05
    max_wait_s: float = 1.0

    def wait_s(self, attempt: int, rng: random.Random) -> float:
        return rng.uniform(0.0, min(self.max_wait_s, self.first_wait_s * 2.0 ** min(attempt, 20)))


RETRY = RetryPolicy()


class PendingRequest:
    """The one request under way, if any, and the instant before which there is no other."""

    def __init__(self, retry: RetryPolicy, rng: random.Random, now: float) -> None:
        self.asked_at = now
        """When the newest request was made."""
        self.not_before = now
        self.failures = 0
        """Requests in a row that got no answer."""
        self._retry = retry
        self._rng = rng
        self._request: Request | None = None

    def may_ask(self, now: float) -> bool:
        return self._request is None and now >= self.not_before

    def ask(self, request: Request | None, now: float) -> Request | None:
        self._request, self.asked_at = request, now
        return request

    def ended(self, request: Request) -> bool:
        """There is an answer, or none will come. False for an older request, of which nothing counts any more."""
        if request is not self._request:
            return False
        self._request = None
        return True

    def retry_later(self, now: float) -> None:
        """There was no answer."""
        self.not_before = now + self._retry.wait_s(self.failures, self._rng)
        self.failures += 1

    def pause(self, now: float) -> None:
        """Ask again a little later."""
        self.not_before = now + self._retry.max_wait_s / 4

    def forget(self) -> None:
        self._request = None
