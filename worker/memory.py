"""The copies that one worker makes of its state in the slots of this node, and takes out again.

A slot holds the very bytes of the file that `torch.save` would write (see `layout`), so whatever torch can load can be
kept here. While a GPU still copies, the process goes on, and a thread seals the slot when the last byte has come.

What is taken out is mapped, not read: the only copy is the one that `load_state_dict` makes (see `states`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from .offers import Copy
from .relayout import Layouts
from .room import room
from .slots import (
    FOLDER_VARIABLE,
    LIMIT_VARIABLE,
    Header,
    Held,
    NoRoom,
    Opened,
    Record,
    Slots,
    room_for,
    sums_of,
)
from .states import is_plain, prove_loadable

logger = logging.getLogger(__name__)

LEAST_FREE = 0.05
"""The share of the memory that stays free for others."""

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class _Mapping:
    """One slot's pages in this process, kept from one state to the next: page faults cost more than the copy."""

    def __init__(self, opened: Opened) -> None:
        found = os.fstat(opened.fd)
        self._file = (found.st_dev, found.st_ino)
        self._map = mmap.mmap(opened.fd, room_for(opened.size))
        self._pinned = 0
        for advice in (mmap.MADV_HUGEPAGE, _POPULATE_WRITE):
            with contextlib.suppress(OSError):  # a kernel that knows it not
                self._map.madvise(advice)
        self.view = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch left it without annotations
            self._pin()

    def fits(self, opened: Opened) -> bool:
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


class NodeMemory:
    """One Checkpointer's copies in the memory of this node, as one rank sees them."""

    def __init__(self, slots: Slots, limit: int, place: Place) -> None:
        """`limit` is the most bytes that the slots may take."""
        self.base = 0
        """The step from which this generation went on: 0 until `load` has found out."""
        self.place = place
        self._slots = slots
        self._limit = limit
        self._mappings: dict[str, _Mapping] = {}
        self._copying: threading.Thread | None = None
        self._proven = False
        self._layouts = Layouts()

    @property
    def folder(self) -> str:
        """What the ranks of this node keep of one Checkpointer; it outlives them."""
        return self._slots.folder

    @property
    def is_keeper(self) -> bool:
        """Whether this rank copies the state for all of its node."""
        return self.place.local_rank == 0

    # ---------------------------------------------------------------- putting in

    def note(self, step: int, random_state: bytes) -> None:
        """Every rank: write down the random state after `step`."""
        place = self.place
        self._slots.put_record(place.rank, Record((place.generation, step), place.world_size, random_state))

    def put(
        self,
        payload: dict[str, Any],
        *,
        room_for_random_state: int = 0,
        haste: bool = False,
        then: Callable[[Slots, Held], None] | None = None,
    ) -> int:
        """Local rank 0: copy a state into a slot, with room for all ranks' random states if it does not hold them.

        Returns the size of the state in bytes.

        `then` is given the copy when it is complete, by another thread if a GPU copies.

        Raises NoRoom, SlotsBusy, CannotLayOut; what `prove_loadable` raises; what the states' own pickling raises.
        """
        self.settle()
        place = self.place
        rows = torch.zeros(place.world_size, room_for_random_state, dtype=torch.uint8)
        if room_for_random_state:
            payload = {**payload, "rng": rows}
        layout = self._layouts.lay_out(payload)
        opened = self._begin(layout.size)
        try:
            mapping = self._mapped(opened)
            opened.trim()
            events = layout.copy_to(mapping.view, mapping.tensor)
            if not (self._proven and is_plain(payload)):
                prove_loadable(opened.path, payload["step"])
                self._proven = True
            gaps = []
            if room_for_random_state:
                begin = layout.offset_of(rows)
                gaps = [(begin + rank * rows.shape[1], rows.shape[1]) for rank in range(place.world_size)]
            header = Header(
                payload["step"],
                place.generation,
                self.base,
                place.world_size,
                layout.size,
                tuple(gaps),
                haste,
            )
        except BaseException:
            opened.close()
            raise
        if events:
            self._copying = threading.Thread(
                target=self._seal, args=(opened, header, events, then), name="memory-copy"
            )
            self._copying.start()
        else:
            self._seal(opened, header, events, then)
        return layout.size

    def put_bytes(self, stream: BinaryIO, header: Header) -> None:
        """Local rank 0: keep a state that has come from another node. Raises NoRoom, SlotsBusy."""
        opened = self._begin(header.size)
        try:
            mapping = self._mapped(opened)
            opened.trim()
            stream.seek(0)
            stream.readinto(mapping.view[: header.size])  # type: ignore[attr-defined]  # of BytesIO
        except BaseException:
            opened.close()
            raise
        self._slots.seal(opened, header)

    def settle(self) -> None:
        """Wait until the newest copy is complete."""
        if self._copying is not None:
            self._copying.join()
            self._copying = None

    def _seal(
        self,
        opened: Opened,
        header: Header,
        events: list[torch.cuda.Event],
        then: Callable[[Slots, Held], None] | None,
    ) -> None:
        try:
            for event in events:
                event.synchronize()
        except Exception as error:
            logger.warning(
                "a copy to memory did not end, the older one is kept: step=%d reason=%r", header.step, error
            )
            opened.close()
            return
        self._slots.seal(opened, header)
        if then is not None:
            then(self._slots, self._slots.hold(opened.name))

    def _begin(self, size: int) -> Opened:
        both = 2 * room_for(size)
        if both > self._limit:
            raise NoRoom(
                f"two copies of the state take {both} bytes, and {self._limit} are allowed: raise "
                "--memory-checkpoints, and the size of /dev/shm if need be"
            )
        self._check_room(both)
        try:
            return self._slots.begin(size)
        except OSError as error:
            raise NoRoom(f"no memory for a copy of {size} bytes in {self._slots.folder}: {error}") from error

    def _check_room(self, both: int) -> None:
        """A slot grows only while enough is left for others, and is given back when they have too little.

        The newest copy is kept even then: nobody can tell whether its state is anywhere else.
        """
        taken = self._slots.taken()
        now = room()
        if now is None:
            return
        least = int(LEAST_FREE * now.total)
        grows = max(0, both - taken)
        if now.left < least // 2:
            self._slots.drop_older()
        elif not grows or now.left - grows >= least:
            return
        raise NoRoom(
            f"{now.left >> 20} MiB of memory are left of {now.total >> 20}, a copy would take {grows >> 20} more, and "
            f"{least >> 20} are to be left: give the job more memory, or use --memory-checkpoints off"
        )

    def _mapped(self, opened: Opened) -> _Mapping:
        mapping = self._mappings.pop(opened.name, None)
        if mapping is None or not mapping.fits(opened):
            if mapping is not None:
                mapping.close()
            mapping = _Mapping(opened)
        self._mappings[opened.name] = mapping
        return mapping

    # ---------------------------------------------------------------- taking out

    def copies(self) -> tuple[Copy, ...]:
        """Local rank 0: what is here; what cannot be believed is said."""
        for problem in self._slots.problems():
            logger.warning("a copy in memory is left aside: reason=%s", problem)
        return tuple(
            Copy(header, frozenset(self.records(header))) for header in self._slots.headers().values()
        )

    def hold(self, age: tuple[int, int]) -> Held:
        """Open this node's copy of a state, which local rank 0 verifies.

        Raises OSError, ValueError when it is not what was offered.
        """
        held = self._hold(age)
        if self.is_keeper and held.header.sums and sums_of(held.stream, held.header.size) != held.header.sums:
            held.stream.close()
            raise ValueError(f"{held.name}.pt in {self._slots.folder} does not match its checksums")
        return held

    def _hold(self, age: tuple[int, int]) -> Held:
        # A step may have been remembered and then saved: the copy without gaps has all that the other has.
        found = sorted(self._slots.headers().items(), key=lambda one: len(one[1].gaps))
        for name, header in found:
            if header.age == age:
                return self._slots.hold(name)
        raise ValueError(f"step {age[1]} of generation {age[0]} is not in {self._slots.folder} any more")

    def is_whole(self, age: tuple[int, int]) -> bool:
        """Whether a copy of that state is here which needs no records."""
        return any(header.age == age and not header.gaps for header in self._slots.headers().values())

    def lend(self, age: tuple[int, int]) -> tuple[Slots, Held]:
        """For the disk: that copy, which is not overwritten until it is closed. Raises as `hold`."""
        return self._slots, self._hold(age)

    def drop(self, age: tuple[int, int]) -> None:
        """Local rank 0: that copy cannot be read, and nobody shall be offered it again."""
        self._slots.drop(lambda had: had == age)

    def abandon_newer(self, age: tuple[int, int]) -> None:
        """Local rank 0: training goes on from this state; a newer copy must not be taken for what comes of it."""
        self._slots.drop(lambda had: had > age)

    def records(self, header: Header) -> dict[int, bytes]:
        """The random states that this node's ranks have written down for that state."""
        return self._slots.records(header.age, header.world_size)

    def fill(self, age: tuple[int, int], records: dict[int, bytes]) -> None:
        """Local rank 0: complete the copy of that state, so that it needs no records any more."""
        with self.hold(age) as held:
            self._slots.fill(held, records)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Place:
    """Whose memory it is."""

    node: str
    generation: int
    rank: int
    local_rank: int
    world_size: int


def memory_of(environ: Mapping[str, str], directory: str) -> NodeMemory | None:
    """None where there is no agent, or one that grants no memory."""
    folder = environ.get(FOLDER_VARIABLE, "")
    if not folder:
        return None
    try:
        place = Place(
            environ["ELASTIC_AGENT_NODE"],
            int(environ["ELASTIC_AGENT_GENERATION"]),
            int(environ["RANK"]),
            int(environ["ELASTIC_AGENT_LOCAL_RANK"]),
            int(environ["WORLD_SIZE"]),
        )
        return NodeMemory(Slots(folder, directory), int(environ[LIMIT_VARIABLE]), place)
    except (KeyError, ValueError, OSError) as error:
        logger.warning("no copies in memory, checkpoints go to disk only: folder=%s reason=%r", folder, error)
        return None


def load_mapped(held: Held) -> Any:
    """The payload in a slot; its tensors are the slot's own memory, and must not outlive the load."""
    return torch.load(held.path, map_location="cpu", mmap=True, weights_only=True)
