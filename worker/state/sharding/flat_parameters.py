"""The parameters that FullyShardedDataParallel (FSDP1) has made flat, as one rank has them: runs of their elements.

FSDP1 puts the elements of a unit's parameters one behind the other and gives each rank a stretch of them, so a rank's
part of one parameter is a run. Nothing is gathered: `state_dict()` of FSDP1 would have each rank hold whole units, and
is a collective. What is read of torch here is held by `tests/unit/test_sharded_state.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError, Sharded
from ..kinds import is_fsdp1
from .modules import Names
from .pieces import Run, Sizes

_INSTEAD = "use torch.distributed.fsdp.fully_shard instead"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter lies: this rank has `length` elements of it, from `begin` on; in its shard from `offset` on.

    `names`: its own, then those that are tied to it. `copies`: that many ranks have all of it, each; 0: it is spread.
    """

    names: tuple[str, ...]
    shape: Sizes
    begin: int
    offset: int
    length: int
    copies: int

    def of_shard(self, shard: torch.Tensor) -> Run:
        """`shard` has the elements of all parameters that are flat together."""
        return self.alone(shard.detach().view(-1)[self.offset : self.offset + self.length])

    def alone(self, run: torch.Tensor) -> Run:
        """`run` has this parameter's elements only."""
        return Run(self.shape, self.begin, run.detach().reshape(-1), self.copies)


class FlatParameter:
    """One unit's."""

    def __init__(self, unit: Any, path: str, clean: Callable[[str], str]) -> None:
        """`path` leads to the unit; `clean` takes the wrappers' names out of one."""
        self._handle: Any = unit._handle
        self._unit = unit
        self.flat: Any = self._handle.flat_param
        self.originals: Sequence[torch.Tensor] | None = self.flat._params
        """What the optimizer has, with `use_orig_params`; None: it has the flat one."""
        self._path = path
        self.slots = list(self._slots(clean))
        self._known: tuple[torch.Tensor | None, list[Run]] = None, []

    def _slots(self, clean: Callable[[str], str]) -> Iterable[Slot]:
        flat = self.flat
        tied: dict[tuple[Any, str], list[str]] = {}
        for one in flat._shared_param_infos:
            tied.setdefault((one.prim_module, one.prim_param_name), []).append(clean(self._name_of(one)))
        copies = 0 if self._handle.uses_sharded_strategy else self._handle.world_size
        for own, shape, here in zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True):
            names = (clean(self._name_of(own)), *tied.get((own.module, own.param_name), ()))
            begin, offset, length = 0, 0, 0
            if here.in_shard:
                begin, offset, length = here.intra_param_start_idx, here.offset_in_shard, here.numel_in_shard
            yield Slot(names, tuple(shape), begin, offset, length, copies)

    def _name_of(self, info: Any) -> str:
        return ".".join(filter(None, (self._path, info.module_name, info.param_name)))

    def refuse(self, part: str) -> None:
        """Raises Sharded."""
        flat = self.flat
        if self._handle._offload_params:
            raise Sharded(
                f"part {part!r} is a FullyShardedDataParallel with cpu_offload, which a Checkpointer does not carry: "
                f"{_INSTEAD}, with CPUOffloadPolicy"
            )
        for slot, contiguous, extension in zip(
            self.slots, flat._contiguities, flat._param_extensions, strict=True
        ):
            if extension is not None:
                kind = "is split by tensor parallelism, too"
            elif not contiguous:
                kind = "was not contiguous when it was wrapped"
            else:
                continue
            raise Sharded(
                f"{slot.names[0]!r} of part {part!r} {kind}, which a Checkpointer does not carry with "
                f"FullyShardedDataParallel: {_INSTEAD}"
            )

    @property
    def shard(self) -> torch.Tensor:
        """This rank's, also while the unit has gathered all of it. Raises CheckpointError where the script has that."""
        if self._handle._training_state.name == "SUMMON_FULL_PARAMS":
            raise CheckpointError("leave summon_full_params() before a state is saved or loaded")
        shard: torch.Tensor | None = getattr(self.flat, "_local_shard", None)
        if shard is None:  # before the first forward
            flat: torch.Tensor = self.flat
            return flat.detach()
        if self.originals is not None and not self._handle._skipped_use_sharded_views:
            self._take_back(shard)
        return shard

    def _take_back(self, shard: torch.Tensor) -> None:
        """What the script has put into the place of a parameter's memory is brought into the shard, as FSDP1 does."""
        assert self.originals is not None
        if self.flat.data_ptr() != shard.data_ptr():
            return  # all of it is gathered
        begin, size = shard.data_ptr(), shard.element_size()
        for weight, slot in zip(self.originals, self.slots, strict=True):
            if slot.length and weight.data_ptr() != begin + slot.offset * size:
                self._handle._writeback_orig_params()
                return

    def runs(self) -> list[Run]:
        """Of each parameter; the same objects as before while they are in the same memory."""
        shard = self.shard
        if self._known[0] is not shard:
            self._known = shard, [slot.of_shard(shard) for slot in self.slots]
        return self._known[1]

    def reshard(self) -> None:
        """Give up what the unit has gathered: it is not what the shards are any more."""
        if self._handle.uses_sharded_strategy and hasattr(self.flat, "_local_shard"):
            from torch.distributed.fsdp._runtime_utils import _reshard

            _reshard(self._unit, self._handle, True)


def flat_parameters_of(module: torch.nn.Module) -> list[FlatParameter]:
    clean = Names(module).clean
    return [
        FlatParameter(one, path, clean)
        for path, one in module.named_modules()
        if is_fsdp1(one) and getattr(one, "_handle", None) is not None
    ]
