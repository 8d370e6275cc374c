"""What a slot in this node's memory holds."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Annotated

from ....codec import Checked, Count, Invalid, Positive, Text, from_plain
from ...wire.files import seal, unseal
from ...wire.messages import RunNameOrNone, SlotName
from .slot_folders import Folder

SCHEMA = 3


@dataclass(frozen=True, slots=True)
class RankShards(Checked):
    """What makes a copy one rank's part of a state that no rank has whole.

    `digest` is of the names, shapes and offsets of all shards: of one state, copies with equal digests hold the same
    shards, bit by bit, as the replica groups of HSDP do. `common`: the copy also has what is the same on all ranks,
    which the first rank of a node keeps for its node.

    `twins` are the other ranks whose copies of this state have the same digest: a rank that is lost with all its
    copies has left no digest. `keep` is the version that the copy rule protected when this copy was begun, see
    `worker/storage/replication/copy_rule.py`.
    """

    rank: Count
    digest: Annotated[str, Text(16, re.compile(r"[0-9a-f]{16}"))]
    common: bool
    twins: tuple[Count, ...] = ()
    keep: tuple[Count, Count] | None = None


WHOLE = RankShards(0, "0" * 16, common=True)
"""Of a copy that has all of a state: on disk it is the one part, of rank 0."""


@dataclass(frozen=True, slots=True)
class Header(Checked):
    """What a slot holds.

    `table` is the place, as offset and length, of the table that says where each tensor lies in the copy
    (`worker/state/sharding/table.py`). `world_size` is the number of ranks, however many of them have copies.
    `resumed_from` is the step from which the generation went on: later ones of older generations are abandoned.
    `rng_holes` are the places, as offset and length, at which the random state of each rank is still to be filled in. A
    copy with holes counts once every rank has written its own down; a `partial` one, made after a rank had failed,
    counts without that.
    `sums` are the checksums of its pieces; empty: nothing has read all of it yet. `run` is the job's, see
    `ownership`. `shards`: what the copy has of a sharded state; None: it has the whole state.
    """

    step: Count
    generation: Count
    resumed_from: Count
    world_size: Positive
    size: Positive
    rng_holes: tuple[tuple[Count, Count], ...] = ()
    partial: bool = False
    sums: tuple[Count, ...] = ()
    run: RunNameOrNone = ""
    shards: RankShards | None = None
    table: tuple[Count, Count] = (0, 0)

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        for hole in self.rng_holes:
            if sum(hole) > self.size:
                raise Invalid(f"header: the hole {hole!r} lies outside the {self.size} bytes of the state")
        if self.rng_holes and len(self.rng_holes) != self.world_size:
            raise Invalid(f"header: {len(self.rng_holes)} holes for {self.world_size} ranks")
        if sum(self.table) > self.size:
            raise Invalid(f"header: the table {self.table!r} lies outside the {self.size} bytes of the state")
        if self.shards is not None:
            if self.shards.rank >= self.world_size:
                raise Invalid(f"header: shards of rank {self.shards.rank} of {self.world_size}")
            if any(twin >= self.world_size or twin == self.shards.rank for twin in self.shards.twins):
                raise Invalid(f"header: the twins {self.shards.twins!r} of rank {self.shards.rank}")

    @property
    def version(self) -> tuple[int, int]:
        """The greater is the newer: a generation goes on from what was before, or abandons what of it was later."""
        return self.generation, self.step

    @property
    def part(self) -> RankShards:
        """What the copy is as a part of a checkpoint on disk."""
        return self.shards or WHOLE

    def is_same_copy(self, other: Header) -> bool:
        """Whether both are of the same bytes: a copy may get checksums, or begin to count without some ranks."""
        return replace(self, sums=(), partial=False) == replace(other, sums=(), partial=False)

    def to_json(self) -> bytes:
        return seal(SCHEMA, self)

    @staticmethod
    def from_json(raw: bytes) -> Header:
        """Raises Invalid."""
        return _header_of(raw)


@functools.lru_cache(maxsize=16)
def _header_of(raw: bytes) -> Header:
    """A copy's header is read several times before it is replaced."""
    return from_plain(Header, unseal(raw, "header", SCHEMA)[1])


@dataclass(frozen=True, slots=True)
class FoundCopy:
    """A copy on one node: `slot` is one of the two in `folder`."""

    folder: Folder
    slot: SlotName
    header: Header


@dataclass(frozen=True, slots=True)
class NotedState(Checked):
    """In one node's memory is the random state of this rank after the state of that version."""

    version: tuple[Count, Count]
    world_size: Positive
    rank: Count
