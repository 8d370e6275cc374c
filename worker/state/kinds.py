"""Which objects a state is spread over ranks by, found by type: nothing of theirs is called, nothing is imported.

A state that is to be the same on every rank must have none of them. They are looked for before any `state_dict()` is
called: some are collectives, which one rank alone would never leave.

A module of torch that was not imported has no instances, so a script without sharding pays for none of it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from ..errors import NotPlainData, Sharded
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


# ---------------------------------------------------------------- what a replicated state must not have

_TOO_LATE = (
    "it was sharded after the Checkpointer was made: make the Checkpointer after fully_shard(), "
    "FullyShardedDataParallel() or parallelize_module()"
)
_HIDDEN = (
    "a Checkpointer sees shards in modules, optimizers and dicts only, as it calls no state_dict() to find them: give "
    "it the module that has these tensors, or these tensors in a dict"
)
_WHOLE = "every rank has all of it: let it be a plain tensor, as its to_local()"
_CARRIED_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def refuse_sharded(state: Mapping[str, Part]) -> None:
    """Look at the objects themselves, and call nothing of theirs. Raises Sharded."""
    for name, part in state.items():
        if isinstance(part, dict):
            continue
        part = unwrapped(part)
        if isinstance(part, torch.nn.Module):
            _refuse_module(name, part)
        elif isinstance(part, torch.optim.Optimizer):
            if kind := kind_of(part, SHARDING_OPTIMIZERS):
                raise Sharded(f"part {name!r} is a {kind}: {_TOO_LATE}")
            for number, group in enumerate(part.param_groups):
                for index, weight in enumerate(group["params"]):
                    _refuse_spread(part, name, f"param_groups.{number}.params.{index}", weight)


def _refuse_module(name: str, module: torch.nn.Module) -> None:
    for path, child in module.named_modules():
        if kind := kind_of(child, SHARDING_MODULES):
            where = f"module {path!r} of part {name!r}" if path else f"part {name!r}"
            raise Sharded(f"{where} is a {kind}: {_TOO_LATE}")
    for key, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        _refuse_spread(module, name, key, tensor)


def _refuse_spread(part: Part, name: str, key: str, tensor: torch.Tensor) -> None:
    if kind := kind_of(tensor, SHARDED_TENSORS):
        placed = getattr(tensor, "placements", "")
        advice = _TOO_LATE if is_sharded({name: part}) else _HIDDEN if is_spread(tensor) else _WHOLE
        raise Sharded(
            f"{key!r} of part {name!r} is a {kind}{f' placed {placed}' if placed else ''}: {advice}"
        )


def refuse_tensor(part: Part, name: str, key: str, tensor: torch.Tensor) -> None:
    """Of what `state_dict` has returned. Raises Sharded, NotPlainData."""
    _refuse_spread(part, name, key, tensor)
    if tensor.is_meta:
        kind = "on the meta device, without values"
    elif tensor.is_nested:
        kind = "a nested tensor"
    elif tensor.layout not in _CARRIED_LAYOUTS:
        kind = f"a tensor of the layout {tensor.layout}"
    else:
        return
    raise NotPlainData(
        f"{key!r} of part {name!r} is {kind}, which a Checkpointer does not carry: let its state_dict() return plain "
        "tensors"
    )


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Of a contiguous one, without a copy. One element counts as that with any stride, which a view() refuses."""
    flat = tensor.detach().reshape(-1)
    return (flat.as_strided((1,), (1,)) if len(flat) == 1 else flat).view(torch.uint8)
