"""The state of an optimizer, keyed by the names of the parameters as `torch.distributed.checkpoint.state_dict` has it.

Of ZeroRedundancyOptimizer it is the state of the optimizer inside, which holds whole tensors for the parameters that
this rank owns; the hyperparameters are those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import CheckpointMismatch, Sharded
from ..kinds import is_dtensor, is_spread, is_tensor, is_zero
from .items import FormCache, Leaf, Taken
from .leaves import Path, flatten, key_of, split
from .modules import Names, check_names
from .pieces import refuse
from .reading import Reader, WantedTensor

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"


class ParameterNames:
    """Of all parameters in the parts that are modules, as they are in the first module that has them."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = modules
        self._known: dict[int, tuple[str, str, torch.Tensor]] = {}

    def of(self, weights: Sequence[torch.Tensor]) -> list[str]:
        """By order. A parameter that is in no module has its number for a name."""
        if not all(id(weight) in self._known for weight in weights):
            for part, module in self._modules.items():
                cleaner = Names(module)
                for raw, weight in module.named_parameters():
                    self._known.setdefault(id(weight), (part, cleaner.clean(raw), weight))
        found = [self._known.get(id(weight)) for weight in weights]
        names = [one[1] if one else str(number) for number, one in enumerate(found)]
        if len(set(names)) < len(names):  # of several modules that have equal names
            names = [f"{one[0]}.{one[1]}" if one else str(number) for number, one in enumerate(found)]
        return names


class OptimizerState:
    """One part that is an optimizer."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, names: ParameterNames) -> None:
        self._name = name
        self._optimizer = optimizer
        self._names = names
        self._is_zero = is_zero(optimizer)
        self._state_forms = FormCache()
        self._group_forms = FormCache()
        self._weights: list[torch.Tensor] = []
        self._weight_names: list[str] = []
        self._plan: list[tuple[Any, list[str], int]] = []
        """Of each state its key in the `state_dict`, the names of its tensors, and how many values it has."""
        self._paths: list[Path] = []
        """Of all these tensors."""

    def refuse(self) -> None:
        """Raises NotPlainData or Sharded."""
        zero: Any = self._optimizer
        if self._is_zero and zero._overlap_with_ddp:
            raise Sharded(
                f"part {self._name!r} is a ZeroRedundancyOptimizer with overlap_with_ddp=True, whose optimizer inside "
                "has no state_dict(): make it with overlap_with_ddp=False"
            )
        for name, weight in zip(self._all_names(), self._weights, strict=True):
            refuse(self._name, name, weight)
            state = self._local.state.get(weight, {})
            for path, one in flatten(state, (_STATE, name)):
                if is_tensor(one):
                    refuse(self._name, key_of(path), one)
                    self._refuse_local(key_of(path), one, weight)

    def _refuse_local(self, key: str, one: torch.Tensor, weight: torch.Tensor) -> None:
        if is_spread(weight) and not is_dtensor(one) and one.numel() > 1:
            raise Sharded(
                f"{key!r} of part {self._name!r} is a plain tensor that belongs to a DTensor: each rank has its own, "
                "and torch does not say where it lies in the whole. Use an optimizer that keeps DTensors"
            )

    @property
    def _local(self) -> torch.optim.Optimizer:
        zero: Any = self._optimizer
        return zero.optim if self._is_zero else self._optimizer

    def _all_names(self) -> list[str]:
        """Of all parameters, in the order of the groups."""
        weights = [weight for group in self._optimizer.param_groups for weight in group[_PARAMS]]
        if len(weights) != len(self._weights) or any(
            a is not b for a, b in zip(weights, self._weights, strict=True)
        ):
            self._weights, self._weight_names = weights, self._names.of(weights)
            self._plan = []
        return self._weight_names

    def _local_names(self) -> dict[int, str]:
        """By the number that a parameter has in the `state_dict` of the optimizer that steps here."""
        names = self._all_names()
        if not self._is_zero:
            return dict(enumerate(names))
        by_weight = {id(weight): name for weight, name in zip(self._weights, names, strict=True)}
        local = [weight for group in self._local.param_groups for weight in group[_PARAMS]]
        return {number: by_weight[id(weight)] for number, weight in enumerate(local)}

    # ---------------------------------------------------------------- taking

    def take(self, world_size: int, *, shared: bool) -> list[Taken]:
        state = self._local.state_dict()[_STATE]
        # Of what a rank of ZeRO keeps no other rank has anything; of the hyperparameters all have the same.
        of_all = shared and not self._is_zero
        self._all_names()
        leaves: list[Leaf] = []
        tensors = self._known_tensors(state)
        if tensors is None:
            tensors, leaves = self._learn(state, of_all)
        taken = Taken(*self._state_forms.take(self._paths, tensors, world_size, shared=of_all), leaves)
        paths, tensors, others = split(self._groups(), (self._name, _GROUPS))
        groups = Taken(
            *self._group_forms.take(paths, tensors, world_size, shared=shared),
            [Leaf(*one, shared) for one in others],
        )
        return [taken, groups]

    def _known_tensors(self, state: Mapping[Any, Any]) -> list[torch.Tensor] | None:
        """None: the state has other names than before, or is no longer known to hold tensors only."""
        if not self._plan or len(state) != len(self._plan):
            return None
        found: list[torch.Tensor] = []
        try:
            for number, names, count in self._plan:
                one = state[number]
                if len(one) != count:
                    return None
                found += [one[name] for name in names]
        except KeyError:
            return None
        return found

    def _learn(self, state: Mapping[Any, Any], of_all: bool) -> tuple[list[torch.Tensor], list[Leaf]]:
        names = self._local_names()
        weights = dict(zip(self._weight_names, self._weights, strict=True))
        paths: list[Path] = []
        tensors: list[torch.Tensor] = []
        leaves: list[Leaf] = []
        plan: list[tuple[Any, list[str], int]] = []
        for number, one in state.items():
            if number not in names:
                raise Sharded(
                    f"part {self._name!r} keeps a state for {number!r}, which is none of its parameters: it is not "
                    "known which rank has it"
                )
            at = (self._name, _STATE, names[number])
            found_paths, found, others = split(dict(one), at) if one else ([], [], [])
            for path, tensor in zip(found_paths, found, strict=True):
                refuse(self._name, key_of(path[1:]), tensor)
                self._refuse_local(key_of(path[1:]), tensor, weights[names[number]])
            paths += found_paths
            tensors += found
            leaves += [Leaf(*other, of_all) for other in others]
            plan.append((number, [str(path[-1]) for path in found_paths], len(one)))
        is_flat = not leaves and all(len(path) == len(at) + 1 for path in paths) if state else False
        self._plan, self._paths = plan if is_flat else [], paths
        return tensors, leaves

    def _groups(self) -> list[dict[str, Any]]:
        names = iter(self._all_names())
        return [
            {key: [next(names) for _ in value] if key == _PARAMS else value for key, value in group.items()}
            for group in self._optimizer.param_groups
        ]

    # ---------------------------------------------------------------- the way back

    def prepare(self, reader: Reader) -> Callable[[], None]:
        """Name what is wanted; the function puts it into the optimizer. Raises CheckpointMismatch."""
        local_names = self._local_names()
        weights = dict(zip(self._weight_names, self._weights, strict=True))
        saved_groups = self._saved_groups(reader)
        groups = self._matched(saved_groups)
        state_path = (self._name, _STATE)
        by_name: dict[str, list[str]] = {}
        for key, path in reader.under(state_path).items():
            by_name.setdefault(str(path[2]), []).append(key)
        check_names(f"part {self._name!r}", {*by_name, *weights}, weights)
        current = self._local.state_dict()[_STATE]
        wanted: dict[str, WantedTensor] = {}
        for number, name in local_names.items():
            if name not in by_name:
                continue
            present = {
                key_of(path): one
                for path, one in flatten(current.get(number, {}), (*state_path, name))
                if is_tensor(one)
            }
            for key in by_name[name]:
                if reader.is_tensor(key):
                    wanted[key] = _want(reader, key, weights[name], present.get(key))

        def apply() -> None:
            states = {
                number: reader.state((*state_path, name), lambda key: wanted[key].made())
                for number, name in local_names.items()
                if name in by_name
            }
            self._load(states, groups)

        return apply

    def _saved_groups(self, reader: Reader) -> list[dict[str, Any]]:
        def hyperparameter(key: str) -> torch.Tensor:
            wanted = WantedTensor.like(reader, key, None)
            reader.read()
            return wanted.made()

        groups = reader.state((self._name, _GROUPS), hyperparameter)
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise CheckpointMismatch(f"the checkpoint has no groups of parameters for part {self._name!r}")
        return groups

    def _matched(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The saved hyperparameters for each group of this optimizer. Raises CheckpointMismatch."""
        own = self._groups()
        found = []
        for group in own:
            names = set(group[_PARAMS])
            same = [one for one in saved if set(one.get(_PARAMS, ())) == names]
            if not same:
                have = {name for one in saved for name in one.get(_PARAMS, ())}
                check_names(f"part {self._name!r}", have, {name for one in own for name in one[_PARAMS]})
                raise CheckpointMismatch(
                    f"part {self._name!r} has other groups of parameters than the checkpoint: give the optimizer the "
                    "groups that were saved"
                )
            found.append({key: value for key, value in same[0].items() if key != _PARAMS})
        return found

    @torch.no_grad()
    def _load(self, states: dict[int, Any], groups: list[dict[str, Any]]) -> None:
        local = self._local
        packed = local.state_dict()[_GROUPS]
        merged = [{**new, _PARAMS: old[_PARAMS]} for new, old in zip(groups, packed, strict=True)]
        local.load_state_dict({_STATE: states, _GROUPS: merged})
        weights = [weight for group in local.param_groups for weight in group[_PARAMS]]
        for number, state in states.items():
            _keep_dtypes(local.state[weights[number]], state)
        if self._is_zero:
            for own, new in zip(self._optimizer.param_groups, groups, strict=True):
                own.update(new)


def _want(reader: Reader, key: str, weight: torch.Tensor, present: torch.Tensor | None) -> WantedTensor:
    """As the optimizer has it already; else as it has the parameter, where it is distributed at all."""
    shape = reader.shard(key).shape
    if present is not None and tuple(present.shape) == shape:
        like = present if is_dtensor(present) else None
    else:
        like = weight if is_dtensor(weight) and not _is_plain(reader, key, weight) else None
    return WantedTensor.like(reader, key, like)


def _is_plain(reader: Reader, key: str, weight: torch.Tensor) -> bool:
    """Whether an optimizer has this as a plain tensor for a parameter that is a DTensor: steps, and what all have."""
    shape = reader.shard(key).shape
    if shape == tuple(weight.shape):
        return not shape and key.endswith(".step")
    return not shape or (reader.is_whole(key) and (reader.is_common(key) or len(shape) < weight.dim()))


def _keep_dtypes(made: Any, saved: Any) -> None:
    """What `load_state_dict` has cast to the parameter's type is what was saved."""
    if not isinstance(made, dict):
        return
    for key, value in saved.items():
        if isinstance(value, Mapping):
            _keep_dtypes(made.get(key), value)
        elif isinstance(value, torch.Tensor) and made[key].dtype != value.dtype:
            made[key] = value.to(made[key].device)
