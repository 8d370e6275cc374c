"""Who gives a copy in memory its checksums: a thread of this process, or the disk writer that is to have it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_agent.worker.checkpointing.saving.slot_copies import SlotCopies
from tests.unit.threads import join_threads


class Event:
    """Of a GPU that copies without an error."""

    def synchronize(self) -> None:
        pass


class Memory:
    """Of one worker; a GPU copies where there are events."""

    def __init__(self, events: list[Event]) -> None:
        self.summed = 0
        self.copy: Any = SimpleNamespace(
            events=events, opened=SimpleNamespace(name="a"), header=SimpleNamespace(size=1)
        )

    def begin(self) -> Any:
        return self.copy

    def costing_a_copy_only(self) -> Any:
        return contextlib.nullcontext()

    def seal(self, copy: Any) -> None:
        pass

    def add_checksums(self, copy: Any) -> None:
        self.summed += 1


@pytest.mark.parametrize("events", [[], [Event()]], ids=["processor", "gpu"])
def test_a_copy_that_the_disk_writer_is_to_have_gets_no_checksums_here(events: list[Event]) -> None:
    memory: Any = Memory(events)
    copies = SlotCopies(memory)
    assert copies.copy(memory.begin, 1, sums=False)
    join_threads("memory-copy")
    assert memory.summed == 0
    assert copies.copy(memory.begin, 2)
    join_threads("memory-copy")
    assert memory.summed == 1
