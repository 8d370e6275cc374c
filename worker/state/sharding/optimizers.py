"""The state of an optimizer, keyed by the names of the parameters as `torch.distributed.checkpoint.state_dict` has it.

Of ZeroRedundancyOptimizer it is the state of the optimizer inside, which holds whole tensors for the parameters that
this rank owns; the hyperparameters are those of all. Where FSDP1 has made parameters flat, what has dimensions is
spread as they are, and all else belongs to each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import CheckpointMismatch, Sharded
from ..kinds import is_dtensor, is_spread, is_tensor, is_zero
from ..state_dicts import load_optimizer, named_alike
from .flat_parameters import Slot, flat_parameters_of
from .items import FormCache, Leaf, Taken
from .leaves import Path, filled, flatten, key_of, split, structure_path, unflatten
from .modules import Names, check_names, fill, wanted_for
from .pieces import Held, Run, refuse
from .reading import Reader, Wanted, WantedTensor, dtype_of

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter as an optimizer has it: a flat one has several names. `slots`: of each, where FSDP1 has made it flat.

    `alone`: it is one of the parameters that are flat together, as with `use_orig_params`.
    """

    names: list[str]
    slots: list[Slot] = field(default_factory=list)
    alone: bool = False

    def runs(self, tensor: torch.Tensor) -> list[Run]:
        """Of what the optimizer keeps of each element."""
        if self.alone:
            return [self.slots[0].alone(tensor)]
        return [slot.of_shard(tensor) for slot in self.slots]


class ParameterNames:
    """Of all parameters in the parts that are modules, as they are in the first module that has them."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = modules
        self._known: dict[int, tuple[str, str, object]] = {}
        """By the identity of a parameter, or of the slot of one that is flat with others."""
        self._slots: dict[int, tuple[list[Slot], bool]] = {}
        """Of the flat parameters of FSDP1, or of their original ones: whether it is one of these alone."""
        self._flat = [(part, one) for part, module in modules.items() for one in flat_parameters_of(module)]
        for part, one in self._flat:
            self._slots[id(one.flat)] = one.slots, False
            for original, slot in zip(one.originals or (), one.slots, strict=False):
                self._slots[id(original)] = [slot], True
            for slot in one.slots:
                self._known[id(slot)] = part, slot.names[0], slot

    def of(self, weights: Sequence[torch.Tensor]) -> list[_Weight]:
        """By order. A parameter that is in no module has its number for a name."""
        slots = [self._slots.get(id(weight), ([], False)) for weight in weights]
        if not all(
            mine or id(weight) in self._known for weight, (mine, _) in zip(weights, slots, strict=True)
        ):
            for part, module in self._modules.items():
                cleaner = Names(module)
                for raw, weight in module.named_parameters():
                    self._known.setdefault(id(weight), (part, cleaner.clean(raw), weight))
        held: list[list[object]] = [
            list(mine) or [weight] for weight, (mine, _) in zip(weights, slots, strict=True)
        ]
        found = [[self._known.get(id(one)) for one in some] for some in held]
        names = [[one[1] if one else str(number) for one in some] for number, some in enumerate(found)]
        flat = [name for some in names for name in some]
        if len(set(flat)) < len(flat):  # of several modules that have equal names
            names = [
                [f"{one[0]}.{one[1]}" if one else str(number) for one in some]
                for number, some in enumerate(found)
            ]
        return [_Weight(some, *one) for some, one in zip(names, slots, strict=True)]


class OptimizerState:
    """One part that is an optimizer."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, names: ParameterNames) -> None:
        self._name = name
        self._optimizer = optimizer
        self._names = names
        self._is_zero = is_zero(optimizer)
        self._state_forms = FormCache()
        self._group_forms = FormCache()
        self._tensors: list[torch.Tensor] = []
        """The parameters, in the order of the groups."""
        self._weights: list[_Weight] = []
        self._plan: list[tuple[Any, list[str], int, _Weight]] = []
        """Of each state its key in the `state_dict`, the names of its tensors, and how many values it has."""
        self._paths: list[Path] = []
        """Of all these tensors."""
        self._runs: dict[tuple[Any, str], tuple[torch.Tensor, list[Held]]] = {}
        """By the key of a state and the name of a tensor in it."""

    def refuse(self) -> None:
        """Raises NotPlainData or Sharded."""
        zero: Any = self._optimizer
        if self._is_zero and zero._overlap_with_ddp:
            raise Sharded(
                f"part {self._name!r} is a ZeroRedundancyOptimizer with overlap_with_ddp=True, whose optimizer inside "
                "has no state_dict(): make it with overlap_with_ddp=False"
            )
        for weight, tensor in zip(self._all_weights(), self._tensors, strict=True):
            name = weight.names[0]
            refuse(self._name, name, tensor)
            state = self._local.state.get(tensor, {})
            for path, one in flatten(state, (_STATE, name)):
                if is_tensor(one):
                    refuse(self._name, key_of(path), one)
                    self._refuse_local(key_of(path), one, weight, tensor)

    def _refuse_local(self, key: str, one: torch.Tensor, weight: _Weight, tensor: torch.Tensor) -> None:
        if is_spread(tensor) and not is_dtensor(one) and one.numel() > 1:
            raise Sharded(
                f"{key!r} of part {self._name!r} is a plain tensor that belongs to a DTensor: each rank has its own, "
                "and torch does not say where it lies in the whole. Use an optimizer that keeps DTensors"
            )
        if weight.slots and one.dim() and one.numel() != tensor.numel():
            raise Sharded(
                f"{key!r} of part {self._name!r} has {one.numel()} elements, and its parameter, which "
                f"FullyShardedDataParallel has made flat, {tensor.numel()} on this rank: it is not known where they "
                "belong. Use torch.distributed.fsdp.fully_shard instead"
            )

    @property
    def _local(self) -> torch.optim.Optimizer:
        zero: Any = self._optimizer
        return zero.optim if self._is_zero else self._optimizer

    def _all_weights(self) -> list[_Weight]:
        """In the order of the groups."""
        tensors = [weight for group in self._optimizer.param_groups for weight in group[_PARAMS]]
        if len(tensors) != len(self._tensors) or any(
            a is not b for a, b in zip(tensors, self._tensors, strict=True)
        ):
            self._tensors, self._weights = tensors, self._names.of(tensors)
            self._plan, self._runs = [], {}
        return self._weights

    def _local_weights(self) -> dict[int, tuple[_Weight, torch.Tensor]]:
        """By the number that a parameter has in the `state_dict` of the optimizer that steps here."""
        pairs = list(zip(self._all_weights(), self._tensors, strict=True))
        if not self._is_zero:
            return dict(enumerate(pairs))
        known = {id(tensor): (weight, tensor) for weight, tensor in pairs}
        local = [weight for group in self._local.param_groups for weight in group[_PARAMS]]
        return {number: known[id(weight)] for number, weight in enumerate(local)}

    # ---------------------------------------------------------------- taking

    def take(self, world_size: int, *, shared: bool) -> list[Taken]:
        state = self._local.state_dict()[_STATE]
        weights = self._all_weights()
        # Of what a rank of ZeRO keeps no other rank has anything, and where FSDP1 has made parameters flat some ranks
        # keep nothing of a parameter; of the hyperparameters all have the same.
        is_spread_flat = any(slot.copies == 0 for weight in weights for slot in weight.slots)
        of_all = shared and not self._is_zero and not is_spread_flat
        leaves: list[Leaf] = []
        tensors = self._known_tensors(state)
        if tensors is None:
            tensors, leaves = self._learn(state, of_all)
        taken = Taken(*self._state_forms.take(self._paths, tensors, world_size, shared=of_all), leaves)
        paths, of_groups, others = split(self._groups(), (self._name, _GROUPS))
        groups = Taken(
            *self._group_forms.take(paths, of_groups, world_size, shared=shared),
            [Leaf(*one, shared) for one in others],
        )
        return [taken, groups]

    def _known_tensors(self, state: Mapping[Any, Any]) -> list[Held] | None:
        """None: the state has other names than before, or is no longer known to hold tensors only."""
        if not self._plan or len(state) != len(self._plan):
            return None
        found: list[Held] = []
        try:
            for number, names, count, weight in self._plan:
                one = state[number]
                if len(one) != count:
                    return None
                if weight.slots:
                    for name in names:
                        found += self._of_flat(number, name, one[name], weight)
                else:
                    found += [one[name] for name in names]
        except KeyError:
            return None
        return found

    def _of_flat(self, number: Any, name: str, tensor: torch.Tensor, weight: _Weight) -> list[Held]:
        """What this tensor is of each parameter; the same objects as before while it is the same tensor."""
        known = self._runs.get((number, name))
        if known is None or known[0] is not tensor:
            held: list[Held] = [*weight.runs(tensor)] if tensor.dim() else [tensor] * len(weight.slots)
            known = self._runs[number, name] = tensor, held
        return known[1]

    def _learn(self, state: Mapping[Any, Any], of_all: bool) -> tuple[list[Held], list[Leaf]]:
        weights = self._local_weights()
        paths: list[Path] = []
        tensors: list[Held] = []
        leaves: list[Leaf] = []
        plan: list[tuple[Any, list[str], int, _Weight]] = []
        is_flat = bool(state)
        for number, one in state.items():
            if number not in weights:
                raise Sharded(
                    f"part {self._name!r} keeps a state for {number!r}, which is none of its parameters: it is not "
                    "known which rank has it"
                )
            weight, parameter = weights[number]
            parts = [
                split(dict(one), (self._name, _STATE, name)) if one else ([], [], []) for name in weight.names
            ]
            found_paths, found, _ = parts[0]
            for at, (path, tensor) in enumerate(zip(found_paths, found, strict=True)):
                key = key_of(path[1:])
                refuse(self._name, key, tensor)
                self._refuse_local(key, tensor, weight, parameter)
                paths += [part[0][at] for part in parts]
                if weight.slots:
                    tensors += self._of_flat(number, key_of(path[3:]), tensor, weight)
                else:
                    tensors.append(tensor)
            leaves += [Leaf(*other, of_all) for part in parts for other in part[2]]
            plan.append((number, [str(path[-1]) for path in found_paths], len(one), weight))
            is_flat = is_flat and all(len(path) == 4 for path in found_paths)
        self._plan, self._paths = plan if is_flat and not leaves else [], paths
        return tensors, leaves

    def _groups(self) -> list[dict[str, Any]]:
        weights = iter(self._all_weights())
        return [
            {
                key: [name for _ in value for name in next(weights).names] if key == _PARAMS else value
                for key, value in group.items()
            }
            for group in self._optimizer.param_groups
        ]

    # ---------------------------------------------------------------- the way back

    def prepare(self, reader: Reader) -> Callable[[], None]:
        """Name what is wanted; the function puts it into the optimizer. Raises CheckpointMismatch."""
        weights = self._local_weights()
        groups = self._matched(reader)
        state_path = (self._name, _STATE)
        by_name: dict[str, list[str]] = {}
        for key, path in reader.under(state_path).items():
            by_name.setdefault(str(path[2]), []).append(key)
        names = {name for weight in self._weights for name in weight.names}
        check_names(f"part {self._name!r}", {*by_name, *names}, names, has_stages=reader.has_stages)
        current = self._local.state_dict()[_STATE]
        states: dict[int, Callable[[], Any]] = {}
        for number, (weight, tensor) in weights.items():
            if weight.slots:
                made = _want_flat(reader, state_path, weight, tensor, by_name)
            else:
                made = _want_state(
                    reader, (*state_path, weight.names[0]), tensor, current.get(number, {}), by_name
                )
            if made is not None:
                states[number] = made

        def apply() -> None:
            self._load({number: made() for number, made in states.items()}, groups)

        return apply

    def _saved_groups(self, reader: Reader) -> list[dict[str, Any]]:
        def hyperparameter(key: str) -> torch.Tensor:
            wanted = WantedTensor.like(reader, key, None)
            reader.read()
            return wanted.made()

        return self._required(reader.state((self._name, _GROUPS), hyperparameter))

    def _required(self, groups: Any) -> list[dict[str, Any]]:
        """Raises CheckpointMismatch."""
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise CheckpointMismatch(f"the checkpoint has no groups of parameters for part {self._name!r}")
        return groups

    def _matched(self, reader: Reader) -> list[dict[str, Any]]:
        """The saved hyperparameters for each group of this optimizer. Raises CheckpointMismatch."""
        own = [set(group[_PARAMS]) for group in self._groups()]
        saved = self._saved_groups(reader)
        by_names = {frozenset(one.get(_PARAMS, ())): one for one in saved}
        if all(frozenset(names) in by_names for names in own):
            return [_hyperparameters(by_names[frozenset(names)]) for names in own]
        # Each rank may have had a stage of the model: then it has saved the groups of its own parameters.
        of_ranks = [
            group
            for groups in reader.states_of_copies((self._name, _GROUPS))
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
        mine = [one for one in saved if not names.isdisjoint(one.get(_PARAMS, ()))]
        have = {name for one in mine for name in one[_PARAMS]}
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
        local = self._local
        packed = local.state_dict()[_GROUPS]
        named = named_alike(groups, packed)
        merged = [{**new, _PARAMS: old[_PARAMS]} for new, old in zip(named, packed, strict=True)]
        try:
            load_optimizer(local, {_STATE: states, _GROUPS: merged})
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"part {self._name!r} does not fit this script: {error}") from error
        weights = [weight for group in local.param_groups for weight in group[_PARAMS]]
        for number, state in states.items():
            _keep_dtypes(local.state[weights[number]], state)
        if self._is_zero:
            for own, new in zip(self._optimizer.param_groups, groups, strict=True):
                own.update(new)


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


def _want_flat(
    reader: Reader, at: Path, weight: _Weight, tensor: torch.Tensor, by_name: Mapping[str, list[str]]
) -> Callable[[], Any] | None:
    """As `_want_state`, of a parameter that FSDP1 has made flat, or of one of those that are flat together.

    Raises CheckpointMismatch where the parameters of a flat one do not have the same there.
    """
    saved = [name for name in weight.names if name in by_name]
    if not saved or (weight.alone and not weight.slots[0].length):
        return None
    if len(saved) < len(weight.names):
        lacking = next(name for name in weight.names if name not in by_name)
        raise CheckpointMismatch(
            f"the checkpoint has what the optimizer keeps of {saved[0]!r}, and not of {lacking!r}, which this script "
            "makes flat together: wrap the model with use_orig_params=True"
        )
    keys: dict[Path, list[str]] = {}
    """Of each thing that is kept: by parameter."""
    for name in weight.names:
        for key in by_name[name]:
            rest = reader.paths[key][len(at) + 1 :]
            keys.setdefault(rest, [key_of((*at, one, *rest)) for one in weight.names])
    pieces: dict[Path, list[tuple[Run, list[Wanted]]]] = {}
    wholes: dict[Path, torch.Tensor] = {}
    alike: dict[Path, list[WantedTensor]] = {}
    for rest, some in keys.items():
        here = [(key, slot) for key, slot in zip(some, weight.slots, strict=True) if reader.is_tensor(key)]
        if any(_is_of_elements(reader, key, slot) for key, slot in here):
            whole = torch.zeros(tensor.numel(), dtype=dtype_of(reader.shard(here[0][0])))
            wholes[rest], runs = whole, weight.runs(whole)
            lengths = [len(run.elements) for run in runs]
            if any(length and not reader.is_tensor(key) for key, length in zip(some, lengths, strict=True)):
                raise _not_alike(weight, rest)
            pieces[rest] = [
                (run, wanted_for(reader, key, run))
                for key, run, length in zip(some, runs, lengths, strict=True)
                if length
            ]
        elif not all(key in reader.paths for key in some):
            raise _not_alike(weight, rest)
        elif here:
            alike[rest] = [WantedTensor.like(reader, key, None) for key in some]
        elif any(reader.value(key) != reader.value(some[0]) for key in some):
            raise _not_alike(weight, rest)
    if not pieces and not any(slot.length for slot in weight.slots):
        raise CheckpointMismatch(
            f"what is kept of the elements of {weight.names[0]!r} is in other ranks' copies"
        )
    reader.read()
    scalars = {rest: [one.made() for one in some] for rest, some in alike.items()}
    for rest, found in scalars.items():
        if not all(torch.equal(found[0], one) for one in found):
            raise _not_alike(weight, rest)

    def value_of(rest: Path) -> Any:
        if rest in scalars:
            return scalars[rest][0]
        if rest not in pieces:
            return reader.value(keys[rest][0])
        for run, wanted in pieces[rest]:
            fill(run, wanted)
        return wholes[rest].view(tensor.shape)

    def made() -> Any:
        structure = key_of(structure_path((*at, weight.names[0])))
        if structure in reader.paths:
            return filled(reader.value(structure), (), value_of)
        return unflatten([(rest, value_of(rest)) for rest in keys])

    return made


def _not_alike(weight: _Weight, rest: Path) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"the checkpoint has not the same {key_of(rest)!r} of {weight.names[0]!r} and of the others that this script "
        "makes flat together: wrap the model with use_orig_params=True"
    )


def _is_of_elements(reader: Reader, key: str, slot: Slot) -> bool:
    """Whether this is spread as the parameter is, which FSDP1 refuses without a dimension; else it is one for all."""
    return reader.shard(key).shape == slot.shape


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != _PARAMS}


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
