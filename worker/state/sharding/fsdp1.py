"""FullyShardedDataParallel (FSDP1), whose state torch's own `state_dict` gives and takes, sharded by rows.

torch gathers one unit after the other for that, so it is a collective, and costs the memory of a unit. `fully_shard`
(FSDP2) needs neither. All ranks call `take` and `begin_load` together, and what `prepare` returns; `prepare` is one
rank's own business after `begin_load`, because a rank may have to try it again with other copies.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from ...errors import Sharded
from ..kinds import is_fsdp1
from .leaves import Leaves
from .modules import ModuleState, fill, wanted_for
from .optimizers import GROUPS, PARAMS, STATE, OptimizerState, ParameterNames
from .reading import Reader, Wanted, WantedTensor


def has_fsdp1(module: torch.nn.Module) -> bool:
    return any(map(is_fsdp1, module.modules()))


@contextlib.contextmanager
def sharded(module: torch.nn.Module) -> Iterator[None]:
    """Within, `state_dict` and what belongs to it give each rank its rows, and take them."""
    from torch.distributed import fsdp

    of_model, of_optimizer = fsdp.ShardedStateDictConfig(), fsdp.ShardedOptimStateDictConfig()
    kind = fsdp.StateDictType.SHARDED_STATE_DICT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all of FSDP1 is deprecated, and NO_SHARD gives what is whole
        with fsdp.FullyShardedDataParallel.state_dict_type(module, kind, of_model, of_optimizer):
            yield


class Fsdp1ModuleState(ModuleState):
    """One part that is such a module, or has some."""

    is_collective = True

    def _sharded(self) -> contextlib.AbstractContextManager[None]:
        return sharded(self._module)

    def _state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._module.state_dict()
        return state

    def refuse(self) -> None:
        """What it keeps is known when torch has given it."""


class Fsdp1OptimizerState(OptimizerState):
    """One part that is the optimizer of such a module."""

    is_collective = True

    def __init__(
        self, name: str, optimizer: torch.optim.Optimizer, names: ParameterNames, module: torch.nn.Module
    ) -> None:
        super().__init__(name, optimizer, names)
        self._module = module
        self._current: dict[str, Any] | None = None
        """While a state is loaded, that of now."""

    def refuse(self) -> None:
        """Raises Sharded. What it keeps is known when torch has given it."""
        own = set(map(id, self._module.parameters()))
        for number, group in enumerate(self._optimizer.param_groups):
            for index, weight in enumerate(group[PARAMS]):
                if id(weight) not in own:
                    raise Sharded(
                        f"'param_groups.{number}.params.{index}' of part {self._name!r}, of shape "
                        f"{tuple(weight.shape)}, is in another module than its FullyShardedDataParallel: torch gives "
                        "an optimizer's state for one module. Put all modules into one nn.Module, and give that"
                    )

    def take(self, *, shared: bool) -> Leaves:
        from torch.distributed.fsdp import FullyShardedDataParallel

        with sharded(self._module):
            state = FullyShardedDataParallel.optim_state_dict(self._module, self._optimizer)
        # As `get_optimizer_state_dict` does, which says at a load what is expected.
        state[STATE] = {_without_compiler(name): kept for name, kept in state[STATE].items()}
        for group in state[GROUPS]:
            group[PARAMS] = list(map(_without_compiler, group[PARAMS]))
        return Leaves().add(state, (self._name,))

    def begin_load(self) -> None:
        """Where the optimizer has no state yet, torch lets it make one, by a step with a learning rate of 0.

        That one goes again: nothing changes before all ranks have read.
        """
        had_state = bool(self._optimizer.state)
        with sharded(self._module):
            self._current = get_optimizer_state_dict(self._module, self._optimizer)
        if not had_state:
            self._optimizer.state.clear()

    def prepare(self, reader: Reader) -> Callable[[], None]:
        """Name what is wanted; the function puts it into the optimizer. Raises CheckpointMismatch."""
        if self._current is None:
            self.begin_load()
        current = self._current
        assert current is not None
        at = (self._name, STATE)
        with sharded(self._module):
            groups = self._matched(reader, current[GROUPS])
            by_name = self._saved_states(
                reader, [name for group in current[GROUPS] for name in group[PARAMS]]
            )
            present = Leaves().add(current[STATE], at).by_key
            pieces: dict[str, list[Wanted]] = {}
            wholes: dict[str, WantedTensor] = {}
            for key in (one for keys in by_name.values() for one in keys if reader.is_tensor(one)):
                if key in present and present[key].dim():
                    pieces[key] = wanted_for(reader, key, present[key])
                else:
                    wholes[key] = WantedTensor.like(reader, key, None)

        def value_of(key: str) -> torch.Tensor:
            if key in wholes:
                return wholes[key].made()
            fill(present[key], pieces[key])
            return present[key]

        def apply() -> None:
            own = [group[PARAMS] for group in current[GROUPS]]
            merged = [{**new, PARAMS: names} for new, names in zip(groups, own, strict=True)]
            with sharded(self._module):
                states = {name: reader.state((*at, name), value_of) for name in by_name}
                set_optimizer_state_dict(self._module, self._optimizer, {STATE: states, GROUPS: merged})
            if not states:
                self._optimizer.state.clear()
            self._current = None

        return apply


def _without_compiler(name: str) -> str:
    return name.replace("_orig_mod.", "")


def module_of(optimizer: torch.optim.Optimizer, modules: list[torch.nn.Module]) -> torch.nn.Module | None:
    """The module with FSDP1 of which the optimizer has parameters. None: there is none."""
    own = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    for module in modules:
        if has_fsdp1(module) and any(id(weight) in own for weight in module.parameters()):
            return module
    return None
