"""Finds the copies of shards in this node's memory: those of its workers, and replicas of other nodes'."""

from __future__ import annotations

import contextlib
import logging

from ...storage.memory.copy_header import FoundCopy
from ...storage.memory.slot_folders import folders_of
from ...storage.memory.slots import Slots

logger = logging.getLogger(__name__)


def shard_copies_in(memory: str, directory: str) -> tuple[FoundCopy, ...]:
    """All that belong to the checkpoint directory. What cannot be read is left out, with a warning."""
    found: list[FoundCopy] = []
    try:
        folders = folders_of(memory, directory)
    except OSError as error:
        logger.warning("no copies in memory are found: reason=%s", error)
        return ()
    for folder in folders:
        with contextlib.suppress(OSError), contextlib.closing(Slots(memory, folder, create=False)) as slots:
            for problem in slots.problems():
                logger.warning("a copy in memory is left aside: reason=%s", problem)
            found += (FoundCopy(folder, name, header) for name, header in slots.headers().items())
    return tuple(found)
