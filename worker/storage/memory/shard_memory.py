"""The copies that one worker makes of its part of a sharded state: in two slots of its own, which no other rank fills.

No rank has the whole, so a state exists only as the copies of all ranks together: a slot is overwritten only where all
ranks have agreed on the version that they keep (`storage/replication/copy_rule`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from ...state.sharding.layout import ShardLayout
from ...wire.environment import WorkerEnv
from ...wire.run import this_run
from .available_memory import size_text
from .copy_header import Header, RankShards
from .slot_folders import SlotFolder
from .slot_memory import CopyUnderWay, RankPlace, SlotMemory
from .slots import HeldSlot, NoRoom, OpenSlot, Slots, room_for

logger = logging.getLogger(__name__)


class ShardMemory(SlotMemory):
    """One Checkpointer's slots in the memory of this node, for the shards of this worker."""

    def __init__(
        self, slots: Slots, limit: int, place: RankPlace, local_world_size: int, replicas: int
    ) -> None:
        """`replicas` is how many other nodes keep copies; this node keeps as many of theirs."""
        super().__init__(slots, limit, place)
        self._folders_of_node = local_world_size * (1 + replicas)
        self._announced = 0

    @property
    def keeps_common(self) -> bool:
        """Whether this rank's copy also holds what is the same on all ranks, for all of its node."""
        return self.place.local_rank == 0

    def headers(self) -> dict[str, Header]:
        """By slot, what this worker's two slots hold."""
        return self._slots.headers()

    def digest_of(self, version: tuple[int, int]) -> str:
        """Of the shards in this worker's own copy of that version; empty: it has none."""
        headers = self.headers().values()
        found = (one.shards.digest for one in headers if one.version == version and one.shards is not None)
        return next(found, "")

    def noted(self, version: tuple[int, int]) -> bytes:
        """The random state of this rank that belongs to that version, if it was written down; see `ShardSaving`."""
        return self._slots.random_states.of(version, self.place.world_size).get(self.place.rank, b"")

    def is_free(self, name: str) -> bool:
        """Whether no process reads that slot now."""
        return self._slots.is_free(name)

    def begin_copy(
        self, layout: ShardLayout, step: int, *, protected: tuple[int, int] | None, twins: tuple[int, ...]
    ) -> CopyUnderWay:
        """Copy this rank's shards into the slot that does not hold the version `protected`. `seal` follows.

        Raises NoRoom, SlotsBusy.
        """
        self._check_room(layout.size)
        with self.costing_a_copy_only():
            opened = self._begin(layout.size, protected=protected)
            try:
                mapping = self._mapped(opened)
                opened.trim()
                events = layout.copy_to(mapping.view, mapping.tensor)
            except BaseException:
                opened.close()
                raise
        header = header_of_shards(
            layout,
            self.place,
            step,
            self.resumed_from,
            common=self.keeps_common,
            twins=twins,
            protected=protected,
        )
        return CopyUnderWay(opened, header, events)

    def hold(self, version: tuple[int, int]) -> HeldSlot:
        """Keep this worker's copy of that version, and open it. Raises OSError, ValueError when it is not here."""
        for name, header in self._slots.headers().items():
            if header.version == version:
                return self._slots.hold(name)
        raise ValueError(f"step {version[1]} of generation {version[0]} is not in {self.folder} any more")

    def lend(self, version: tuple[int, int]) -> tuple[Slots, HeldSlot]:
        """For the disk: that copy, which is not overwritten until it is closed. Raises as `hold`."""
        return self._slots, self.hold(version)

    def map(self, opened: OpenSlot) -> memoryview:
        """The bytes of an open slot, to be filled."""
        return self._mapped(opened).view[: opened.size]

    def _check_room(self, size: int) -> None:
        """Say once, in advance, what all copies of this node will take. Raises NoRoom where that is never to be had."""
        wanted = 2 * room_for(size) * self._folders_of_node
        if wanted > self._limit:
            raise NoRoom(
                f"two copies of each worker's shards, and as many of other nodes' as replicas, take {wanted} bytes on "
                f"this node, and {self._limit} are allowed: raise --memory-checkpoints to that, and the size of "
                "/dev/shm if need be, or take --memory-replicas 0"
            )
        if self.keeps_common and wanted > self._announced:
            self._announced = wanted + wanted // 8
            logger.info(
                "copies of shards will take at most %s of %s on this node, replicas of others included",
                size_text(wanted),
                size_text(self._limit),
            )


def header_of_shards(
    layout: ShardLayout,
    place: RankPlace,
    step: int,
    resumed_from: int,
    *,
    common: bool,
    twins: tuple[int, ...] = (),
    protected: tuple[int, int] | None = None,
) -> Header:
    """Of the copy that has what `layout` says."""
    shards = RankShards(place.rank, layout.table_place, layout.digest, common, twins, protected)
    return Header(
        step, place.generation, resumed_from, place.world_size, layout.size, run=place.run, shards=shards
    )


def local_rank_of(environ: Mapping[str, str]) -> int:
    """This worker's place on its node. LOCAL_RANK is 0 for all workers that see their own devices alone.

    Raises ValueError.
    """
    given = WorkerEnv.of(environ).local_rank
    return given if given >= 0 else int(environ.get("LOCAL_RANK", "0"))


def shard_memory_of(environ: Mapping[str, str], directory: str) -> ShardMemory | None:
    """None where there is no agent, or one that grants no memory."""
    try:
        env = WorkerEnv.of(environ)
        if not env.memory:
            return None
        local_rank = local_rank_of(environ)
        place = RankPlace(
            env.node,
            env.generation,
            int(environ["RANK"]),
            local_rank,
            int(environ["WORLD_SIZE"]),
            this_run(environ).id,
        )
        slots = Slots(env.memory, SlotFolder.of(os.fspath(directory), local_rank))
        return ShardMemory(
            slots, env.memory_bytes, place, int(environ["LOCAL_WORLD_SIZE"]), env.memory_replicas
        )
    except (KeyError, ValueError, OSError) as error:
        logger.warning("no copies in memory, checkpoints go to disk only: reason=%r", error)
        return None
