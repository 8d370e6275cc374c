"""Whether memory is scarce on this machine, or in a cgroup of this agent.

*Pressure* is little memory left, or tasks that stand still because others' memory has to be reclaimed first. What has
been given up under pressure comes back only when there is clearly more than what made it go: else it would come and go.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....worker.storage.memory.available_memory import MIB, Memory


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """Memory is scarce when less than this is available, or more of the time is lost."""

    least_share: float = 0.05
    """Of all memory, but at most `least_bytes`: on a large machine a twentieth is much."""
    least_bytes: int = 1024 * MIB
    most_stalled: float = 20.0
    """Per cent of the last ten seconds in which some task waited for memory."""
    relief: float = 1.5
    """So many times the least must be available again before the pressure is over."""


def pressure(policy: MemoryPolicy, memory: Memory, *, before: bool) -> str:
    """Why memory is scarce; empty if it is not. `before`: it was when last asked."""
    least = min(policy.least_bytes, int(policy.least_share * memory.total))
    most_stalled = policy.most_stalled
    if before:
        least, most_stalled = int(policy.relief * least), most_stalled / policy.relief
    if memory.available < least:
        return f"{memory.of} has {memory.available // MIB} MiB left of {memory.total // MIB} MiB"
    if memory.stalled > most_stalled:
        return f"tasks of {memory.of} wait for memory {memory.stalled:.0f} % of the time"
    return ""
