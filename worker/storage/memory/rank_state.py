"""What one rank alone knows of its last steps, written down at every step where it outlives the rank.

In data-parallel training the weights are on every rank, and a rank that survives can save them. The random state of a
rank, and the buffers of its modules (running averages of BatchNorm), are its own. They go into a file in the agent's
folder in memory, which this process has mapped: when it is killed, the pages are still there.

An entry holds both as they were at one *boundary*, the end of a step. There are two of them, written in turn, and one
for the step that is under way: made when backward begins, which is after the last random number of most steps, and
before any other rank can finish the step. So the others may be one step ahead of a rank that was killed, and still
it is known how it would have gone on.

Invariant: an entry that names a step is whole. Its name is taken away before a byte changes, and given after the last.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...state import rng
from ...state.kinds import flat_bytes
from ...wire.files import open_for_reading, open_own_directory
from .slot_memory import RankPlace

MAGIC = int.from_bytes(b"erankst1", "little")
RANDOM_BYTES = 64 << 10
"""Room for a random state: 10 kB, and a few bytes for each GPU."""

NONE = -1
"""No step: this entry holds nothing, or the generation has not finished one."""

_FILE = struct.Struct("=qq")  # magic, room for buffers
_ENTRY = struct.Struct("=qqqqq")  # named, generation, world size, bytes of random state, bytes of buffers
_NAMED = struct.Struct("=q")  # step + 1; 0 while the entry is being written
_PAGE = 4096
_UNDER_WAY = 2
_ENTRIES = 3


@dataclass(frozen=True, slots=True)
class RankState:
    """`random_state` is of `rng.capture`, `buffers` are theirs one after the other."""

    step: int
    generation: int
    world_size: int
    random_state: bytes
    buffers: bytes

    def of(self, generation: int, world_size: int) -> bool:
        return (self.generation, self.world_size) == (generation, world_size)


class RankStateFile:
    """The file of one rank, written by it."""

    def __init__(self, folder: str, place: RankPlace, room: int) -> None:
        """`room` is how many bytes all buffers have. Raises OSError."""
        self._place = place
        self._room = room
        self._newest = NONE
        self._turn = 0
        size = _PAGE + _ENTRIES * _stride(room)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(os.path.join(folder, _name_of(place.rank)), flags, 0o600)
        try:
            if os.fstat(fd).st_size != size:
                os.ftruncate(fd, 0)
            # All pages exist from here on: a full memory is an error now, and SIGBUS in the middle of training.
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        _FILE.pack_into(self._map, 0, MAGIC, room)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        begins = [self._begin(index) + _ENTRY.size + RANDOM_BYTES for index in range(_ENTRIES)]
        self._areas = [whole[begin : begin + room] for begin in begins]

    def finished(self, step: int, buffers: Buffers) -> None:
        """This is a boundary."""
        self._turn = 1 - self._turn
        self._write(self._turn, step, buffers)
        self._newest = step

    def under_way(self, buffers: Buffers) -> None:
        """The step after the newest boundary will end with this random state and these buffers."""
        self._write(_UNDER_WAY, self._newest, None if buffers.on_gpu else buffers)

    def newest_buffers(self) -> torch.Tensor:
        """The bytes of all buffers at the newest boundary."""
        return self._areas[self._turn]

    def _write(self, index: int, step: int, buffers: Buffers | None) -> None:
        begin = self._begin(index)
        _NAMED.pack_into(self._map, begin, 0)
        random_state = rng.capture()[:RANDOM_BYTES]
        self._map[begin + _ENTRY.size : begin + _ENTRY.size + len(random_state)] = random_state
        if buffers is not None:
            buffers.copy_to(self._areas[index])
        length = self._room if buffers is not None else 0
        _ENTRY.pack_into(
            self._map, begin, 0, self._place.generation, self._place.world_size, len(random_state), length
        )
        _NAMED.pack_into(self._map, begin, _name(step))

    def _begin(self, index: int) -> int:
        return _PAGE + index * _stride(self._room)


def find(folder: str, rank: int, world_size: int, generation: int, step: int) -> RankState | None:
    """What that rank knew at the end of that step; None when it has not written it down here, or has gone on since."""
    try:
        with open_own_directory(folder) as dir_fd, open_for_reading(dir_fd, _name_of(rank)) as file:
            raw = file.read()
        magic, room = _FILE.unpack_from(raw)
        if magic != MAGIC:
            return None
        found = [_entry(raw, _PAGE + index * _stride(room)) for index in range(_ENTRIES)]
    except (OSError, struct.error):
        return None
    *boundaries, under_way = [
        one if one is not None and one.of(generation, world_size) else None for one in found
    ]
    finished = {entry.step: entry for entry in boundaries if entry is not None}
    if step in finished:
        return finished[step]
    newest = max(finished, default=NONE)
    # The others have finished the step that it was in: it had given them all that they needed of it.
    return under_way if under_way is not None and under_way.step == newest < step else None


def _entry(raw: bytes, begin: int) -> RankState | None:
    named, generation, world_size, random_bytes, buffer_bytes = _ENTRY.unpack_from(raw, begin)
    if not named:
        return None
    begin += _ENTRY.size
    random_state = raw[begin : begin + random_bytes]
    begin += RANDOM_BYTES
    return RankState(
        named - _name(0), generation, world_size, random_state, raw[begin : begin + buffer_bytes]
    )


def _name(step: int) -> int:
    return step + 2  # 0 is no name, and NONE has one


def _stride(room: int) -> int:
    return -(-(_ENTRY.size + RANDOM_BYTES + room) // _PAGE) * _PAGE


def _name_of(rank: int) -> str:
    return f"rank-state-{rank}"


# ---------------------------------------------------------------- the buffers of modules


class Buffers:
    """Those of all modules in a state that are saved with them, as one row of bytes."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        self._places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
        self._rows: list[torch.Tensor] = []
        """The same memory as bytes; of a tensor that lies scattered, a copy."""
        self._scattered = False
        self._collect()
        self.size = sum(row.numel() for row in self._rows)

    @property
    def on_gpu(self) -> bool:
        return any(row.is_cuda for row in self._rows)

    def copy_to(self, area: torch.Tensor) -> None:
        """Raises ValueError when they are no longer as large as at first."""
        if any(owner.get(name) is not tensor for owner, name, tensor in self._places):
            self._collect()  # a module has put another tensor in the place of its own
        elif self._scattered:
            self._rows = [flat_bytes(tensor.detach().contiguous()) for _, _, tensor in self._places]
        if sum(row.numel() for row in self._rows) != self.size:
            raise ValueError("the modules' buffers have changed their size")
        if not self._rows:
            return
        if self.on_gpu:
            offset = 0
            for row in self._rows:
                area[offset : offset + row.numel()].copy_(row)
                offset += row.numel()
        else:
            torch.cat(self._rows, out=area)

    def restore(self, raw: torch.Tensor) -> None:
        """Give every buffer its bytes again."""
        for (_, _, tensor), kept in zip(self._places, self._cut(raw), strict=True):
            with torch.no_grad():
                tensor.copy_(kept)

    def kept(self, raw: torch.Tensor) -> dict[int, torch.Tensor]:
        """By the address of the buffer, what it was."""
        copies = self._cut(raw)
        return {tensor.data_ptr(): one for (_, _, tensor), one in zip(self._places, copies, strict=True)}

    def _collect(self) -> None:
        self._places.clear()
        self._rows.clear()
        for module in self._modules:
            saved = {
                value.data_ptr() for value in module.state_dict().values() if isinstance(value, torch.Tensor)
            }
            for part in module.modules():
                for name, tensor in part._buffers.items():
                    if tensor is not None and tensor.numel() and tensor.data_ptr() in saved:
                        self._places.append((part._buffers, name, tensor))
                        self._rows.append(flat_bytes(tensor.detach().contiguous()))
        self._scattered = not all(tensor.is_contiguous() for _, _, tensor in self._places)

    def _cut(self, raw: torch.Tensor) -> list[torch.Tensor]:
        offset, found = 0, []
        for _, _, tensor in self._places:
            length = tensor.numel() * tensor.element_size()
            found.append(raw[offset : offset + length].clone().view(tensor.dtype).view(tensor.shape))
            offset += length
        return found


def restore_buffers(kept: RankState, modules: Sequence[torch.nn.Module]) -> None:
    """Give the modules the buffers that the rank had, if it has kept them."""
    buffers = Buffers(modules)
    if kept.buffers and len(kept.buffers) == buffers.size:
        buffers.restore(torch.frombuffer(bytearray(kept.buffers), dtype=torch.uint8))
