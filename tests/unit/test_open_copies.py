"""Which copies a rank reads where they are, and which it brings into its own slots."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.worker.checkpointing.loading.open_copies import CopiesUnusable, MemoryReader
from elastic_agent.worker.checkpointing.loading.selection import CopyPlace
from elastic_agent.worker.state.sharding.reading import OpenCopy
from elastic_agent.worker.state.sharding.table import Table
from elastic_agent.worker.storage.memory.copy_header import Header
from elastic_agent.worker.storage.memory.slot_folders import SlotFolder
from elastic_agent.worker.storage.memory.slot_memory import RankPlace, SlotMemory
from elastic_agent.worker.storage.memory.slots import Slots
from elastic_agent.worker.storage.replication.key_file import write_key

from ..memory_servers import DIRECTORY, KEY, Node
from ..shards import copy_of, in_slot


@pytest.mark.parametrize("newer", [False, True], ids=["alone", "before one that is not whole"])
def test_the_part_of_another_rank_stays_where_the_worker_was_that_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: bool
) -> None:
    """The worker was rank 1 and is rank 0 now, of which only another node has the copy."""
    folder = SlotFolder.of(DIRECTORY, 0)
    raw, old = copy_of(1, 10, 2)
    slots = in_slot(tmp_path, DIRECTORY, 0, raw, old)
    if newer:
        in_slot(tmp_path, DIRECTORY, 0, *copy_of(1, 11, 2))
    wanted, header = copy_of(0, 10, 2)

    def read(offset: int, into: memoryview) -> None:
        into[:] = wanted[offset : offset + len(into)]

    def opened(self: MemoryReader, places: Sequence[CopyPlace], rank: int) -> tuple[CopyPlace, OpenCopy]:
        offset, length = _table_place(header)
        return places[0], OpenCopy(Table.from_bytes(wanted[offset : offset + length]), read, None)

    monkeypatch.setattr(MemoryReader, "open", opened)
    place = RankPlace("n1", 2, 0, 0, 2, "run-a")
    memory = SlotMemory(Slots(str(tmp_path), folder), 1 << 30, place, 2)
    before = slots.headers()
    with contextlib.ExitStack() as stack:
        reader = MemoryReader(str(tmp_path), "n1", memory, stack)
        _, copy = reader.bring([CopyPlace("n2", "n2:1", folder, "a", header)], 0)
        found = bytearray(len(wanted))
        copy.read(0, memoryview(found))
    assert bytes(found) == wanted
    assert slots.headers() == before


def test_a_node_without_copies_fetches_one_into_its_own_slot(tmp_path: Path) -> None:
    """As the one that takes the place of a lost node does, in a new process."""
    wanted, header = copy_of(0, 10, 2)
    with contextlib.ExitStack() as stack:
        nodes = Nodes(tmp_path, stack)
        slots, memory = nodes.own_slots()
        _, copy = nodes.reader(memory).bring([nodes.there(header, wanted)], 0)
        assert copy.mapped is not None
        assert bytes(copy.mapped[: header.size]) == wanted
        with slots.hold(next(iter(slots.headers()))) as held:
            assert held.header == header
            assert held.stream.read() == wanted


def test_what_does_not_come_as_its_checksums_say_is_not_kept(tmp_path: Path) -> None:
    sent, header = copy_of(0, 10, 2)
    with contextlib.ExitStack() as stack:
        nodes = Nodes(tmp_path, stack)
        slots, memory = nodes.own_slots()
        damaged = bytearray(sent)
        damaged[5] ^= 1
        place = nodes.there(header, bytes(damaged))
        offered = replace(place, header=replace(header, sums=(zlib.crc32(sent),)))
        with pytest.raises(CopiesUnusable, match="match the checksums") as refusal:
            nodes.reader(memory).bring([offered], 0)
        assert refusal.value.places == (offered,)
        assert not slots.headers()


def test_a_reader_makes_no_folder_of_slots_where_the_copy_is_gone(tmp_path: Path) -> None:
    place = CopyPlace("n1", "n1:1", SlotFolder.of(DIRECTORY, 0), "a", copy_of(0, 10, 2)[1])
    with contextlib.ExitStack() as stack, pytest.raises(CopiesUnusable, match="No such file") as refusal:
        MemoryReader(str(tmp_path), "n1", None, stack).open([place], 0)
    assert refusal.value.places == (place,)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("own_answers", [True, False])
def test_a_copy_comes_with_the_place_that_it_was_opened_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_answers: bool
) -> None:
    """Rank 2's own copy is on another node and longer than that of its twin, which is here and stands first."""
    folder = SlotFolder.of(DIRECTORY, 0)
    twin = CopyPlace("n1", "n1:1", folder, "a", copy_of(0, 10, 4)[1])
    own = CopyPlace("n2", "n2:1", folder, "a", copy_of(2, 10, 4, group=0, length=800)[1])
    assert own.header.size != twin.header.size

    def opened(self: MemoryReader, place: CopyPlace, *_: object) -> OpenCopy:
        if place is own and not own_answers:
            raise ConnectionRefusedError("nothing listens there")
        return OpenCopy(Table((), (), {}), lambda offset, into: None, None)

    monkeypatch.setattr(MemoryReader, "_open_here", opened)
    monkeypatch.setattr(MemoryReader, "_open_there", opened)
    with contextlib.ExitStack() as stack:
        place, _ = MemoryReader(str(tmp_path), "n1", None, stack).open([twin, own], 2)
    assert place is (own if own_answers else twin)


@pytest.mark.parametrize("part", ["shards", "table"])
def test_ranges_of_a_damaged_copy_on_another_node_are_not_taken(tmp_path: Path, part: str) -> None:
    """One bit of it, after its checksums were taken."""
    raw, header = copy_of(0, 10, 2)
    damaged = bytearray(raw)
    damaged[_table_place(header)[0] + 9 if part == "table" else 5] ^= 1
    with contextlib.ExitStack() as stack:
        nodes = Nodes(tmp_path, stack)
        place = nodes.there(replace(header, sums=(zlib.crc32(raw),)), bytes(damaged))
        with pytest.raises(CopiesUnusable, match="do not match their checksum") as refusal:
            nodes.reader().open([place], 0)[1].fill([(0, memoryview(bytearray(20)))])
        assert refusal.value.places == (place,)
        assert not nodes.other.slots().headers(), "another load does not choose it"


def test_ranges_of_a_copy_without_checksums_are_believed(tmp_path: Path) -> None:
    raw, header = copy_of(0, 10, 2)
    with contextlib.ExitStack() as stack:
        nodes = Nodes(tmp_path, stack)
        into = bytearray(20)
        nodes.reader().open([nodes.there(header, raw)], 0)[1].fill([(0, memoryview(into))])
        assert into == raw[:20]


class Nodes:
    """Node n1, where the reader is, and another one, n2, with a memory server."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._memory = folder / "n1"
        self._memory.mkdir()
        write_key(str(self._memory), KEY)
        self.other = Node(folder, "n2")
        stack.callback(self.other.close)

    def there(self, header: Header, raw: bytes) -> CopyPlace:
        slot = self.other.fill(header, raw)
        return CopyPlace("n2", self.other.address, SlotFolder.of(DIRECTORY, 0), slot, header)

    def own_slots(self) -> tuple[Slots, SlotMemory]:
        slots = Slots(str(self._memory), SlotFolder.of(DIRECTORY, 0))
        return slots, SlotMemory(slots, 1 << 30, RankPlace("n1", 2, 0, 0, 2, "run-a"), 2)

    def reader(self, memory: SlotMemory | None = None) -> MemoryReader:
        return MemoryReader(str(self._memory), "n1", memory, self._stack)


def _table_place(header: Header) -> tuple[int, int]:
    assert header.shards is not None
    return header.table
