"""Which objects a state is spread over ranks by, found by type: nothing of theirs is called, nothing is imported.

A module of torch that was not imported has no instances, so a script without sharding pays for none of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from .state_dicts import Part, own_tensors, unwrapped


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of torch, by the module that has it."""

    module: str
    name: str

    def has(self, one: object) -> bool:
        if type(one) is torch.Tensor or type(one) is torch.nn.Parameter:
            return False  # most are, and this is the fastest to find out
        kind = getattr(sys.modules.get(self.module), self.name, None)
        return isinstance(kind, type) and isinstance(one, kind)


_DTENSOR = Kind("torch.distributed.tensor", "DTensor")
_SHARDED_TENSOR = Kind("torch.distributed._shard.sharded_tensor", "ShardedTensor")
_FSDP1 = Kind("torch.distributed.fsdp", "FullyShardedDataParallel")
_FSDP2 = Kind("torch.distributed.fsdp", "FSDPModule")
_ZERO = Kind("torch.distributed.optim", "ZeroRedundancyOptimizer")

SHARDED_TENSORS = (_DTENSOR, _SHARDED_TENSOR)
SHARDING_MODULES = (_FSDP1, _FSDP2)
SHARDING_OPTIMIZERS = (_ZERO,)


def kind_of(one: object, kinds: Sequence[Kind]) -> str:
    """The name of the first of these that it has; empty: it has none."""
    return next((kind.name for kind in kinds if kind.has(one)), "")


def is_dtensor(one: object) -> bool:
    return _DTENSOR.has(one)


def is_sharded_tensor(one: object) -> bool:
    return _SHARDED_TENSOR.has(one)


def is_fsdp1(one: object) -> bool:
    return _FSDP1.has(one)


def is_zero(one: object) -> bool:
    return _ZERO.has(one)


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether this rank has a part of it only."""
    if is_dtensor(tensor):
        return not all(placement.is_replicate() for placement in _any(tensor).placements)
    return is_sharded_tensor(tensor)


def is_tensor(one: object) -> TypeGuard[torch.Tensor]:
    """ShardedTensor is none by its class."""
    return isinstance(one, torch.Tensor) or is_sharded_tensor(one)


def is_sharded(parts: Mapping[str, Part]) -> bool:
    """Whether some rank has a part of this state only. A mesh of one rank counts: another world may have more."""
    return any(_is_sharded_part(part) for part in parts.values())


def _is_sharded_part(part: Part) -> bool:
    one = part if isinstance(part, dict) else unwrapped(part)
    has_fsdp1 = isinstance(one, torch.nn.Module) and any(map(is_fsdp1, one.modules()))
    return has_fsdp1 or is_zero(one) or any(map(is_spread, tensors_in(part)))


def tensors_in(part: Part) -> Iterator[torch.Tensor]:
    """Those that training changes, of a module or an optimizer its weights and buffers."""
    one = part if isinstance(part, dict) else unwrapped(part)
    if isinstance(one, dict):
        yield from tensors_of(one)
    elif isinstance(one, torch.nn.Module):
        yield from own_tensors(one)
    elif isinstance(one, torch.optim.Optimizer):
        yield from (weight for group in one.param_groups for weight in group["params"])


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    if is_tensor(state):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from tensors_of(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_of(value)


def _any(one: Any) -> Any:
    return one
