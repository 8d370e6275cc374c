"""Where the part of a tensor that this rank has lies in the whole tensor.

A part is one box or several: a dimension that is split twice, as FSDP splits what tensor parallelism has split before
(`_StridedShard`), may leave a rank with rows that are not neighbours. A part without elements is no box at all, unless
the whole tensor has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import NotPlainData, Sharded
from ..kinds import is_dtensor, is_sharded_tensor

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """`sizes` elements from `offsets` on, by dimension."""

    offsets: Sizes
    sizes: Sizes

    @property
    def numel(self) -> int:
        return numel(self.sizes)


Cut = tuple[tuple[int, int], ...]
"""Which part of a local tensor a box is: begin and length, by dimension."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of a whole tensor, and the tensor that holds it here; `cut`: it holds more than the box."""

    box: Box
    local: torch.Tensor
    cut: Cut | None = None

    @property
    def tensor(self) -> torch.Tensor:
        return cut_out(self.local, self.cut)


def cut_out(local: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    for dim, (begin, length) in enumerate(cut or ()):
        local = local.narrow(dim, begin, length)
    return local


def numel(sizes: Sequence[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def strides_of(sizes: Sequence[int]) -> Sizes:
    """Of a contiguous tensor."""
    return tuple(numel(sizes[dim + 1 :]) for dim in range(len(sizes)))


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def boxes_of(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> list[tuple[Box, Cut | None]]:
    """Of a DTensor of this form, on this rank; none where the rank is not in the mesh, or has no element."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = tuple(shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    if not numel(shape):
        return [(whole(shape), None)]
    if not any(_is_strided(one) for one in placements):
        sizes, offsets = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
        box = Box(tuple(map(int, offsets)), tuple(map(int, sizes)))
        return [(box, None)] if box.numel else []
    runs = [
        _runs(size, [(one, mesh.size(at), coordinate[at]) for at, one in _of_dim(placements, dim)])
        for dim, size in enumerate(shape)
    ]
    found: list[tuple[Box, Cut | None]] = []
    for ways in itertools.product(*runs):
        box = Box(tuple(one[0] for one in ways), tuple(one[2] for one in ways))
        found.append((box, tuple((one[1], one[2]) for one in ways)))
    return [(found[0][0], None)] if len(found) == 1 else found


def placed(tensor: torch.Tensor) -> list[Placed]:
    """What this rank has of a tensor of any kind that is carried."""
    if is_dtensor(tensor):
        one: Any = tensor
        local = one._local_tensor
        if not one.numel():
            return [Placed(whole(one.shape), local.new_empty(one.shape))]
        boxes = boxes_of(one.shape, one.device_mesh, one.placements)
        if not boxes and local.dim() == one.dim():
            # Its name and form are kept all the same: a load of this rank need not look for them elsewhere.
            return [Placed(Box((0,) * one.dim(), tuple(local.shape)), local)]
        return [Placed(box, local, cut) for box, cut in boxes]
    if is_sharded_tensor(tensor):
        shards: Any = tensor
        return [
            Placed(Box(tuple(one.metadata.shard_offsets), tuple(one.metadata.shard_sizes)), one.tensor)
            for one in shards.local_shards()
            if one.tensor.numel()
        ]
    return [Placed(whole(tensor.shape), tensor)]


def is_common(tensor: torch.Tensor, world_size: int) -> bool:
    """Whether all ranks have the whole of it."""
    if is_dtensor(tensor):
        one: Any = tensor
        return one.device_mesh.size() == world_size and all(p.is_replicate() for p in one.placements)
    return not is_sharded_tensor(tensor)


def refuse(part: str, key: str, tensor: torch.Tensor) -> None:
    """Raises NotPlainData or Sharded, with what to do, for a tensor that cannot be carried."""
    what = f"{key!r} of part {part!r}"
    if is_dtensor(tensor):
        _refuse_dtensor(what, tensor)
    for one in _locals(tensor):
        kind = without_plain_values(one)
        if not kind and type(one).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            kind = f"a {type(one).__name__}, of which it is not known what it holds"
        if not kind:
            continue
        raise NotPlainData(
            f"{what} is {kind}, which a Checkpointer does not carry: let its state_dict() return plain tensors"
        )


def without_plain_values(tensor: torch.Tensor) -> str:
    """What that tensor is; empty: its values lie one after another, and can be copied."""
    if tensor.is_meta:
        return "on the meta device, without values"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"a tensor of the layout {tensor.layout}"
    return "a quantized tensor" if tensor.is_quantized else ""


def _refuse_dtensor(what: str, tensor: Any) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise Sharded(
            f"{what} is a DTensor placed {tensor.placements}, a sum of which each rank has a term: redistribute it to "
            "Shard or Replicate before it is saved"
        )
    if not tensor.numel() or tensor.device_mesh.get_coordinate() is None:
        return
    boxes = boxes_of(tensor.shape, tensor.device_mesh, tensor.placements)
    expected = sum(box.numel for box, _ in boxes)
    local = tuple(tensor._local_tensor.shape)
    one_box = len(boxes) == 1 and boxes[0][1] is None
    if (one_box and local != boxes[0][0].sizes) or expected != numel(local):
        raise Sharded(
            f"{what} is a DTensor of shape {tuple(tensor.shape)} placed {tensor.placements}, of which this rank should "
            f"have {expected} elements and has a piece of shape {local}: torch splits it unevenly here and does not "
            "say how; choose sizes of the mesh that divide its dimensions"
        )


def _locals(tensor: torch.Tensor) -> list[torch.Tensor]:
    one: Any = tensor
    if is_dtensor(tensor):
        return [one._local_tensor]
    if is_sharded_tensor(tensor):
        return [shard.tensor for shard in one.local_shards()]
    return [tensor]


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _of_dim(placements: Sequence[Any], dim: int) -> list[tuple[int, Any]]:
    return [
        (at, one)
        for at, one in enumerate(placements)
        if (one.is_shard() or _is_strided(one)) and one.dim == dim
    ]


def _runs(size: int, splits: Sequence[tuple[Any, int, int]]) -> list[tuple[int, int, int]]:
    """Of one dimension: where each run of neighbours begins in the whole, where in the local tensor, and its length.

    `splits`: placement, number of chunks and this rank's place among them, in the order of the mesh's dimensions.
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    index = torch.arange(size)
    for placement, chunks, place in splits:
        flat = _StridedShard(0, split_factor=placement.split_factor) if _is_strided(placement) else Shard(0)
        index = flat._split_tensor(index, chunks, with_padding=False, contiguous=False)[0][place]
    found: list[tuple[int, int, int]] = []
    for at, row in enumerate(index.tolist()):
        if found and row == found[-1][0] + found[-1][2]:
            begin, local, length = found[-1]
            found[-1] = begin, local, length + 1
        else:
            found.append((row, at, 1))
    return found
