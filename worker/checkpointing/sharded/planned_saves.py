"""A Checkpointer of a sharded state as it takes part in training.

No guard keeps it: what a rank that dies had of it, no other rank has.
"""

from __future__ import annotations

import logging

from ...storage.memory.shard_memory import ShardMemory
from ...storage.replication.copy_rule import Version
from ..saving.planned_saver import PlannedSaver
from .saving import ShardSaving
from .shard_replicas import ShardReplicas

logger = logging.getLogger(__name__)


class ShardedPlannedSaver(PlannedSaver):
    saves_alone = False
    """No rank has what the others have."""

    def __init__(
        self,
        directory: str,
        memory: ShardMemory | None,
        replicas: ShardReplicas | None,
        saving: ShardSaving,
    ) -> None:
        super().__init__(directory, memory, saving)
        self._replicas = replicas
        self._saving = saving

    def save_last_step(self, step: int, *, leaves: bool) -> bool:
        return self.is_beyond(step) or self._saving.save_last_step(step, leaves=leaves)

    def order_write(self, step: int) -> None:
        self._saving.order_write(step)

    def save_last_step_alone(self, step: int) -> bool:
        if self.is_beyond(step):
            return True
        logger.warning("step %d is not kept: its shards are on all ranks, and some do not come here", step)
        return False

    def go_back(self, step: int, version: Version) -> None:
        super().go_back(step, version)
        if self._replicas is not None and not self.is_beyond(step):
            self._replicas.abandon_newer(version)
