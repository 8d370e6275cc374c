"""Makes one Checkpointer's copies in this node's memory, and hands them to the disk; logs once why there is none.

While a GPU copies, training goes on: a thread waits for it, seals the copy and hands it on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ...state.sharding.layout import CannotLayOut
from ...steps import progress
from ...storage.memory.copy_header import Header
from ...storage.memory.slot_memory import CopyUnderWay, SlotMemory
from ...storage.memory.slots import CopyLost, HeldSlot, NoRoom, Slots, SlotsBusy
from ...wire.messages import SaveResult

logger = logging.getLogger(__name__)

ToDiskBehind = Callable[[Slots, HeldSlot], None]
"""Lets the disk writer have a copy while training goes on."""


class SlotCopies:
    """The copies in this node's memory, if it has any; one at a time is being made."""

    def __init__(self, memory: SlotMemory | None) -> None:
        self.blocked_s = 0.0
        """For which training stood still in the newest copy."""
        self.memory = memory
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        """Completes the newest copy."""
        self._filling = ""
        """The slot that it completes."""
        self._afterwards: ToDiskBehind | None = None
        """Gets that copy when it is complete, unless it is lost."""
        self._handing_on = threading.Lock()
        self._lost = ""
        """Why the newest copy that the thread was to complete is not there."""
        self._refused = ""
        """Why there is no copy, as the name of the error; empty: there is one."""

    def copy(self, begin: Callable[[], CopyUnderWay], step: int) -> bool:
        """Make the copy that `begin` begins; False when that cannot be, which is logged when it begins and ends.

        Raises what `begin` does of a state.
        """
        started_s = time.monotonic()
        size = 0
        try:
            with self._lock:
                self._join()
                self._lost = ""
                copy = begin()
                self._complete(copy)
                size = copy.header.size
        except (NoRoom, SlotsBusy, CannotLayOut) as refusal:
            self.log_no_copy(refusal)
            return False
        finally:
            self.blocked_s = time.monotonic() - started_s
            result: SaveResult = "ok" if size else "error"
            progress.checkpoint_save(
                step, result, self.blocked_s, size, tier="memory", blocked_s=self.blocked_s
            )
        self.log_copied(step)
        return True

    @property
    def filling(self) -> str | None:
        """The slot into which a GPU still copies."""
        return self._filling or None

    def hand_on(self, lend: Callable[[], tuple[Slots, HeldSlot]], to_disk: ToDiskBehind) -> None:
        """Let the disk have the newest copy: now, or when it is complete. `lend` gives one that is, and may raise.

        Raises CopyLost when it is lost by now.
        """
        with self._handing_on:
            if self._filling:
                self._afterwards = to_disk
                return
        if self._lost:
            raise CopyLost(self._lost)
        to_disk(*lend())

    def settle(self) -> None:
        """Wait until the newest copy is complete. Raises CopyLost, once, when it is not there."""
        self._join()
        lost, self._lost = self._lost, ""
        if lost:
            raise CopyLost(lost)

    def settled(self) -> bool:
        """Whether the newest copy is complete in memory, after a wait for it; the log has why not."""
        try:
            self.settle()
        except CopyLost:
            return False
        return True

    def _complete(self, copy: CopyUnderWay) -> None:
        """Now, or in a thread while a GPU copies. Raises NoRoom."""
        assert self.memory is not None
        if copy.events:
            self._filling = copy.opened.name
            thread = threading.Thread(target=self._complete_later, args=(copy,), name="memory-copy")
            try:
                thread.start()
            except RuntimeError:  # no thread can be started now: training waits instead
                self._complete_later(copy)
            else:
                self._thread = thread
            return
        with self.memory.costing_a_copy_only():
            try:
                self.memory.seal(copy)
            except BaseException:
                copy.opened.close()
                raise

    def _complete_later(self, copy: CopyUnderWay) -> None:
        """In a thread of its own: `settle` raises whatever goes wrong."""
        assert self.memory is not None
        try:
            for event in copy.events:
                event.synchronize()
            self.memory.seal(copy)
        except Exception as error:
            copy.opened.close()
            self._lose(copy.header, error)
        with self._handing_on:
            to_disk, self._afterwards, self._filling = self._afterwards, None, ""
        if to_disk is not None and not self._lost:
            try:
                to_disk(*self.memory.lend(copy.header.version))
            except Exception as error:
                self._lose(copy.header, error)

    def _lose(self, header: Header, error: Exception) -> None:
        assert self.memory is not None
        reason = self.memory.reason(error)
        self._lost = f"step {header.step} is not in memory: {reason}"
        logger.warning(
            "a copy to memory did not end, the older one is kept: step=%d reason=%s", header.step, reason
        )

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def log_no_copy(self, refusal: Exception) -> None:
        if type(refusal).__name__ != self._refused:
            self._refused = type(refusal).__name__
            logger.warning("no copy in memory, only what is on disk survives: reason=%s", refusal)

    def log_copied(self, step: int) -> None:
        if self._refused:
            self._refused = ""
            logger.warning("copies in memory again: step=%d", step)
