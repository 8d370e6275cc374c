"""What one rank has of a state at one step: tensors with their places in the whole, and values that are no tensors.

From save to save only contents change. So the form of a state, names and places, is found out once. A form that is the
same object as before needs no comparison, and no table made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..kinds import is_dtensor
from .leaves import Path, key_of, refuse_twice
from .pieces import Cut, Sizes, cut_out, is_common, placed


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

    __slots__ = ("common", "rows", "sources")

    def __init__(self, rows: Sequence[Row], sources: int) -> None:
        self.rows = tuple(rows)
        self.common = tuple(row for row in self.rows if row.common)
        self.sources = sources


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is no tensor."""

    path: Path
    value: Any
    common: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """Of one part. `tensors` are this rank's, by the number that a row has as `source`."""

    form: Form
    tensors: list[torch.Tensor]
    leaves: list[Leaf]


@dataclass(frozen=True, slots=True)
class _Expected:
    """What a tensor must be for its rows to be those of before."""

    kind: type
    spec: Any
    """Of a DTensor."""
    dtype: torch.dtype
    local: torch.Size
    cuts: tuple[Cut | None, ...]
    """Of its boxes; none where it has the tensor of another one."""
    tie: int
    """The first tensor that is the same; its own number where it is that."""


class FormCache:
    """The form of one part's tensors, which come in the same order each time."""

    def __init__(self) -> None:
        self._form = Form((), 0)
        self._paths: Sequence[Path] = ()
        self._flags: tuple[int, bool] | None = None
        self._expected: list[_Expected] | None = None
        """None: some tensor's form cannot be seen at a glance."""

    def take(
        self, paths: Sequence[Path], tensors: Sequence[torch.Tensor], world_size: int, *, shared: bool
    ) -> tuple[Form, list[torch.Tensor]]:
        """The form, and its sources. `shared`: all ranks have the same of what is not spread.

        Raises NotPlainData where two tensors have one key.
        """
        flags = (world_size, shared)
        same = paths is self._paths or paths == self._paths
        if self._flags == flags and same:
            sources = self._at_a_glance(tensors)
            if sources is not None:
                return self._form, sources
        if not same:
            refuse_twice(paths)
        self._paths, self._flags = paths, flags
        return self._learn(tensors, world_size, shared)

    def _at_a_glance(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        if self._expected is None or len(tensors) != len(self._expected):
            return None
        sources: list[torch.Tensor] = []
        one: Any
        for number, (tensor, expected) in enumerate(zip(tensors, self._expected, strict=True)):
            one = tensor
            if type(tensor) is not expected.kind:
                return None
            if expected.tie != number:
                if tensor is not tensors[expected.tie]:
                    return None
                continue
            if expected.spec is not None:
                if one._spec is not expected.spec and one._spec != expected.spec:
                    return None
                one = one._local_tensor
            if one.dtype is not expected.dtype or one.shape != expected.local:
                return None
            for cut in expected.cuts:
                sources.append(one if cut is None else cut_out(one, cut))
        return sources

    def _learn(
        self, tensors: Sequence[torch.Tensor], world_size: int, shared: bool
    ) -> tuple[Form, list[torch.Tensor]]:
        rows: list[Row] = []
        sources: list[torch.Tensor] = []
        expected: list[_Expected] = []
        first: dict[int, int] = {}
        begins: list[int] = []
        all_known = True
        for number, (path, tensor) in enumerate(zip(self._paths, tensors, strict=True)):
            tie = first.setdefault(id(tensor), number)
            common = shared and is_common(tensor, world_size)
            key, shape, boxes = key_of(path), tuple(tensor.shape), placed(tensor)
            begins.append(begins[tie] if tie != number else len(sources))
            for index, one in enumerate(boxes):
                source = begins[number] + index
                rows.append(
                    Row(path, key, tensor.dtype, shape, one.box.offsets, one.box.sizes, common, source)
                )
            if tie == number:
                sources += [one.tensor for one in boxes]
            seen: Any = tensor
            all_known = all_known and (
                is_dtensor(tensor) or type(tensor) in (torch.Tensor, torch.nn.Parameter)
            )
            if all_known:
                spec = seen._spec if is_dtensor(tensor) else None
                local = seen._local_tensor if is_dtensor(tensor) else tensor
                # The box of a DTensor without any element is none of what the rank has.
                all_known = spec is None or bool(tensor.numel())
                expected.append(
                    _Expected(
                        type(tensor),
                        spec,
                        local.dtype,
                        local.shape,
                        tuple(one.cut for one in boxes) if tie == number else (),
                        tie,
                    )
                )
        self._expected = expected if all_known else None
        if self._form.rows != tuple(rows) or self._form.sources != len(sources):
            self._form = Form(rows, len(sources))
        return self._form, sources


@dataclass(frozen=True, slots=True)
class Items:
    """What this rank has of the whole state. `values`: key, path, archive, and whether it is common."""

    form: Form
    tensors: list[torch.Tensor]
    values: list[tuple[str, Path, bytes, bool]]
    tells_ranks_apart: bool
    """The rank has parts for itself, so no other rank's copy can stand for its own."""
    rank: int
    taken: Sequence[Taken] = ()
    """What all this is of, also where the rank does not keep what is common."""


class Joined:
    """The forms of all parts as one."""

    def __init__(self) -> None:
        self._made_of: tuple[Any, ...] = ()
        self._form = Form((), 0)
        self._kept: list[int] = []

    def join(self, taken: Sequence[Taken], *, common: bool) -> tuple[Form, list[torch.Tensor]]:
        """Without what is common, unless the rank holds that for its node."""
        made_of = (*(one.form for one in taken), common)
        if len(made_of) != len(self._made_of) or any(
            a is not b for a, b in zip(made_of, self._made_of, strict=True)
        ):
            self._made_of = made_of
            self._join([one.form for one in taken], common)
        tensors = [tensor for one in taken for tensor in one.tensors]
        return self._form, [tensors[number] for number in self._kept]

    def _join(self, forms: Sequence[Form], common: bool) -> None:
        rows: list[Row] = []
        numbers: dict[int, int] = {}
        begin = 0
        for form in forms:
            for row in form.rows:
                if common or not row.common:
                    source = numbers.setdefault(begin + row.source, len(numbers))
                    rows.append(
                        Row(
                            row.path,
                            row.key,
                            row.dtype,
                            row.shape,
                            row.offsets,
                            row.sizes,
                            row.common,
                            source,
                        )
                    )
            begin += form.sources
        self._kept = list(numbers)
        self._form = Form(rows, len(numbers))
