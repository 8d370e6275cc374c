"""What is asked of a store, as data: the node's part of a protocol makes a request, its driver carries it out.

Frozen and small, so that a request can cross a thread or a simulated network; one is distinguished from a later equal
one by identity.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeAlias

from ...codec import Within
from .interface import Compare, Delete, LeaseId, Outcome, Put, Snapshot


@dataclass(frozen=True, slots=True)
class Grant:
    ttl_s: Annotated[float, Within(0, 86400, above=True)]
    """Infinite only in a store that no other process shares (`StoreKind.life_s`), and so never on a wire."""


@dataclass(frozen=True, slots=True)
class Read:
    scopes: tuple[str, ...]
    oldest_under: str | None = None


class Transaction(Protocol):
    """All `writes` if every compare holds, else nothing."""

    @property
    def compares(self) -> tuple[Compare, ...]: ...

    @property
    def writes(self) -> tuple[Put | Delete, ...]: ...


Request: TypeAlias = Grant | Read | Transaction
Answer: TypeAlias = LeaseId | Snapshot | Outcome


@dataclass(frozen=True, slots=True)
class Subscription:
    """The watch that this node needs now."""

    scopes: tuple[str, ...]
    after_revision: int


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
