"""The state of an optimizer, by the names of the parameters, as `torch.distributed.checkpoint.state_dict` has it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...errors import CheckpointMismatch, Sharded
from ..kinds import is_dtensor, is_spread
from ..state_dicts import load_optimizer, named_alike
from .items import PLAIN
from .leaves import Leaves, Path, key_of, structure_path
from .modules import Names, check_names
from .pieces import refuse
from .reading import Reader

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
MORE = "more"
"""Under which lies what an optimizer keeps beside both, and what it keeps for no parameter, as its STATE."""


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
        self._tensors: list[torch.Tensor] = []
        """The parameters, in the order of the groups."""
        self._names: list[str] = []
        self._spread: list[bool] = []
        """Of these."""
        self._flat: dict[int, tuple[tuple[Any, ...], list[Path]]] = {}
        """Of each state that is nothing but tensors its keys, and the paths of these: to make those takes time."""

    def refuse(self) -> None:
        """Raises NotPlainData or Sharded."""
        for name, weight in zip(self._all_names(), self._tensors, strict=True):
            refuse(self._name, name, weight)
            kept = Leaves().add(self._optimizer.state.get(weight, {}), (STATE, name))
            for key, one in kept.by_key.items():
                refuse(self._name, key, one)
                if is_spread(weight):
                    self._refuse_plain(key, one)

    def _refuse_plain(self, key: str, one: torch.Tensor) -> None:
        if type(one) in PLAIN and one.numel() > 1:
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
            self._spread = list(map(is_spread, tensors))
            self._flat = {}
        return self._names

    def take(self, *, shared: bool) -> Leaves:
        names = self._all_names()
        found = Leaves()
        state = self._optimizer.state_dict()
        more = {key: value for key, value in state.items() if key not in (STATE, GROUPS)}
        for number, kept in state[STATE].items():
            if number not in range(len(names)):
                if any(self._spread):
                    raise Sharded(
                        f"part {self._name!r} keeps a state for {number!r}, which is none of its parameters: it is not "
                        "known which rank has it"
                    )
                more.setdefault(STATE, {})[number] = kept
                continue
            keys, known = tuple(kept), self._flat.get(number)
            if known is not None and known[0] == keys and all(map(torch.is_tensor, kept.values())):
                found.paths.extend(known[1])
                found.tensors.extend(kept.values())
            elif kept:
                new = Leaves().add(dict(kept), (self._name, STATE, names[number]))
                if self._spread[number]:
                    for path, one in zip(new.paths, new.tensors, strict=True):
                        self._refuse_plain(key_of(path[1:]), one)
                if len(new.paths) == len(keys) and not new.others:
                    self._flat[number] = keys, new.paths
                found.extend(new)
        if more:
            found.add(more, (self._name, MORE), ordered=True)
        return found.add(self._groups(), (self._name, GROUPS))

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
        names, groups = self._all_names(), self._groups()
        if names == [str(number) for number in range(len(names))]:
            groups = self._by_order(reader, groups)
            names = [name for one in groups for name in one[PARAMS]]
        groups = self._matched(reader, groups)
        by_name = self._saved_states(reader, names)
        current = self._optimizer.state_dict()[STATE]
        states: dict[int, Callable[[], Any]] = {}
        for number, (name, weight) in enumerate(zip(names, self._tensors, strict=True)):
            if name in by_name:
                at = (self._name, STATE, name)
                present = Leaves().add(current.get(number, {}), at).by_key
                states[number] = reader.want_state(at, functools.partial(_like, reader, weight, present))

        kept = (self._name, MORE)
        more: Callable[[], dict[str, Any]] = dict
        if key_of(structure_path(kept)) in reader.paths:
            more = reader.want_state(kept)

        def apply() -> None:
            beside = more()
            for_none = beside.pop(STATE, {})
            self._load({number: made() for number, made in states.items()}, groups, for_none, beside)

        return apply

    def _by_order(self, reader: Reader, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With the names that were saved, as torch's own `load_state_dict`: no module here has these parameters."""
        saved = self._saved_groups(reader)
        return (
            saved if [len(one[PARAMS]) for one in saved] == [len(one[PARAMS]) for one in groups] else groups
        )

    def _saved_states(self, reader: Reader, names: Iterable[str]) -> dict[str, list[str]]:
        """The keys of what is saved for each parameter. Raises CheckpointMismatch for other parameters."""
        by_name: dict[str, list[str]] = {}
        for key, path in reader.under((self._name, STATE)).items():
            by_name.setdefault(str(path[2]), []).append(key)
        check_names(f"part {self._name!r}", {*by_name, *names}, set(names), has_stages=reader.has_stages)
        return by_name

    def _saved_groups(self, reader: Reader) -> list[dict[str, Any]]:
        at = (self._name, GROUPS)
        groups = reader.want_state(at)
        if any(map(reader.is_tensor, reader.under(at))):
            reader.read()
        return self._required(groups())

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
    def _load(
        self,
        states: dict[int, Any],
        groups: list[dict[str, Any]],
        for_none: Mapping[Any, Any],
        beside: Mapping[str, Any],
    ) -> None:
        """`for_none`: states of no parameter; `beside`: what is no state and no group."""
        local = self._optimizer
        packed = local.state_dict()[GROUPS]
        named = named_alike(groups, packed)
        merged = [{PARAMS: old[PARAMS], **new} for new, old in zip(named, packed, strict=True)]
        try:
            load_optimizer(local, {STATE: {**states, **for_none}, GROUPS: merged, **beside})
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"part {self._name!r} does not fit this script: {error}") from error
        weights = [weight for group in local.param_groups for weight in group[PARAMS]]
        for number, state in states.items():
            _keep_dtypes(local.state[weights[number]], state)


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != PARAMS}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _like(reader: Reader, weight: torch.Tensor, present: Mapping[str, torch.Tensor], key: str) -> Any:
    """As the optimizer has it already; else as it has the parameter, where it is distributed at all."""
    one = present.get(key)
    if one is not None and tuple(one.shape) == reader.shard(key).shape:
        return one if is_dtensor(one) else None
    return weight if is_dtensor(weight) and not _is_plain(reader, key, weight) else None


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
