"""The two slots of one worker, or of one node: they are filled where there is room, mapped, sealed, and lent out.

`NodeMemory` keeps in them a state that is the same on all ranks, `ShardMemory` one rank's part of a sharded state.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .available_memory import Memory, Need, least_free, limiting_levels
from .copy_header import Header
from .random_states import RandomState
from .slot_folders import SlotFolder, all_folders_of
from .slots import HeldSlot, NoRoom, OpenSlot, Slots

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
    """Base of what one Checkpointer has in the memory of this node, as one rank sees it."""

    def __init__(self, slots: Slots, limit: int, place: RankPlace) -> None:
        """`limit` is the most bytes that the agent's folder may take, with all that is in it."""
        self.resumed_from = 0
        """The step from which this generation went on: 0 until `load` has found out."""
        self.place = place
        self._slots = slots
        self._limit = limit
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

    # ---------------------------------------------------------------- putting in

    def note(self, step: int, random_state: bytes) -> None:
        """Write down the random state of this rank after `step`. Raises NoRoom."""
        place = self.place
        record = RandomState((place.generation, step), place.world_size, random_state)
        with self.costing_a_copy_only():
            self._slots.random_states.put(place.rank, record)

    def seal(self, copy: CopyUnderWay) -> None:
        """All its bytes have come: it counts. Raises OSError, and then the slot is still open."""
        self._slots.seal(copy.opened, copy.header)

    def lend_sealed(self, copy: CopyUnderWay) -> tuple[Slots, HeldSlot]:
        """For the disk: a copy of this process that is sealed. Raises as `hold`."""
        return self._slots, self._slots.hold(copy.opened.name)

    def lend_unsealed(self, copy: CopyUnderWay) -> tuple[Slots, HeldSlot]:
        """No other process can find it, but this process has all its bytes, and the disk can have them."""
        return self._slots, HeldSlot(copy.opened.name, copy.header, os.fdopen(copy.opened.fd, "rb"))

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

    def keep(self, opened: OpenSlot, header: Header) -> None:
        """Their one worker: it has come. Raises OSError, and then the slot is still open."""
        self._slots.seal(opened, header)

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

    def versions(self) -> frozenset[tuple[int, int]]:
        """Of all copies here."""
        return frozenset(header.version for header in self._slots.headers().values())

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


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
