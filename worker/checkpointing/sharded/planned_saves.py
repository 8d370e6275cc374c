"""A Checkpointer of a sharded state as it takes part in planned changes, see `steps/drain`."""

from __future__ import annotations

import logging

from ...steps import progress
from ...storage.memory.shard_memory import ShardMemory
from .saving import ShardSaving

logger = logging.getLogger(__name__)


class ShardPlannedSaves:
    """A `registry.DrainSaver`."""

    saves_alone = False
    """No rank has what the others have."""

    def __init__(self, directory: str, memory: ShardMemory | None, saving: ShardSaving) -> None:
        self._directory = directory
        self._memory = memory
        self._saving = saving

    def register(self) -> None:
        """From here on this state is kept at the last step of a planned change."""
        progress.checkpointers.add(self._directory, self)

    def _is_beyond(self, step: int) -> bool:
        """These are the steps of another training, begun in this process after this one was done."""
        floor = self._saving.floor
        return floor is not None and step < floor

    def save_last_step(self, step: int) -> bool:
        return self._is_beyond(step) or self._saving.save_last_step(step)

    def order_write(self, step: int) -> None:
        self._saving.order_write(step)

    def save_last_step_alone(self, step: int) -> bool:
        if self._is_beyond(step):
            return True
        logger.warning("step %d is not kept: its shards are on all ranks, and some do not come here", step)
        return False

    def give_up(self, step: int) -> None:
        memory = self._memory
        if memory is not None:
            memory.drop((memory.place.generation, step))

    def versions(self, step: int) -> frozenset[tuple[int, int]] | None:
        if self._is_beyond(step):
            return None
        return self._memory.versions() if self._memory is not None else frozenset()

    def go_back(self, step: int, version: tuple[int, int]) -> None:
        if self._memory is not None and not self._is_beyond(step):
            self._memory.abandon_newer(version)
