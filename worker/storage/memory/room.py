"""Whether this node's memory has room for the two slots of one state: the same rule for workers and for replicas.

A slot keeps the memory that it has, so only what two copies need beyond that is asked for. The limit of the agent's
folder holds for all that is in it; besides, a share of the memory, and of the file system in memory, stays free for
headers, records and others.

No torch here: the memory server imports this module.
"""

from __future__ import annotations

from dataclasses import dataclass

from .available_memory import Memory, file_system, read_memory
from .slots import Slots, room_for

LEAST_FREE = 0.05
"""The share that stays free."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes: of both copies of a state, and those of them that the slots do not have yet."""

    both: int
    grows: int

    @staticmethod
    def of(slots: Slots, size: int) -> Need:
        both = 2 * room_for(size)
        return Need(both, max(0, both - slots.taken()))

    def fits(self, now: Memory) -> bool:
        """What the slots have already is never taken back for it."""
        return not self.grows or now.available - self.grows >= least_free(now)


def limiting_levels(folder: str) -> tuple[Memory, ...]:
    """What limits the memory of `folder` now: the level that has the least left, since a cgroup may be a small part of
    its machine, and the file system."""
    least = min(read_memory(), key=lambda level: level.available, default=None)
    return tuple(level for level in (least, file_system(folder)) if level is not None)


def least_free(now: Memory) -> int:
    """Bytes."""
    return int(LEAST_FREE * now.total)
