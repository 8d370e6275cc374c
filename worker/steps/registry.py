"""What a planned change asks of each Checkpointer, and what belongs together does not go on from two steps.

A script may have several Checkpointers, and the last step of a generation is kept in the memory of each. Where one of
them finds no room, the others give that step up, too. The copy that was made of it may have taken the place of a newer
one than what is left elsewhere: so all go back to the newest copy that all have, or to the disk where there is none. No
torch here.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from ..errors import CheckpointError
from ..wire.shared_progress import clock_ns

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

    def __init__(self, now_ns: Callable[[], int] = clock_ns) -> None:
        self._now_ns = now_ns
        self._owners: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
        """By the real path of its directory, each Checkpointer that writes there, as long as the script has it."""
        self._by_directory: dict[str, tuple[DrainSaver, int]] = {}
        """With the instant since when it takes part."""
        self._durable: set[str] = set()
        """The real paths where this process has seen a save become durable."""

    def claim(self, directory: str, owner: object) -> bool:
        """Until it is released, or collected. Raises CheckpointError where another one has the directory.

        True: what an earlier one has saved there in this process is durable."""
        path = os.path.realpath(directory)
        if self._owners.setdefault(path, owner) is not owner:
            gc.collect()  # the script may have dropped it within a reference cycle
            if self._owners.setdefault(path, owner) is not owner:
                raise CheckpointError(
                    f"this process has a Checkpointer of {directory} already, and each would load what the other one "
                    "has saved: give each a directory, or put both parts into one Checkpointer, or close() the first"
                )
        return path in self._durable

    def saved(self, directory: str) -> None:
        """Every rank: what was saved there is durable."""
        self._durable.add(os.path.realpath(directory))

    def release(self, directory: str, owner: object) -> None:
        """Another Checkpointer may have its directory."""
        path = os.path.realpath(directory)
        if self._owners.get(path) is owner:
            del self._owners[path]

    def add(self, directory: str, saver: DrainSaver) -> None:
        """Its state is kept in planned changes from now on."""
        self._by_directory[directory] = saver, self._now_ns()

    def remove(self, saver: DrainSaver) -> None:
        for directory, (one, _) in list(self._by_directory.items()):
            if one is saver:
                del self._by_directory[directory]

    def all(self, since_ns: int = 0) -> tuple[DrainSaver, ...]:
        """Those that take part since then. All are kept at one step, or none is."""
        return tuple(saver for saver, since in list(self._by_directory.values()) if since >= since_ns)

    def begin_another_training(self, since_ns: int) -> list[str]:
        """Only those take part in it that were loaded since then; the directories of the others."""
        over = [directory for directory, (_, since) in self._by_directory.items() if since < since_ns]
        for directory in over:
            del self._by_directory[directory]
        return over

    def clear(self) -> None:
        """A child process has none."""
        self._owners.clear()
        self._durable.clear()
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
