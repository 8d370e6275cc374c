"""What one rank has of a state at one step: tensors with their places in the whole, and values that are no tensors.

From save to save only contents change. So the form of a state, names and places, is found out once. A form that is the
same object as before needs no comparison, and no table made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ..kinds import is_dtensor
from .leaves import Leaves, Path, key_of, refuse_twice
from .pieces import Cut, Sizes, cut_out, is_common, placed, refuse
from .table import RANKS

PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Row:
    """A box of a tensor. `source`: the number of the tensor that holds it, which tied weights have in common."""

    path: Path
    key: str
    dtype: torch.dtype
    shape: Sizes
    offsets: Sizes
    sizes: Sizes
    common: bool
    source: int


class Form:
    """Compared by identity."""

    def __init__(self, rows: Sequence[Row], sources: int) -> None:
        self.rows = tuple(rows)
        self.sources = sources

    @cached_property
    def without_common(self) -> tuple[Form, list[int]]:
        """As of a rank that does not hold for its node what all ranks have; and the numbers of the sources left."""
        left: dict[int, int] = {}
        rows = [
            replace(row, source=left.setdefault(row.source, len(left))) for row in self.rows if not row.common
        ]
        return Form(rows, len(left)), list(left)


class FormCache:
    """The form of one rank's tensors, which come in the same order each time."""

    def __init__(self) -> None:
        self._form = Form((), 0)
        self._known: tuple[Any, ...] = ()
        """All that the form depends on."""
        self._cuts: list[tuple[int, Cut | None]] = []
        """Of each source: the number of its tensor, and which part of that it is."""

    def take(self, leaves: Leaves, world_size: int, *, shared: bool) -> tuple[Form, Sequence[torch.Tensor]]:
        """The form, and its sources. `shared`: all ranks have the same of what is not spread.

        Raises NotPlainData where two tensors have one key, and as `refuse`.
        """
        seen, local = _glance(leaves.tensors)
        known = (world_size, shared, leaves.paths, seen)
        if known == self._known:
            return self._form, [cut_out(local[number], cut) for number, cut in self._cuts]
        refuse_twice(leaves.paths)
        sources = self._learn(leaves, [tie for *_, tie in seen], world_size, shared)
        self._known = known if all(map(_is_known, leaves.tensors)) else ()
        return self._form, sources

    def _learn(
        self, leaves: Leaves, ties: Sequence[int], world_size: int, shared: bool
    ) -> list[torch.Tensor]:
        rows: list[Row] = []
        sources: list[torch.Tensor] = []
        cuts: list[tuple[int, Cut | None]] = []
        begins: list[int] = []
        for number, (path, tensor) in enumerate(zip(leaves.paths, leaves.tensors, strict=True)):
            is_own = path[0] == RANKS
            part, *keys = path[3:] or path if is_own else path
            refuse(str(part), key_of(tuple(keys)), tensor)
            boxes = placed(tensor)
            begins.append(len(sources) if ties[number] == number else begins[ties[number]])
            common = shared and not is_own and is_common(tensor, world_size)
            key, shape = key_of(path), tuple(tensor.shape)
            rows += [
                Row(path, key, tensor.dtype, shape, one.box.offsets, one.box.sizes, common, source)
                for source, one in enumerate(boxes, begins[number])
            ]
            if ties[number] == number:
                sources += [one.tensor for one in boxes]
                cuts += [(number, one.cut) for one in boxes]
        self._cuts = cuts
        if self._form.rows != tuple(rows) or self._form.sources != len(sources):
            self._form = Form(rows, len(sources))
        return sources


def _glance(tensors: Sequence[torch.Tensor]) -> tuple[list[tuple[Any, ...]], list[torch.Tensor]]:
    """All that the place of each depends on, and what this rank has of it.

    The last of the one is the number of the first tensor that is the same.
    """
    seen: list[tuple[Any, ...]] = []
    local: list[torch.Tensor] = []
    first: dict[int, int] = {}
    spread: dict[type, bool] = {}
    for number, tensor in enumerate(tensors):
        kind, spec = type(tensor), None
        one: Any = tensor
        if kind not in PLAIN:
            if kind not in spread:
                spread[kind] = is_dtensor(tensor)
            if spread[kind]:
                spec, one = one._spec, one._local_tensor
        seen.append((kind, spec, one.dtype, one.shape, first.setdefault(id(tensor), number)))
        local.append(one)
    return seen, local


def _is_known(tensor: torch.Tensor) -> bool:
    """Whether a glance tells where it lies. A DTensor without elements is placed as none of what the rank has."""
    return type(tensor) in PLAIN or (is_dtensor(tensor) and tensor.numel() > 0)


@dataclass(frozen=True, slots=True)
class Items:
    """What this rank has of the whole state. `values`: key, path, archive, and whether it is common."""

    form: Form
    tensors: Sequence[torch.Tensor]
    values: list[tuple[str, Path, bytes, bool]]
    tells_ranks_apart: bool
    """The rank has parts for itself, so no other rank's copy can stand for its own."""
    rank: int
    taken: tuple[Form, Sequence[torch.Tensor]] | None = None
    """Form and tensors with what is common, also where the rank does not keep it."""
