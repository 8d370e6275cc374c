"""Whose copy of the state is loaded: every rank tells what it has, and all choose the same.

Generations of one store are numbered in order, so of the copies in memory the newest generation's newest step wins: a
generation that began below a step of an older one has abandoned that step, and one that began at it or beyond has a
step at least as high. The number on a disk may be another store's, so a checkpoint on disk is held against that choice
only if its step is beyond the one at which the choice's generation began: up to there it is what that generation came
from. Beyond it the newer generation wins, of one generation the newer step, and of equals the memory.

Ranks copy without waiting for each other, so the newest copy may be one that some rank did not come to. It counts
only when every rank's random state after it is known, unless the world has changed its size, there is no other, or
it was taken in haste, after a rank had failed: then that rank's random numbers are others than they would have been.

Where nobody has anything in memory the newest step on any disk wins, of one step the newest generation's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import NoUsableCheckpoint
from .files import Manifest
from .slots import Header

MAX_REASON_CHARS = 500


@dataclass(frozen=True, slots=True)
class Copy:
    """A state in one node's memory, and which ranks' random states after it were written down there."""

    header: Header
    ranks: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank has: its disk's newest checkpoint, what does not verify there, and what is in its node's memory.

    One rank of a node offers what the memory holds; all of that `node` can read it.
    """

    manifest: Manifest | None = None
    bad: tuple[str, ...] = ()
    copies: tuple[Copy, ...] = ()
    node: str = ""

    def to_json(self) -> bytes:
        manifest = self.manifest.to_json().decode() if self.manifest else None
        copies = [[copy.header.to_json().decode(), sorted(copy.ranks)] for copy in self.copies]
        return json.dumps(
            [manifest, [one[:MAX_REASON_CHARS] for one in self.bad], copies, self.node]
        ).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Offer:
        manifest, bad, copies, node = json.loads(raw)
        return cls(
            Manifest.from_json(manifest) if manifest else None,
            tuple(bad),
            tuple(Copy(Header.from_json(header), frozenset(ranks)) for header, ranks in copies),
            node,
        )


@dataclass(frozen=True, slots=True)
class Owner:
    """The rank whose checkpoint is loaded: the one on its disk, or the copy in its memory."""

    rank: int
    what: Manifest | Header


def choose_owner(offers: Sequence[Offer]) -> Owner | None:
    """See the module's docstring; of equals the lowest rank's. `offers` are by rank.

    None when nobody has ever had a checkpoint. Raises NoUsableCheckpoint when some exist and none is good.
    """
    disks = [(offer.manifest, -rank) for rank, offer in enumerate(offers) if offer.manifest]
    newest = _newest_copy(offers)
    if newest is not None:
        header, rank = newest
        beyond = [
            ((manifest.generation, manifest.step), place, manifest)
            for manifest, place in disks
            if manifest.step > header.base and (manifest.generation, manifest.step) > header.age
        ]
        if not beyond:
            return Owner(-rank, header)
        _, rank, manifest = max(beyond, key=lambda one: one[:2])
        return Owner(-rank, manifest)
    if disks:
        manifest, rank = max(disks, key=lambda one: (one[0].step, one[0].generation, one[1]))
        return Owner(-rank, manifest)
    bad = [f"rank {rank}: {reason}" for rank, offer in enumerate(offers) for reason in offer.bad]
    if bad:
        raise NoUsableCheckpoint(
            "checkpoints exist and none verifies; not starting again from step 0 by itself. Restore one, or delete "
            f"them to start again. {'; '.join(bad)}"
        )
    return None


def _newest_copy(offers: Sequence[Offer]) -> tuple[Header, int] | None:
    copies = [(copy.header, -rank) for rank, offer in enumerate(offers) for copy in offer.copies]
    counting = [(header, rank) for header, rank in copies if _counts(header, offers)]
    if not copies:
        return None
    return max(counting or copies, key=lambda one: (one[0].age, not one[0].gaps, one[1]))


def _counts(header: Header, offers: Sequence[Offer]) -> bool:
    """Whether every rank can go on from it with its own random state, or could not be expected to."""
    if not header.gaps or header.haste or header.world_size != len(offers):
        return True
    known = {
        rank
        for offer in offers
        for copy in offer.copies
        if copy.header.age == header.age
        for rank in copy.ranks
    }
    return known.issuperset(range(header.world_size))


def nodes_with(header: Header, offers: Sequence[Offer]) -> set[str]:
    """Where that state is in memory. Its bytes may differ from node to node, what they say does not."""
    return {offer.node for offer in offers for copy in offer.copies if copy.header.age == header.age}
