"""The two slots of one worker, or of one node: they are filled where there is room, mapped, sealed, and lent out.

Of a state that is the same on all ranks a node has one folder with two slots: its first rank copies for all of it. Of a
sharded state each rank copies its own shards into slots of its own, the first one of a node also what all ranks have
alike. No rank has the whole of that, so a slot is overwritten only where all have agreed on the version that they keep
(`storage/replication/copy_rule`).

While a GPU still copies, the process goes on, and a thread seals the slot when the last byte has come (`slot_copies`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...state.sharding.layout import ShardLayout
from ...wire.environment import WorkerEnv, this_run
from .available_memory import Memory, Need, least_free, limiting_levels, size_text
from .copy_header import Header, NotedState, RankShards
from .random_states import RandomState
from .slot_folders import SlotFolder, all_folders_of
from .slots import HeldSlot, NoRoom, OpenSlot, Slots, room_for, sums_of

logger = logging.getLogger(__name__)

_used: set[str] = set()
"""The folders of this process's Checkpointers."""

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class _Mapping:
    """One slot's pages in this process, kept from one state to the next: page faults cost more than the copy."""

    def __init__(self, opened: OpenSlot) -> None:
        found = os.fstat(opened.fd)
        self._file = (found.st_dev, found.st_ino)
        self._map = mmap.mmap(opened.fd, found.st_size)  # with room to grow, unless it was trimmed
        self._pinned = 0
        for advice in (mmap.MADV_HUGEPAGE, _POPULATE_WRITE):
            with contextlib.suppress(OSError):  # a kernel that knows it not
                self._map.madvise(advice)
        self.view = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch left it without annotations
            self._pin()

    def fits(self, opened: OpenSlot) -> bool:
        found = os.fstat(opened.fd)
        return self._file == (found.st_dev, found.st_ino) and opened.size <= len(self._map)

    def close(self) -> None:
        if self._pinned:
            _cudart().cudaHostUnregister(self._pinned)
        del self.tensor
        self.view.release()
        self._map.close()

    def _pin(self) -> None:
        # Page-locked memory is what a GPU can copy to by itself; without, it is slower and this process waits.
        address = self.tensor.data_ptr()
        failed = _cudart().cudaHostRegister(address, len(self._map), 0)
        if int(failed):
            logger.warning(
                "the memory for checkpoints cannot be page-locked, copies are slower: reason=%s", failed
            )
        else:
            self._pinned = address


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Whose memory it is."""

    node: str
    generation: int
    rank: int
    local_rank: int
    world_size: int
    run: str = ""

    @property
    def is_on_node_of_rank_0(self) -> bool:
        """The ranks of a node follow one another."""
        return self.rank == self.local_rank


@dataclass(frozen=True, slots=True)
class CopyUnderWay:
    """A slot that is being filled."""

    opened: OpenSlot
    header: Header
    events: Sequence[torch.cuda.Event]
    """When they have come, the GPU has copied all of it; none: no GPU has any part in it."""


class SlotMemory:
    """What one Checkpointer has in the memory of this node, as one rank sees it."""

    def __init__(self, slots: Slots, limit: int, place: RankPlace, folders_with_shards: int = 0) -> None:
        """`limit` is the most bytes that the agent's folder may take, with all that is in it. `folders_with_shards`:
        how many there will be of a sharded state, replicas of other nodes' included."""
        self.resumed_from = 0
        """The step from which this generation went on: 0 until `load` has found out."""
        self.place = place
        self._slots = slots
        self._limit = limit
        self._folders_with_shards = folders_with_shards
        self._announced = 0
        self._mappings: dict[str, _Mapping] = {}
        _used.add(slots.folder)
        # Not earlier: what is still registered may use them.
        weakref.finalize(self, slots.close).atexit = False

    def close(self) -> None:
        """The script has no use for it any more. The copies stay, until others need their room."""
        while self._mappings:
            with contextlib.suppress(BufferError):  # it goes with its last user
                self._mappings.popitem()[1].close()
        _used.discard(self.folder)

    @property
    def folder(self) -> str:
        """Of the slots; it outlives this process."""
        return self._slots.folder

    @property
    def keeps_common(self) -> bool:
        """Whether this rank copies what is the same on all ranks, for all of its node."""
        return self.place.local_rank == 0

    # ---------------------------------------------------------------- putting in

    def begin_copy(
        self,
        layout: ShardLayout,
        header: Header,
        *,
        protected: tuple[int, int] | None = None,
    ) -> CopyUnderWay:
        """Copy what is laid out into the slot that does not hold the version `protected`. `seal` follows.

        Raises NoRoom, SlotsBusy.
        """
        if self._folders_with_shards:
            self._check_shards(layout.size)
        with self.costing_a_copy_only():
            opened = self._begin(layout.size, protected=protected)
            try:
                mapping = self._mapped(opened)
                opened.trim()
                events = layout.copy_to(mapping.view, mapping.tensor)
            except BaseException:
                opened.close()
                raise
        return CopyUnderWay(opened, header, events)

    def note(self, step: int, random_state: bytes) -> None:
        """Write down the random state of this rank after `step`. Raises NoRoom."""
        place = self.place
        record = RandomState((place.generation, step), place.world_size, random_state)
        with self.costing_a_copy_only():
            self._slots.random_states.put(place.rank, record)

    def seal(self, copy: CopyUnderWay) -> None:
        """All its bytes have come: it counts. Raises OSError, and then the slot is still open."""
        self._slots.seal(copy.opened, copy.header)

    def open_slot(self, size: int) -> OpenSlot:
        """Their one worker: a slot for a state that comes from elsewhere; `keep` or its own `close` follows.

        Raises NoRoom, SlotsBusy.
        """
        with self.costing_a_copy_only():
            opened = self._begin(size)
            try:
                opened.trim()
            except BaseException:
                opened.close()
                raise
        return opened

    def map(self, opened: OpenSlot) -> memoryview:
        """The bytes of an open slot, to be filled."""
        return self._mapped(opened).view[: opened.size]

    def keep(self, opened: OpenSlot, header: Header) -> None:
        """Their one worker: it has come. Raises OSError, and then the slot is still open."""
        self._slots.seal(opened, header)

    def mark_partial(self, step: int) -> bool:
        """Whether this step's state is here already. From now on it counts without a record of the rank that failed."""
        return self._slots.mark_partial((self.place.generation, step))

    def fill(self, version: tuple[int, int], records: dict[int, bytes]) -> None:
        """Their one worker: complete the copy of that state, so that it needs no records any more."""
        with self.hold(version) as held:
            self._slots.fill(held, records)

    @contextlib.contextmanager
    def costing_a_copy_only(self) -> Iterator[None]:
        """A memory that is full or gone costs a copy, and no step: raises NoRoom for every OSError."""
        try:
            yield
        except OSError as error:
            raise NoRoom(self.reason(error)) from error

    def reason(self, error: Exception) -> str:
        """Why there is no copy, and what to do about it."""
        if not isinstance(error, OSError):
            return repr(error)
        if not os.path.isdir(self.folder):
            return (
                f"{self.folder} was removed while the job runs. systemd does that when a user's last session ends: set "
                "RemoveIPC=no in /etc/systemd/logind.conf, or run the agent as a system user"
            )
        return (
            f"no memory in {self.folder}: {error}: give /dev/shm more room, or use --memory-checkpoints off"
        )

    def _begin(self, size: int, *, protected: tuple[int, int] | None = None) -> OpenSlot:
        """See `Slots.begin`."""
        need = Need.of(self._slots, size)
        if need.grows:
            self._check_limit(need.both)
        for now in limiting_levels(self._slots.memory):
            self._check_available(need, now)
        return self._slots.begin(size, protected=protected)

    def _check_shards(self, size: int) -> None:
        """Say once, in advance, what all copies of this node will take. Raises NoRoom where that is never to be had."""
        wanted = 2 * room_for(size) * self._folders_with_shards
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

    def _check_limit(self, both: int) -> None:
        """The limit is for all Checkpointers of this agent together."""
        if both + self._slots.claimed_by_others() <= self._limit:
            return
        if both <= self._limit and self._slots.empty_unused(_used):
            logger.warning(
                "copies in memory of directories that this script does not use made room for its own"
            )
        others = self._slots.claimed_by_others()
        if both + others > self._limit:
            raise NoRoom(
                f"two copies of the state take {both} bytes, others of this node's checkpoints need {others}, and "
                f"{self._limit} are allowed: raise --memory-checkpoints, and the size of /dev/shm if need be"
            )

    def _check_available(self, need: Need, now: Memory) -> None:
        """A slot grows only while enough is left for others, and is given back when they have too little.

        The newest copy is kept even then: its state may be nowhere else.
        """
        least = least_free(now)
        if now.available < least // 2:
            self._slots.drop_older()
        elif need.fits(now):
            return
        raise NoRoom(
            f"{now.of} has {now.available >> 20} MiB left of {now.total >> 20}, a copy would take {need.grows >> 20} "
            f"more, and {least >> 20} are to be left: give the job more, or use --memory-checkpoints off"
        )

    def _mapped(self, opened: OpenSlot) -> _Mapping:
        mapping = self._mappings.pop(opened.name, None)
        if mapping is None or not mapping.fits(opened):
            if mapping is not None:
                mapping.close()
            mapping = _Mapping(opened)
        self._mappings[opened.name] = mapping
        return mapping

    # ---------------------------------------------------------------- taking out

    def headers(self) -> dict[str, Header]:
        """By slot, what the two slots hold."""
        return self._slots.headers()

    def versions(self) -> frozenset[tuple[int, int]]:
        """Of all copies here."""
        return frozenset(header.version for header in self.headers().values())

    def is_whole(self, version: tuple[int, int]) -> bool:
        """Whether a copy of that state is here which needs no records."""
        return any(one.version == version and not one.rng_holes for one in self.headers().values())

    def digest_of(self, version: tuple[int, int]) -> str:
        """Of the shards in this worker's own copy of that version; empty: it has none."""
        headers = self.headers().values()
        found = (one.shards.digest for one in headers if one.version == version and one.shards is not None)
        return next(found, "")

    def is_free(self, name: str) -> bool:
        """Whether no process reads that slot now."""
        return self._slots.is_free(name)

    def noted(self) -> tuple[NotedState, ...]:
        """Random states of this node's ranks, also after a state of which the copy here is gone."""
        found = self._slots.random_states.all()
        return tuple(NotedState(one.version, one.world_size, rank) for rank, one in found)

    def records(self, version: tuple[int, int], world_size: int) -> dict[int, bytes]:
        """By rank, the random states that were written down here for that state of that world."""
        return self._slots.random_states.of(version, world_size)

    def hold(self, version: tuple[int, int]) -> HeldSlot:
        """Keep the copy of that version, and open it. Raises OSError, ValueError when it is not here."""
        # A step may have been remembered and then saved: the copy without holes has all that the other has.
        found = sorted(self.headers().items(), key=lambda one: (len(one[1].rng_holes), not one[1].sums))
        for name, header in found:
            if header.version == version:
                return self._slots.hold(name)
        raise ValueError(f"step {version[1]} of generation {version[0]} is not in {self.folder} any more")

    def hold_verified(self, version: tuple[int, int]) -> HeldSlot:
        """The same; the first rank of a node verifies it for all. Raises ValueError also when it is damaged."""
        held = self.hold(version)
        if (
            self.keeps_common
            and held.header.sums
            and sums_of(held.stream, held.header.size) != held.header.sums
        ):
            held.stream.close()
            raise ValueError(f"{held.name}.pt in {self.folder} does not match its checksums")
        return held

    def lend(self, version: tuple[int, int]) -> tuple[Slots, HeldSlot]:
        """For the disk: that copy, which is not overwritten until it is closed. Raises as `hold`."""
        return self._slots, self.hold(version)

    def drop(self, version: tuple[int, int]) -> None:
        """That copy cannot be read or does not count: no rank is offered it again."""
        self._slots.drop(lambda had: had == version)

    def forget(self) -> bool:
        """Every rank: no later training goes on from what this node has of the directory, replicas included. Whether
        this rank has dropped any copy of its own."""
        own = SlotFolder.parse(os.path.basename(self.folder))
        if own is None or (own.local_rank or 0) != self.place.local_rank:
            return False  # the folder's one worker does so
        had_any = bool(self.versions())
        try:
            for folder in all_folders_of(self._slots.memory, own.directory):
                if folder.local_rank == own.local_rank:
                    with contextlib.closing(Slots(self._slots.memory, folder, create=False)) as slots:
                        slots.give_back()
        except OSError as error:
            logger.warning("copies in memory are not given back: folder=%s reason=%s", self.folder, error)
        return had_any

    def abandon_newer(self, version: tuple[int, int]) -> None:
        """Their one worker: training goes on from this state; a newer copy must not be taken for what comes of it."""
        self._slots.drop(lambda had: had > version)


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
    shards = RankShards(place.rank, layout.digest, common, twins, protected)
    return replace(header_of_whole(layout, place, step, resumed_from), shards=shards)


def header_of_whole(layout: ShardLayout, place: RankPlace, step: int, resumed_from: int) -> Header:
    """Of the copy that has what `layout` says, and that is all of the state."""
    return Header(
        step,
        place.generation,
        resumed_from,
        place.world_size,
        layout.size,
        run=place.run,
        table=layout.table_place,
    )


def local_rank_of(environ: Mapping[str, str]) -> int:
    """This worker's place on its node. LOCAL_RANK is 0 for all workers that see their own devices alone.

    Raises ValueError.
    """
    given = WorkerEnv.of(environ).local_rank
    return given if given >= 0 else int(environ.get("LOCAL_RANK", "0"))


def memory_of(environ: Mapping[str, str], directory: str, *, is_sharded: bool) -> SlotMemory | None:
    """None where there is no agent, or one that grants no memory."""
    try:
        env = WorkerEnv.of(environ)
        if not env.memory:
            return None
        local_rank = local_rank_of(environ)
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        place = RankPlace(env.node, env.generation, rank, local_rank, world_size, this_run(environ).id)
        folder = SlotFolder.of(os.fspath(directory), local_rank if is_sharded else None)
        # Other nodes keep as many replicas of this one's as this one keeps of theirs.
        folders = int(environ["LOCAL_WORLD_SIZE"]) * (1 + env.memory_replicas) if is_sharded else 0
        return SlotMemory(Slots(env.memory, folder), env.memory_bytes, place, folders)
    except (KeyError, ValueError, OSError) as error:
        logger.warning("no copies in memory, checkpoints go to disk only: reason=%r", error)
        return None


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
