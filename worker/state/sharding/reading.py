"""Which bytes of which copies make the pieces that a rank wants, and the reading of these and no others.

A piece that some copy in local memory holds as it is wanted is not read: it is a view on that memory. All others are
put together from the pieces that they overlap with. What is read from one copy is asked for at once, in the order of
its offsets, and neighbours that are small are one range: a state has thousands of them, and a copy may be on another
node.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointMismatch
from ..kinds import flat_bytes
from .leaves import Path, add, filled, key_of, loaded, structure_path, unflatten
from .pieces import Box, Sizes, boxes_of, cut_out, numel, strides_of, whole
from .table import Shard, Table, Value, is_own

SMALL = 256 << 10
"""Bytes up to which a range is read together with its neighbours."""
GAP = 16 << 10
"""Bytes that are read for nothing, at most, rather than asked for twice."""
MOST = 8 << 20
"""Bytes of neighbours that are one range."""
AT_ONCE = 64 << 20
"""Bytes of ranges of several neighbours that are asked for at once."""


@dataclass(slots=True)
class OpenCopy:
    """The copy of one rank of the old world. `read` fills the view from an offset on; `mapped`: it is local memory.

    `read_many` does so for several, where that is faster than one after the other.
    """

    table: Table
    read: Callable[[int, memoryview], None]
    mapped: memoryview | None = None
    read_many: Callable[[Sequence[tuple[int, memoryview]]], None] | None = None

    def fill(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        if self.read_many is not None:
            self.read_many(ranges)
            return
        for offset, view in ranges:
            self.read(offset, view)


@dataclass(frozen=True, slots=True)
class _Range:
    """`sink` gets the bytes: memory for them, or a function that is done with them when it returns."""

    offset: int
    length: int
    sink: memoryview | Callable[[memoryview], None]

    def put(self, data: memoryview) -> None:
        if isinstance(self.sink, memoryview):
            self.sink[:] = data
        else:
            self.sink(data)


@dataclass(slots=True)
class Wanted:
    """A box of a tensor; `tensor` has its elements once all is read. `borrowed`: it is a copy's memory, not ours."""

    box: Box
    tensor: torch.Tensor
    borrowed: bool


class Reader:
    """All that one rank reads of the copies of an old world. What is wanted is named first; `read` gets it."""

    def __init__(
        self, copies: Mapping[int, OpenCopy], first: int | None, *, has_stages: bool = False
    ) -> None:
        """`first`: the old rank whose place this rank has; what several copies hold is taken from its own.

        `has_stages`: ranks have other parts of the model, so what this one does not know is another one's.
        """
        self._copies = copies
        self.has_stages = has_stages
        order = sorted(copies, key=lambda rank: (rank != first, copies[rank].mapped is None))
        self._rows: dict[str, list[tuple[int, Shard]]] = {}
        self._values: dict[str, tuple[int, Value]] = {}
        self.paths: dict[str, Path] = {}
        for rank in order:
            table = copies[rank].table
            for row in table.shards:
                self._rows.setdefault(row.key, []).append((rank, row))
            for value in table.values:
                self._values.setdefault(value.key, (rank, value))
            for key, path in table.paths.items():
                self.paths.setdefault(key, path)
        self._under: dict[Path, dict[str, Path]] = {}
        for key, path in self.paths.items():
            for length in range(len(path) + 1):
                self._under.setdefault(path[:length], {})[key] = path
        self._known: dict[str, Any] = {}
        """Values that have been read."""
        self._ranges: dict[int, list[_Range]] = {}
        self._memory: dict[int, torch.Tensor] = {}
        for rank, one in copies.items():
            if one.mapped is not None and len(one.mapped):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # it need not be writable: nothing is written
                    self._memory[rank] = torch.frombuffer(one.mapped, dtype=torch.uint8)

    # ---------------------------------------------------------------- what there is

    def under(self, path: Path) -> Mapping[str, Path]:
        """The keys of all that lies there."""
        return self._under.get(path, {})

    def state(self, path: Path, leaf: Callable[[str], Any]) -> Any:
        """What was flattened to there, with `leaf` of the key of each tensor."""

        seen: set[str] = set()

        def get(where: Path) -> Any:
            key = key_of(where)
            seen.add(key)
            if key not in self.paths:
                raise CheckpointMismatch(f"the checkpoint lacks {key!r}")
            return leaf(key) if self.is_tensor(key) else self.value(key)

        structure = key_of(structure_path(path))
        if structure not in self.paths:
            return unflatten([(found[len(path) :], get(found)) for found in self.under(path).values()])
        made = filled(self.value(structure), path, get)
        # What another rank has put into a dict that all have is not lost, though no rank should do so alone.
        for key, found in self.under(path).items():
            if key not in seen:
                add(made, found[len(path) :], get(found))
        return made

    def is_tensor(self, key: str) -> bool:
        return key in self._rows

    def shard(self, key: str) -> Shard:
        """One of its pieces, for what all have alike."""
        return self._rows[key][0][1]

    def is_whole(self, key: str) -> bool:
        """Whether each of its pieces is all of it, or nothing."""
        return all(piece.sizes == piece.shape or not numel(piece.sizes) for piece in self.pieces(key))

    def pieces(self, key: str) -> list[Shard]:
        return [row for _, row in self._rows[key]]

    def is_common(self, key: str) -> bool:
        rows = self._rows.get(key)
        return rows[0][1].common if rows else self._values[key][1].common

    def states_of_copies(self, path: Path) -> list[Any]:
        """What each copy has there that has anything there."""
        found: list[Any] = []
        for rank, copy in self._copies.items():
            one = Reader({rank: copy}, rank)
            keys = one.under(path)
            if keys:
                one.read_values([*keys, key_of(structure_path(path))])
                state = one.want_state(path)
                one.read()
                found.append(state())
        return found

    def value(self, key: str) -> Any:
        return self._known[key]

    def read_values(self, keys: Sequence[str] | None = None) -> None:
        """Read these values now; None: all that are no rank's own."""
        for key in [one for one in self._values if not is_own(one)] if keys is None else keys:
            if key in self._values and key not in self._known:
                rank, value = self._values[key]
                self._want_value(rank, value)
        self.read()

    def _want_value(self, rank: int, value: Value) -> None:
        def keep(data: memoryview) -> None:
            self._known[value.key] = loaded(data)

        self._ranges.setdefault(rank, []).append(_Range(value.begin, value.length, keep))

    # ---------------------------------------------------------------- what is wanted

    def want_state(self, path: Path, like: Callable[[str], Any] = lambda _: None) -> Callable[[], Any]:
        """All that lies there; the function makes it anew of what was read. `like` as of `WantedTensor`, by key.

        Raises CheckpointMismatch where the copies do not have all of it.
        """
        wanted = {
            key: WantedTensor.like(self, key, like(key)) for key in self.under(path) if self.is_tensor(key)
        }
        return lambda: self.state(path, lambda key: wanted[key].made())

    def want(self, key: str, box: Box) -> Wanted:
        """Raises CheckpointMismatch where the copies do not have all of it."""
        distinct: dict[tuple[Sizes, Sizes], tuple[int, Shard]] = {}
        for rank, row in self._rows[key]:
            distinct.setdefault((row.offsets, row.sizes), (rank, row))
        found = distinct.get((box.offsets, box.sizes))
        if found is not None:
            return self._want_piece(*found)
        return self._want_parts(key, box, list(distinct.values()))

    def _want_piece(self, rank: int, row: Shard) -> Wanted:
        box, dtype = Box(row.offsets, row.sizes), dtype_of(row)
        length = box.numel * dtype.itemsize
        _check(row, length)
        memory = self._memory.get(rank)
        if memory is not None and length:
            return Wanted(box, memory[row.data : row.data + length].view(dtype).view(row.sizes), True)
        made = torch.empty(row.sizes, dtype=dtype)
        if length:
            self._ranges.setdefault(rank, []).append(_Range(row.data, length, _bytes_of(made)))
        return Wanted(box, made, False)

    def _want_parts(self, key: str, box: Box, rows: list[tuple[int, Shard]]) -> Wanted:
        made = torch.empty(box.sizes, dtype=dtype_of(rows[0][1]))
        lacking = box.numel
        for rank, row in rows:
            part = _overlap(box, row)
            if part is not None:
                lacking -= part.numel
                place = _narrow(made, _within(part, box), part.sizes)
                self._want_part(rank, row, _within(part, row), part.sizes, place)
        if lacking:
            raise CheckpointMismatch(
                f"{lacking} of {box.numel} elements of {key!r} that this rank needs are in no copy"
            )
        return Wanted(box, made, False)

    def _want_part(self, rank: int, row: Shard, offsets: Sizes, lengths: Sizes, place: torch.Tensor) -> None:
        """Of one piece what begins at `offsets` in it."""
        dtype = dtype_of(row)
        _check(row, numel(row.sizes) * dtype.itemsize)
        memory = self._memory.get(rank)
        if memory is not None:
            piece = (
                memory[row.data : row.data + numel(row.sizes) * dtype.itemsize].view(dtype).view(row.sizes)
            )
            place.copy_(_narrow(piece, offsets, lengths))
            return
        strides = strides_of(row.sizes)
        begin = sum(at * stride for at, stride in zip(offsets, strides, strict=True))
        last = sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
        count = last + 1
        ranges = self._ranges.setdefault(rank, [])
        offset, length = row.data + begin * dtype.itemsize, count * dtype.itemsize
        if count == numel(lengths) and place.is_contiguous():
            ranges.append(_Range(offset, length, _bytes_of(place)))
            return

        def scatter(data: memoryview) -> None:
            flat = torch.frombuffer(bytearray(data), dtype=dtype)
            place.copy_(flat.as_strided(lengths, strides))

        ranges.append(_Range(offset, length, scatter))

    # ---------------------------------------------------------------- the reading

    def read(self) -> None:
        """Get all that was wanted up to now. Raises what the copies' `read` raises."""
        for rank, ranges in self._ranges.items():
            copy = self._copies[rank]
            if copy.mapped is None:
                _read(copy, _groups(sorted(ranges, key=lambda one: one.offset)))
                continue
            for one in ranges:
                one.put(copy.mapped[one.offset : one.offset + one.length])
        self._ranges = {}


class WantedTensor:
    """A tensor that is made anew, and how it is distributed."""

    def __init__(self, pieces: list[Wanted], like: Any, shape: Sizes, dtype: torch.dtype) -> None:
        self._pieces = pieces
        self._like = like
        """A DTensor that is distributed in the same way; None: it is a plain tensor."""
        self._shape = shape
        self._dtype = dtype

    @classmethod
    def like(cls, reader: Reader, key: str, like: Any) -> WantedTensor:
        """Raises CheckpointMismatch where the copies do not have all of it."""
        saved = reader.shard(key)
        shape, dtype = saved.shape, dtype_of(saved)
        if like is None:
            return cls([reader.want(key, whole(shape))], None, shape, dtype)
        boxes = boxes_of(shape, like.device_mesh, like.placements)
        return cls([reader.want(key, box) for box, _ in boxes], like, shape, dtype)

    def made(self) -> torch.Tensor:
        """A tensor in memory of its own. A plain one is on the CPU: `load_state_dict` knows where it belongs."""
        if self._like is None:
            (piece,) = self._pieces
            return piece.tensor.clone() if piece.borrowed else piece.tensor
        from torch.distributed.tensor import DTensor

        mesh, placements = self._like.device_mesh, self._like.placements
        return DTensor.from_local(
            self._local(mesh, placements),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(self._shape),
            stride=strides_of(self._shape),
        )

    def _local(self, mesh: Any, placements: Any) -> torch.Tensor:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        device = self._like._local_tensor.device
        boxes = boxes_of(self._shape, mesh, placements)
        if len(boxes) == 1 and boxes[0][1] is None and len(self._pieces) == 1:
            (piece,) = self._pieces
            return piece.tensor.to(device, copy=piece.borrowed)
        sizes, _ = compute_local_shape_and_global_offset(torch.Size(self._shape), mesh, placements)
        local = torch.empty(sizes, dtype=self._dtype, device=device)
        for (_, cut), piece in zip(boxes, self._pieces, strict=True):
            cut_out(local, cut).copy_(piece.tensor)
        return local


def _read(copy: OpenCopy, groups: Sequence[list[_Range]]) -> None:
    asked: list[tuple[int, memoryview]] = []
    scratches: list[tuple[list[_Range], memoryview]] = []

    def get() -> None:
        copy.fill(asked)
        for group, scratch in scratches:
            for one in group:
                one.put(scratch[one.offset - group[0].offset :][: one.length])
        asked.clear()
        scratches.clear()

    for group in groups:
        begin = group[0].offset
        if len(group) == 1 and isinstance(group[0].sink, memoryview):
            asked.append((begin, group[0].sink))
            continue
        scratch = memoryview(bytearray(max(one.offset + one.length for one in group) - begin))
        asked.append((begin, scratch))
        scratches.append((group, scratch))
        if sum(len(scratch) for _, scratch in scratches) > AT_ONCE:
            get()
    get()


def _groups(ranges: Sequence[_Range]) -> list[list[_Range]]:
    found: list[list[_Range]] = []
    end = 0
    for one in ranges:
        joins = (
            found
            and one.length <= SMALL
            and found[-1][-1].length <= SMALL
            and one.offset - end <= GAP
            and one.offset + one.length - found[-1][0].offset <= MOST
        )
        if joins:
            found[-1].append(one)
        else:
            found.append([one])
        end = max(end if joins else 0, one.offset + one.length)
    return found


def _overlap(one: Box, other: Box | Shard) -> Box | None:
    """The elements that both have, if there are any."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    sizes = tuple(
        min(begin + size, other_begin + other_size) - offset
        for begin, size, other_begin, other_size, offset in zip(
            one.offsets, one.sizes, other.offsets, other.sizes, offsets, strict=True
        )
    )
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def _within(part: Box, there: Box | Shard) -> Sizes:
    """Where the part begins in it."""
    return tuple(at - begin for at, begin in zip(part.offsets, there.offsets, strict=True))


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (begin, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, begin, length)
    return tensor


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = flat_bytes(tensor).numpy()
    return memoryview(array)


def dtype_of(row: Shard) -> torch.dtype:
    """Raises CheckpointMismatch."""
    dtype = getattr(torch, row.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointMismatch(
            f"{row.key!r} is of the type {row.dtype!r}, which this version of torch lacks"
        )
    return dtype


def _check(row: Shard, length: int) -> None:
    if row.data + length > row.begin + row.length:
        raise CheckpointMismatch(f"the table gives {row.key!r} less room than it needs")
