"""Repeated network failures *widen* some timeouts of the workers: by how many steps, and how far.

The answer follows from what all nodes know alike, so that every node chooses the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....rendezvous.records import CauseKind, World
from ..failures.causes import NETWORK


@dataclass(frozen=True, slots=True)
class WideningPolicy:
    """From which failure on timeouts grow, and how far: the last of each tuple is the limit.

    NCCL's waits: with n retries of a connection n (n + 1) / 20 s, and with an InfiniBand timeout of t
    7 * 4.096 us * 2^t until a path counts as dead.
    """

    after: int = 2
    """So many failures in a row without progress, of which the last was the network's, are *repeated*."""
    socket_retries: tuple[int, ...] = (34, 48, 68)  # 60, 118, 235 s; 34 is NCCL's own
    ib_timeout: tuple[int, ...] = (20, 21, 22)  # 30, 60, 120 s; 20 is NCCL's own
    process_group: tuple[float, ...] = (1.0, 2.0, 4.0)

    @property
    def most(self) -> int:
        return len(self.process_group) - 1


WIDENING = WideningPolicy()


def widening(world: World, policy: WideningPolicy = WIDENING) -> int:
    """By how many steps the timeouts of this generation are widened; 0 as soon as one has made progress."""
    failure = world.cause.failure
    if world.cause.kind is not CauseKind.FAILURE or failure is None:
        return 0
    if failure.cause not in NETWORK:
        return 0
    return min(policy.most, max(0, world.restarts.without_progress - policy.after + 1))
