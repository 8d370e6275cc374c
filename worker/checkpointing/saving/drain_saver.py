"""A Checkpointer as it takes part in training, of whichever kind its state is: what planned changes (`steps/drain`) and
the guard (`just_in_time`) need of it.

Each one that was loaded, or has a guard, is registered with `progress` in this form: the script has no use for it.
"""

from __future__ import annotations

import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping

from ...state.state_dicts import Part, unwrapped
from ...steps import progress
from ...storage.memory.slot_memory import SlotMemory
from ...wire.shared_progress import clock_ns
from .save_outcomes import SaveOutcomes

logger = logging.getLogger(__name__)


class BaseDrainSaver(ABC):
    """Base of a `registry.DrainSaver`."""

    def __init__(
        self, directory: str, parts: Mapping[str, Part], memory: SlotMemory | None, outcomes: SaveOutcomes
    ) -> None:
        self.directory = directory
        self._objects = [part if isinstance(part, dict) else unwrapped(part) for part in parts.values()]
        self._memory = memory
        self._outcomes = outcomes
        self._loaded: int | None = None
        self._waited_at: int | None = None
        """The instant of the newest step when the script waited, as it does where a training is over."""

    def loaded(self, step: int) -> None:
        """From here on this one's state is kept at the last step of a planned change."""
        if progress.checkpointers.all():
            # Ranks collect garbage at different times, and must ask the same Checkpointers at each step.
            gc.collect()
        for former in all_drain_savers():
            was_waited_for = former._waited_at == progress.newest_step_at()
            if former is not self and (was_waited_for or former._shares_part_with(self)):
                former.leave()
                logger.warning(
                    "the Checkpointer of %s %s, so another training begins with that of %s: the first keeps no step of "
                    "it, unless it is loaded or saved again. close() it where its training is over",
                    former.directory,
                    "was waited for" if was_waited_for else "has a part of the one that is loaded now",
                    self.directory,
                )
        for other in progress.loaded_since_newest_step():
            if isinstance(other, BaseDrainSaver) and other is not self and other._loaded not in (None, step):
                logger.warning(
                    "training goes on from two steps: put what belongs together into one Checkpointer, and close() "
                    "one whose training is over: step=%d directory=%s other_step=%d other_directory=%s",
                    step,
                    self.directory,
                    other._loaded,
                    other.directory,
                )
        self._loaded, self._waited_at = step, None
        self.register()

    def _shares_part_with(self, other: BaseDrainSaver) -> bool:
        return any(mine is one for mine in self._objects for one in other._objects)

    def waited(self) -> None:
        """All that was saved is on disk."""
        self._waited_at = progress.newest_step_at()

    def saved(self) -> None:
        """It is of the training that goes on."""
        self._waited_at = None
        if self.is_over:
            self.register()

    def register(self) -> None:
        progress.checkpointers.add(self.directory, self)

    def leave(self) -> None:
        """Take no part any more."""
        progress.checkpointers.remove(self)

    def end(self) -> None:
        """The script has closed or dropped the Checkpointer: nothing of it is left here. Waits for no other rank."""
        if self in progress.checkpointers.all():
            self._warn_where_training_goes_on()
        self.leave()
        self._outcomes.end()
        if self._memory is not None:
            self._memory.close()

    def forget(self) -> bool:
        """Every rank: no load goes on from what is in memory. Whether this rank had any copy there."""
        return self._memory is not None and self._memory.forget()

    def _warn_where_training_goes_on(self) -> None:
        since_ns = clock_ns()
        next_steps = {newest + 1 for newest in (self._loaded, progress.newest_step()) if newest is not None}

        def warn(step: int) -> None:
            end()
            if step in next_steps and not progress.checkpointers.all(since_ns):
                logger.warning(
                    "step %d is not kept in %s: the script has dropped its Checkpointer. Keep the object for as long "
                    "as the training runs, and close() it after that",
                    step,
                    self.directory,
                )

        end = progress.on_step(warn)

    @property
    def is_over(self) -> bool:
        """It was loaded, and another training has begun since."""
        return self._loaded is not None and self not in progress.checkpointers.all()

    def is_beyond(self, step: int) -> bool:
        """These are the steps of another training, begun in this process after this one was done."""
        floor = self._outcomes.floor
        return floor is not None and step < floor

    # ---------------------------------------------------------------- planned changes: see `registry.DrainSaver`

    @property
    @abstractmethod
    def saves_alone(self) -> bool: ...

    @abstractmethod
    def save_last_step(self, step: int, *, leaves: bool) -> bool: ...

    @abstractmethod
    def order_write(self, step: int) -> None: ...

    @abstractmethod
    def save_last_step_alone(self, step: int) -> bool: ...

    # ---------------------------------------------------------------- copies in memory: see `registry.InMemory`

    def give_up(self, step: int) -> None:
        if self._memory is not None:
            self._memory.drop((self._memory.place.generation, step))

    def versions(self, step: int) -> frozenset[tuple[int, int]] | None:
        if self.is_beyond(step):
            return None
        return self._memory.versions() if self._memory is not None else frozenset()

    def go_back(self, step: int, version: tuple[int, int]) -> None:
        if self._memory is not None and not self.is_beyond(step):
            self._memory.abandon_newer(version)


def all_drain_savers() -> tuple[BaseDrainSaver, ...]:
    """Those that take part now."""
    return tuple(one for one in progress.checkpointers.all() if isinstance(one, BaseDrainSaver))
