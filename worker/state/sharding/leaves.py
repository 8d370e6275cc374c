"""A nested state as leaves with DCP's keys, and back; and the archives of leaves that are no tensors.

`Leaves` go where `torch.distributed.checkpoint` goes: into every mapping, and into lists that hold tensors or
mappings. A key is the path of a leaf, joined by dots. DCP's paths forget what `{}`, keys that are no strings and
mappings of other types are: a state that has such gets its structure written down beside, without its leaves. So does
one whose order counts: a copy has all tensors before all values.
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pickle import dumps
from typing import Any

import torch

from ...errors import NotPlainData
from ..kinds import is_sharded_tensor, is_tensor
from ..state_dicts import is_plain, prove_loadable, with_numbers
from .table import RANKS

Path = tuple[str | int, ...]

STRUCTURE = "elastic_agent.structure"
CARRIED_AS_VALUES = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
"""Layouts of tensors without a place for each element: `torch.save` writes them."""

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})


def key_of(path: Path) -> str:
    return ".".join(map(str, path))


def structure_path(path: Path) -> Path:
    """Where the structure of what is at `path` lies: beside all parts, so that it is no part's value to others."""
    if path[0] == RANKS:
        return (*path[:2], STRUCTURE, key_of(path[2:]))
    return (STRUCTURE, key_of(path))


def _is_leaf(state: Any) -> bool:
    if isinstance(state, Mapping):
        return False
    if not isinstance(state, list) or _SCALARS.issuperset(map(type, state)):
        return True
    return not any(is_tensor(one) or not _is_leaf(one) for one in state)


def unflatten(leaves: Sequence[tuple[Path, Any]]) -> Any:
    """Of paths that begin behind that of the state; no leaves are an empty dict."""
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    groups: dict[str | int, list[tuple[Path, Any]]] = {}
    for path, value in leaves:
        groups.setdefault(_one_of(path[0]), []).append((path[1:], value))
    made = {key: unflatten(group) for key, group in groups.items()}
    if made and all(type(key) is int for key in made):
        return [made[index] for index in sorted(made, key=int)]
    return made


def _one_of(key: Any) -> Any:
    """The same string for all that are equal, as the keys in a script's own dicts are."""
    return sys.intern(key) if type(key) is str else key


@dataclass(frozen=True, slots=True)
class Leaves:
    """Of one state or of several, flattened: their tensors, and all else, each with its path."""

    paths: list[Path] = field(default_factory=list)
    """Of the tensors."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    others: list[tuple[Path, Any]] = field(default_factory=list)

    def add(self, state: Any, path: Path, *, ordered: bool = False) -> Leaves:
        """The structure is one of the others where it must be.

        `ordered`: it must be wherever there is one, so that all ranks get all keys back in the order that they had.
        """
        is_forgotten = self._flatten(state, path)
        if is_forgotten or (ordered and not _is_leaf(state)):
            self.others.append((structure_path(path), structure_of(state)))
        return self

    def put(self, path: Path, leaf: Any) -> None:
        if is_tensor(leaf) and not _is_carried_as_value(leaf):
            self.paths.append(path)
            self.tensors.append(leaf)
        else:
            self.others.append((path, leaf))

    def extend(self, more: Leaves) -> None:
        self.paths.extend(more.paths)
        self.tensors.extend(more.tensors)
        self.others.extend(more.others)

    @property
    def by_key(self) -> dict[str, torch.Tensor]:
        return dict(zip(map(key_of, self.paths), self.tensors, strict=True))

    def _flatten(self, state: Any, path: Path) -> bool:
        """Whether `unflatten` would make another state of its leaves."""
        if isinstance(state, torch.Tensor) or _is_leaf(state):
            self.put(path, state)
            return False
        if isinstance(state, Mapping):
            is_forgotten = type(state) is not dict or not state
            for key, value in state.items():
                is_forgotten |= self._flatten(value, (*path, str(key))) or type(key) is not str
            return is_forgotten
        are_forgotten = [self._flatten(value, (*path, index)) for index, value in enumerate(state)]
        return any(are_forgotten)


def _is_carried_as_value(tensor: torch.Tensor) -> bool:
    if is_sharded_tensor(tensor):
        return False
    return tensor.layout in CARRIED_AS_VALUES or tensor.is_quantized


def structure_of(state: Any) -> Any:
    """The same containers, with None for each leaf."""
    if isinstance(state, Mapping):
        made: Any = copy.copy(state)
        for key, value in state.items():
            made[key] = structure_of(value)
        return made
    if isinstance(state, list) and not _is_leaf(state):
        return [structure_of(value) for value in state]
    return None


def refuse_twice(paths: Iterable[Path]) -> None:
    """Raises NotPlainData where two leaves have one key, under which only one of them could come back."""
    seen: dict[str, Path] = {}
    for path in paths:
        if (other := seen.setdefault(key_of(path), path)) is not path:
            raise NotPlainData(
                f"the state has two values at {key_of(path)!r}, by the keys {list(other)} and {list(path)}, "
                "and could keep one of them: rename a key (1 and '1' are one, and so are 'a.b' and 'b' in 'a')"
            )


def add(state: Any, path: Path, leaf: Any) -> None:
    """Put a leaf into the mappings of a state, at a path behind that of the state; what is there stays."""
    for key in path[:-1]:
        if not isinstance(state, MutableMapping):
            return
        state = state.setdefault(key, {})
    if isinstance(state, MutableMapping):
        state.setdefault(path[-1], leaf)


def filled(structure: Any, path: Path, leaf: Callable[[Path], Any]) -> Any:
    """The state of this structure, with `leaf` of the path of each of its leaves."""
    if isinstance(structure, Mapping):
        made: Any = {} if type(structure) is dict else copy.copy(structure)
        for key, value in structure.items():
            made[_one_of(key)] = filled(value, (*path, str(key)), leaf)
        return made
    if isinstance(structure, list):
        return [filled(value, (*path, index), leaf) for index, value in enumerate(structure)]
    return leaf(path)


class Archives:
    """What `torch.save` writes of values, made again only for a value that is another than before."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[bytes, bytes]] = {}

    def of(self, path: Path, value: Any, step: int) -> bytes:
        """Raises NotPlainData for what `torch.load(weights_only=True)` refuses."""
        if not _is_scalar(value):
            self._known.pop(path, None)
            return _archive(path, with_numbers(value), step)
        pickled = dumps(value)
        known = self._known.get(path)
        if known is None or known[0] != pickled:
            known = self._known[path] = (pickled, _archive(path, value, step))
        return known[1]


def _is_scalar(value: Any) -> bool:
    """Whether two of these with equal pickles are the same."""
    kind = type(value)
    if kind is dict:
        return _SCALARS.issuperset(map(type, value)) and all(map(_is_scalar, value.values()))
    if kind in (list, tuple):
        return _SCALARS.issuperset(map(type, value)) or all(map(_is_scalar, value))
    return kind in _SCALARS


def _archive(path: Path, value: Any, step: int) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    if not is_plain(value):
        buffer.seek(0)
        part, *keys = _path_in_script(path)
        for key in reversed(keys):
            value = {key: value}
        prove_loadable(buffer, step, {str(part): value})
    return buffer.getvalue()


def _path_in_script(path: Path) -> Path:
    """The part and the keys that a user knows it by."""
    if path[0] == RANKS and len(path) > 3:
        path = path[3:]
    if path[0] == STRUCTURE:
        path = tuple(str(path[1]).split("."))
    return path


def loaded(archive: bytes | bytearray | memoryview) -> Any:
    return torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
