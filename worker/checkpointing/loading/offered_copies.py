"""Finds the copies in memory: those of this node, and those of standbys, for which the world has no place.

A standby has no rank that could offer them, and may be the only one with some shards: a world of fewer nodes, which
begins when one was lost, may leave out another. The agents name these nodes to all ranks, which share the question.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...ranks.group import Group
from ...storage.memory.copy_header import FoundCopy
from ...storage.memory.slot_folders import SlotFolder, all_folders_of
from ...storage.memory.slots import Slots
from ...storage.replication.client import MemoryClient
from ...storage.replication.key_file import read_key
from ...wire.environment import WorkerEnv
from .selection import Offer

logger = logging.getLogger(__name__)

ASK_S = 5.0
"""For a connection to a memory server, and for its next bytes."""
MOST_ASKED = 16
"""Nodes that one rank asks at the same time."""


@dataclass(frozen=True, slots=True)
class _Answers:
    """Of the nodes that one rank has asked."""

    offers: tuple[Offer, ...]


def offers_of_standbys(env: WorkerEnv, directory: str, group: Group) -> tuple[Offer, ...]:
    """The same on all ranks: each calls it. A node that does not answer is left out, with a warning.

    Raises CheckpointError, as `Group.exchange`.
    """
    standbys = env.memory_standbys.split()
    if not standbys:
        return ()
    mine = _Answers(_ask_all(env, directory, standbys[group.rank :: group.world_size]))
    return tuple(offer for answers in group.exchange(mine) for offer in answers.offers)


def _ask_all(env: WorkerEnv, directory: str, standbys: Sequence[str]) -> tuple[Offer, ...]:
    """Together: the other ranks wait for those that do not answer."""
    if not standbys:
        return ()
    with ThreadPoolExecutor(min(MOST_ASKED, len(standbys))) as threads:
        answers = threads.map(lambda standby: _ask(env, directory, standby), standbys)
        return tuple(offer for offer in answers if offer is not None)


def _ask(env: WorkerEnv, directory: str, standby: str) -> Offer | None:
    node, _, address = standby.partition("=")
    try:
        with MemoryClient(address, read_key(env.memory, ASK_S), ASK_S) as client:
            return Offer(copies=client.copies(directory), node=node, address=address)
    except (OSError, ValueError) as error:
        logger.warning("what node %s has in memory, which stands by, is not known: %s", node, error)
        return None


# ---------------------------------------------------------------- this node's own


def copies_in(memory: str, directory: str, *, is_sharded: bool) -> tuple[FoundCopy, ...]:
    """Those in this node's memory that belong to the checkpoint directory: of its workers, and replicas of other nodes'
    shards. What cannot be read is left out, with a warning."""
    found: list[FoundCopy] = []
    try:
        folders = all_folders_of(memory, SlotFolder.of(directory).directory)
    except OSError as error:
        logger.warning("no copies in memory are found: reason=%s", error)
        return ()
    for folder in [one for one in folders if (one.local_rank is not None) is is_sharded]:
        with contextlib.suppress(OSError), contextlib.closing(Slots(memory, folder, create=False)) as slots:
            for problem in slots.problems():
                logger.warning("a copy in memory is left aside: reason=%s", problem)
            found += (FoundCopy(folder, name, header) for name, header in slots.headers().items())
    return tuple(found)
