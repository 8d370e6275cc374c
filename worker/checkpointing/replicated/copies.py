"""Makes one Checkpointer's copies of a state that is the same on all ranks."""

from __future__ import annotations

from typing import Any

from ...storage.disk.async_save import AsyncSaver
from ...storage.memory.node_memory import NodeMemory
from ...storage.memory.slots import NoRoom
from ..saving.slot_copies import SlotCopies
from .save_plan import Occasion, SavePlan, ToDisk, plan_save


class Copies(SlotCopies):
    """Of a state that is the same on all ranks. `memory` is this node's, if it has any for copies."""

    def __init__(self, memory: NodeMemory | None, disk: AsyncSaver) -> None:
        super().__init__(memory)
        self.memory = memory
        self._disk = disk

    def plan(self, occasion: Occasion, rank: int) -> SavePlan:
        return plan_save(
            occasion,
            rank=rank,
            has_memory=self.memory is not None,
            copies_for_node=self.memory is not None and self.memory.copies_for_node,
            has_writer=self._disk.has_writer,
        )

    def note(self, step: int, random_state: bytes) -> bool:
        """Write down this rank's random state after `step`; False when there is no room for it, which the log has."""
        assert self.memory is not None
        try:
            self.memory.note(step, random_state)
        except NoRoom as refusal:
            self.log_no_copy(refusal)
            return False
        return True

    def make(self, payload: dict[str, Any], plan: SavePlan, *, like: bytes = b"") -> bool:
        """Copy a state to memory; False when that cannot be, see `copy`.

        like: leave room for a random state such as this one for each rank. Raises what `begin_copy` does of a state.
        """
        memory = self.memory
        assert memory is not None
        return self.copy(
            lambda: memory.begin_copy(payload, room_for_random_state=_room_for(like), partial=plan.partial),
            payload["step"],
            self._disk.begin if plan.disk is ToDisk.BEHIND else None,
        )


def _room_for(random_state: bytes) -> int:
    """Another rank's may be longer. What stays empty is below what torch allows behind the end of an archive."""
    return min(len(random_state) + len(random_state) // 4, 60_000) // 8 * 8
