"""When memory is scarce, as tables."""

from __future__ import annotations

import pytest

from elastic_agent.agent.machine.cgroups import MemoryPolicy, pressure
from elastic_agent.worker.storage.memory.available_memory import MIB, Memory

POLICY = MemoryPolicy(least_share=0.05, least_bytes=1024 * MIB, most_stalled=20.0, relief=1.5)
GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("memory", "before", "scarce"),
    [
        (Memory(600 * MIB, 10 * GIB), False, False),
        (Memory(500 * MIB, 10 * GIB), False, True),
        (Memory(600 * MIB, 10 * GIB), True, True),  # it is over with half as much more
        (Memory(800 * MIB, 10 * GIB), True, False),
        (Memory(1100 * MIB, 500 * GIB), False, False),  # a twentieth of a large machine is much
        (Memory(1000 * MIB, 500 * GIB), False, True),
        (Memory(9 * GIB, 10 * GIB, stalled=19.0), False, False),
        (Memory(9 * GIB, 10 * GIB, stalled=21.0), False, True),
        (Memory(9 * GIB, 10 * GIB, stalled=19.0), True, True),
        (Memory(9 * GIB, 10 * GIB, stalled=13.0), True, False),
    ],
)
def test_scarce_or_not(memory: Memory, before: bool, scarce: bool) -> None:
    assert bool(pressure(POLICY, memory, before=before)) == scarce


def test_the_reason_tells_what_was_seen() -> None:
    assert (
        pressure(POLICY, Memory(100 * MIB, 8 * GIB), before=False)
        == "this machine has 100 MiB left of 8192 MiB"
    )
    stalled = Memory(8 * GIB, 8 * GIB, 44.4, of="the cgroup /x")
    assert (
        pressure(POLICY, stalled, before=False) == "tasks of the cgroup /x wait for memory 44 % of the time"
    )
