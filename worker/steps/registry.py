"""What a planned change asks of each Checkpointer, and what belongs together does not go on from two steps.

A script may have several Checkpointers, and the last step of a generation is kept in the memory of each. Where one of
them finds no room, the others give that step up, too. The copy that was made of it may have taken the place of a newer
one than what is left elsewhere: so all go back to the newest copy that all have, or to the disk where there is none. No
torch here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

NO_COPY = (-1, -1)
"""Older than every copy."""


class InMemory(Protocol):
    """A Checkpointer's copies in memory on this node."""

    def give_up(self, step: int) -> None:
        """Drop the copy of this generation's `step`."""

    def versions(self, step: int) -> frozenset[tuple[int, int]] | None:
        """Generation and step of each copy. None: it has no part in this step."""

    def go_back(self, step: int, version: tuple[int, int]) -> None:
        """Drop all copies newer than that one, if it has a part in this step."""


class DrainSaver(InMemory, Protocol):
    """What a Checkpointer that takes part in training can do for a planned change."""

    @property
    def saves_alone(self) -> bool:
        """Whether it could do so without the other ranks."""

    def save_last_step(self, step: int, *, leaves: bool) -> bool:
        """Make the state after this step survive this process, and this node where that `leaves`. Every rank calls it,
        and waits there for the others.

        False: it does not, which the log has."""

    def order_write(self, step: int) -> None:
        """All Checkpointers have kept this step: let the disk writer have what is only in memory."""

    def save_last_step_alone(self, step: int) -> bool:
        """The same without the others; False when this node has no room for it."""


class Checkpointers:
    """Those of a process that take part in training, in the order in which every rank has let them."""

    def __init__(self) -> None:
        self._by_directory: dict[str, DrainSaver] = {}

    def add(self, directory: str, saver: DrainSaver) -> None:
        """Its state is kept in planned changes from now on, instead of that of an earlier one of this directory."""
        self._by_directory[directory] = saver

    def all(self) -> tuple[DrainSaver, ...]:
        """All are kept at one step, or none is."""
        return tuple(self._by_directory.values())

    def clear(self) -> None:
        """A child process takes no part."""
        self._by_directory.clear()


def give_up(step: int, owners: Iterable[InMemory]) -> None:
    """Not all of these have kept `step`."""
    owners = tuple(owners)
    for owner in owners:
        owner.give_up(step)
    versions = [versions for owner in owners if (versions := owner.versions(step)) is not None]
    newest = max(frozenset[tuple[int, int]]().union(*versions).intersection(*versions), default=NO_COPY)
    for owner in owners:
        owner.go_back(step, newest)
