"""Which way a state takes when a Checkpointer keeps it: to memory, to disk, or to both. Pure; no torch here."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Occasion(enum.Enum):
    SAVE = enum.auto()
    """The script saves, on all ranks together."""
    REMEMBER = enum.auto()
    """The script, or `memory_every`, asks for a copy in memory."""
    LAST_STEP = enum.auto()
    """A planned change ends all ranks after this step."""
    LAST_STEP_ALONE = enum.auto()
    """A planned change ends this rank, and some others may never come here."""
    FAILURE = enum.auto()
    """A rank has failed, and this one saves the last finished step just in time."""


class ToDisk(enum.Enum):
    NEVER = enum.auto()
    NOW = enum.auto()
    """By this process, while all ranks wait."""
    BEHIND = enum.auto()
    """By the disk writer, from the copy in memory, while training goes on."""
    AFTERWARDS = enum.auto()
    """By the disk writer, from the copy in memory, once all Checkpointers have kept this step."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What one rank does with its state."""

    copies: bool
    """It copies the state to the memory of its node."""
    disk: ToDisk
    without_copy: ToDisk
    """In place of `disk` where there is no room for the copy."""
    partial: bool
    """The copy counts without the random states of ranks that do not take part."""

    @property
    def does_nothing(self) -> bool:
        return not self.copies and self.disk is ToDisk.NEVER

    def way_to_disk(self, *, copied: bool) -> ToDisk:
        return self.disk if copied else self.without_copy


def plan_save(
    occasion: Occasion, *, rank: int, has_memory: bool, copies_for_node: bool, has_writer: bool
) -> SavePlan:
    """`has_memory`: this node keeps copies; `copies_for_node`: this rank makes them for its node; `has_writer`: the
    agent has a process that writes a copy to disk."""
    copies = has_memory and (copies_for_node or occasion is Occasion.FAILURE)
    partial = occasion in (Occasion.LAST_STEP_ALONE, Occasion.FAILURE)
    if rank != 0 or occasion not in (Occasion.SAVE, Occasion.LAST_STEP):
        return SavePlan(copies, ToDisk.NEVER, ToDisk.NEVER, partial)
    if not copies:
        return SavePlan(copies, ToDisk.NOW, ToDisk.NOW, partial)
    if occasion is Occasion.SAVE:
        return SavePlan(copies, ToDisk.BEHIND if has_writer else ToDisk.NOW, ToDisk.NOW, partial)
    return SavePlan(copies, ToDisk.AFTERWARDS if has_writer else ToDisk.NEVER, ToDisk.NOW, partial)
