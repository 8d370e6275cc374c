"""Makes one Checkpointer's copies in this node's memory, tells the agent of each, and says once why there is none."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from . import progress
from .layout import CannotLayOut
from .memory import NodeMemory
from .reports import SaveResult
from .slots import CopyLost, Held, NoRoom, Slots, SlotsBusy

logger = logging.getLogger(__name__)


class Copies:
    """`memory` is this node's, if it has any for copies."""

    def __init__(self, memory: NodeMemory | None) -> None:
        self.memory = memory
        self.blocked_s = 0.0
        """For which training stood still in the newest copy."""
        self._copying = threading.Lock()
        self._refused = ""
        """Why there is no copy, as the name of the error; empty: there is one."""

    def note(self, step: int, random_state: bytes) -> bool:
        """Write down this rank's random state after `step`; False when there is no room for it, as was said."""
        assert self.memory is not None
        try:
            self.memory.note(step, random_state)
        except NoRoom as refusal:
            self._say_no_copy(refusal)
            return False
        return True

    def make(
        self,
        payload: dict[str, Any],
        *,
        like: bytes = b"",
        haste: bool = False,
        then: Callable[[Slots, Held], None] | None = None,
    ) -> bool:
        """Copy a state to memory; False when that cannot be, which is said when it begins and when it ends.

        like: leave room for a random state such as this one for each rank. See `NodeMemory.put` for all else.
        """
        assert self.memory is not None
        started_s = time.monotonic()
        size = 0
        try:
            with self._copying:
                size = self.memory.put(payload, room_for_random_state=_room_for(like), haste=haste, then=then)
        except (NoRoom, SlotsBusy, CannotLayOut) as refusal:
            self._say_no_copy(refusal)
            return False
        finally:
            self.blocked_s = time.monotonic() - started_s
            result: SaveResult = "ok" if size else "error"
            progress.checkpoint_save(
                payload["step"], result, self.blocked_s, size, tier="memory", blocked_s=self.blocked_s
            )
        self.say_copied(payload["step"])
        return True

    def settled(self) -> bool:
        """Whether the newest copy is complete in memory, after a wait for it; why not was said."""
        try:
            if self.memory is not None:
                self.memory.settle()
        except CopyLost:
            return False
        return True

    def _say_no_copy(self, refusal: Exception) -> None:
        if type(refusal).__name__ != self._refused:
            self._refused = type(refusal).__name__
            logger.warning("no copy in memory, only what is on disk survives: reason=%s", refusal)

    def say_copied(self, step: int) -> None:
        if self._refused:
            self._refused = ""
            logger.warning("copies in memory again: step=%d", step)


def _room_for(random_state: bytes) -> int:
    """Another rank's may be longer. What stays empty is below what torch allows behind the end of an archive."""
    return min(len(random_state) + len(random_state) // 4, 60_000) // 8 * 8
