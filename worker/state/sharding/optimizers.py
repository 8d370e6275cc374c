"""The state of an optimizer, by the names of the parameters, as `torch.distributed.checkpoint.state_dict` has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...errors import CheckpointMismatch, Sharded
from ..kinds import is_dtensor, is_spread, is_tensor
from ..state_dicts import load_optimizer, named_alike
from .items import FormCache, Leaf, Taken
from .leaves import Path, flatten, key_of, split
from .modules import Names, check_names
from .pieces import refuse
from .reading import Reader, WantedTensor

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


class ParameterNames:
    """Of all parameters in the parts that are modules, as they are in the first module that has them."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = modules
        self._known: dict[int, tuple[str, str, torch.Tensor]] = {}
        """By the identity of a parameter."""

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

    is_collective = False

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, names: ParameterNames) -> None:
        self._name = name
        self._optimizer = optimizer
        self._parameter_names = names
        self._state_forms = FormCache()
        self._group_forms = FormCache()
        self._tensors: list[torch.Tensor] = []
        """The parameters, in the order of the groups."""
        self._names: list[str] = []
        """Of these."""
        self._plan: list[tuple[Any, list[str], int]] = []
        """Of each state its key in the `state_dict`, the names of its tensors, and how many values it has."""
        self._paths: list[Path] = []
        """Of all these tensors."""

    def refuse(self) -> None:
        """Raises NotPlainData or Sharded."""
        for name, tensor in zip(self._all_names(), self._tensors, strict=True):
            refuse(self._name, name, tensor)
            for path, one in flatten(self._optimizer.state.get(tensor, {}), (STATE, name)):
                if is_tensor(one):
                    self._refuse_kept(key_of(path), one, tensor)

    def _refuse_kept(self, key: str, one: torch.Tensor, parameter: torch.Tensor) -> None:
        refuse(self._name, key, one)
        if is_spread(parameter) and not is_dtensor(one) and one.numel() > 1:
            raise Sharded(
                f"{key!r} of part {self._name!r} is a plain tensor that belongs to a DTensor: each rank has its own, "
                "and torch does not say where it lies in the whole. Use an optimizer that keeps DTensors"
            )

    def _all_names(self) -> list[str]:
        """In the order of the groups."""
        tensors = [weight for group in self._optimizer.param_groups for weight in group[PARAMS]]
        if len(tensors) != len(self._tensors) or any(
            a is not b for a, b in zip(tensors, self._tensors, strict=True)
        ):
            self._tensors, self._names = tensors, self._parameter_names.of(tensors)
            self._plan = []
        return self._names

    # ---------------------------------------------------------------- taking

    def take(self, world_size: int, *, shared: bool) -> list[Taken]:
        state = self._optimizer.state_dict()[STATE]
        names = self._all_names()
        leaves: list[Leaf] = []
        tensors = self._known_tensors(state)
        if tensors is None:
            tensors, leaves = self._learn(state, names, shared)
        taken = Taken(*self._state_forms.take(self._paths, tensors, world_size, shared=shared), leaves)
        paths, of_groups, others = split(self._groups(), (self._name, GROUPS))
        groups = Taken(
            *self._group_forms.take(paths, of_groups, world_size, shared=shared),
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

    def _learn(
        self, state: Mapping[Any, Any], names: Sequence[str], shared: bool
    ) -> tuple[list[torch.Tensor], list[Leaf]]:
        paths: list[Path] = []
        tensors: list[torch.Tensor] = []
        leaves: list[Leaf] = []
        plan: list[tuple[Any, list[str], int]] = []
        is_flat = bool(state)
        for number, one in state.items():
            if number not in range(len(names)):
                raise Sharded(
                    f"part {self._name!r} keeps a state for {number!r}, which is none of its parameters: it is not "
                    "known which rank has it"
                )
            found_paths, found, others = (
                split(dict(one), (self._name, STATE, names[number])) if one else ([], [], [])
            )
            for path, tensor in zip(found_paths, found, strict=True):
                self._refuse_kept(key_of(path[1:]), tensor, self._tensors[number])
            paths += found_paths
            tensors += found
            leaves += [Leaf(*other, shared) for other in others]
            plan.append((number, [str(path[-1]) for path in found_paths], len(one)))
            is_flat = is_flat and all(len(path) == 4 for path in found_paths)
        self._plan, self._paths = plan if is_flat and not leaves else [], paths
        return tensors, leaves

    def _groups(self) -> list[dict[str, Any]]:
        names = iter(self._all_names())
        return [
            {key: [next(names) for _ in value] if key == PARAMS else value for key, value in group.items()}
            for group in self._optimizer.param_groups
        ]

    # ---------------------------------------------------------------- the way back

    def begin_load(self) -> None:
        """Nothing has to be done by all ranks together."""

    def prepare(self, reader: Reader) -> Callable[[], None]:
        """Name what is wanted; the function puts it into the optimizer. Raises CheckpointMismatch."""
        names = self._all_names()
        groups = self._matched(reader, self._groups())
        state_path = (self._name, STATE)
        by_name = self._saved_states(reader, names)
        current = self._optimizer.state_dict()[STATE]
        states: dict[int, Callable[[], Any]] = {}
        for number, (name, tensor) in enumerate(zip(names, self._tensors, strict=True)):
            made = _want_state(reader, (*state_path, name), tensor, current.get(number, {}), by_name)
            if made is not None:
                states[number] = made

        def apply() -> None:
            self._load({number: made() for number, made in states.items()}, groups)

        return apply

    def _saved_states(self, reader: Reader, names: Iterable[str]) -> dict[str, list[str]]:
        """The keys of what is saved for each parameter. Raises CheckpointMismatch for other parameters."""
        by_name: dict[str, list[str]] = {}
        for key, path in reader.under((self._name, STATE)).items():
            by_name.setdefault(str(path[2]), []).append(key)
        check_names(f"part {self._name!r}", {*by_name, *names}, set(names), has_stages=reader.has_stages)
        return by_name

    def _saved_groups(self, reader: Reader) -> list[dict[str, Any]]:
        def hyperparameter(key: str) -> torch.Tensor:
            wanted = WantedTensor.like(reader, key, None)
            reader.read()
            return wanted.made()

        return self._required(reader.state((self._name, GROUPS), hyperparameter))

    def _required(self, groups: Any) -> list[dict[str, Any]]:
        """Raises CheckpointMismatch."""
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise CheckpointMismatch(f"the checkpoint has no groups of parameters for part {self._name!r}")
        return groups

    def _matched(self, reader: Reader, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The saved hyperparameters for each of the optimizer's own groups. Raises CheckpointMismatch."""
        own = [set(group[PARAMS]) for group in groups]
        saved = self._saved_groups(reader)
        by_names = {frozenset(one.get(PARAMS, ())): one for one in saved}
        if all(frozenset(names) in by_names for names in own):
            return [_hyperparameters(by_names[frozenset(names)]) for names in own]
        # Each rank may have had a stage of the model: then it has saved the groups of its own parameters.
        of_ranks = [
            group
            for groups in reader.states_of_copies((self._name, GROUPS))
            for group in self._required(groups)
        ]
        return [
            self._joined(names, set().union(*own) - names, of_ranks, has_stages=reader.has_stages)
            for names in own
        ]

    def _joined(
        self, names: set[str], others: set[str], saved: list[dict[str, Any]], *, has_stages: bool
    ) -> dict[str, Any]:
        """Of the saved groups of which this one has parameters, and no other one has any."""
        mine = [one for one in saved if not names.isdisjoint(one.get(PARAMS, ()))]
        have = {name for one in mine for name in one[PARAMS]}
        check_names(f"part {self._name!r}", have, names, has_stages=has_stages or not others.isdisjoint(have))
        found = [_hyperparameters(one) for one in mine]
        if not found or not others.isdisjoint(have) or not all(_is_same(found[0], one) for one in found):
            raise CheckpointMismatch(
                f"part {self._name!r} has other groups of parameters than the checkpoint: give the optimizer the "
                "groups that were saved"
            )
        return found[0]

    @torch.no_grad()
    def _load(self, states: dict[int, Any], groups: list[dict[str, Any]]) -> None:
        local = self._optimizer
        packed = local.state_dict()[GROUPS]
        named = named_alike(groups, packed)
        merged = [{**new, PARAMS: old[PARAMS]} for new, old in zip(named, packed, strict=True)]
        try:
            load_optimizer(local, {STATE: states, GROUPS: merged})
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"part {self._name!r} does not fit this script: {error}") from error
        weights = [weight for group in local.param_groups for weight in group[PARAMS]]
        for number, state in states.items():
            _keep_dtypes(local.state[weights[number]], state)


def _want_state(
    reader: Reader, at: Path, tensor: torch.Tensor, current: Any, by_name: Mapping[str, list[str]]
) -> Callable[[], Any] | None:
    """What the optimizer is to keep of one parameter; None: nothing."""
    name = str(at[-1])
    if name not in by_name:
        return None
    present = {key_of(path): one for path, one in flatten(current, at) if is_tensor(one)}
    wanted = {
        key: _want(reader, key, tensor, present.get(key)) for key in by_name[name] if reader.is_tensor(key)
    }
    return lambda: reader.state(at, lambda key: wanted[key].made())


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != PARAMS}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return bool(one == other)


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
