"""A checkpoint's state as one process has it whole: what every form of a checkpoint is made of, and made into.

A replicated checkpoint knows the parameters of an optimizer by numbers, a sharded one by their names in the model. From
names to numbers is a matter of counting, and the names stay beside the numbers, where torch's own optimizers of
`named_parameters` write them too. Where they are not, a state does not say which parameter has which number: then they
are taken to be those of a model in its order, if that fits by number and shape, or have to be given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import CheckpointMismatch

STATE, GROUPS, PARAMS, NAMES = "state", "param_groups", "params", "param_names"
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Last words of names that are no parameters, in the modules of torch."""


@dataclass(slots=True)
class WholeState:
    """`states` by part, of optimizers as their `state_dict` is. `rng` and `own` by rank: random state, and the parts
    that are declared to be each rank's own."""

    step: int
    states: dict[str, Any]
    rng: list[torch.Tensor] = field(default_factory=list)
    own: list[dict[str, Any]] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return max(1, len(self.rng), len(self.own))


def is_optimizer(state: Any, params: type = int) -> bool:
    """Whether this is the state of an optimizer that knows its parameters by numbers, or `str`: by names."""
    if (
        not isinstance(state, Mapping)
        or set(state) != {STATE, GROUPS}
        or not isinstance(state[STATE], Mapping)
    ):
        return False
    groups = state[GROUPS]
    return isinstance(groups, list) and all(
        isinstance(group, Mapping)
        and isinstance(group.get(PARAMS), list | tuple)
        and all(type(one) is params for one in group[PARAMS])
        for group in groups
    )


def numbered(state: Mapping[str, Any], *, keep_names: bool) -> dict[str, Any]:
    """The state of an optimizer by names, as torch's own `state_dict` has it. `keep_names`: as that of an optimizer
    which was made of named parameters."""
    numbers: dict[str, int] = {}
    for group in state[GROUPS]:
        for name in group[PARAMS]:
            numbers.setdefault(name, len(numbers))
    groups = [{**group, PARAMS: [numbers[name] for name in group[PARAMS]]} for group in state[GROUPS]]
    if keep_names:
        groups = [
            {**new, NAMES: list(group[PARAMS])} for new, group in zip(groups, state[GROUPS], strict=True)
        ]
    by_number = {numbers[name]: one for name, one in state[STATE].items()}
    return {STATE: dict(sorted(by_number.items())), GROUPS: groups}


def named(part: str, state: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """The other way round. Names that are beside the numbers stay in the groups: an optimizer of named parameters
    looks for them there. Raises CheckpointMismatch for a state that is no parameter's."""
    if unknown := sorted(map(str, set(state[STATE]) - set(names))):
        raise CheckpointMismatch(
            f"part {part!r} has a state for {unknown[0]}, which is none of its parameters"
        )
    groups = [{**group, PARAMS: [names[number] for number in group[PARAMS]]} for group in state[GROUPS]]
    return {STATE: {names[number]: one for number, one in state[STATE].items()}, GROUPS: groups}


def has_names(state: Mapping[str, Any]) -> bool:
    """Whether this state of an optimizer by numbers has the names beside them."""
    return bool(_written(state))


def _written(state: Mapping[str, Any]) -> list[str]:
    return [name for group in state[GROUPS] for name in group.get(NAMES, ())]


@dataclass(frozen=True, slots=True)
class Numbering:
    """Which parameters the numbers of an optimizer stand for."""

    names: dict[int, str]
    doubt: str = ""
    """What was taken for granted, and what says otherwise, in a sentence. Empty: nothing was."""


def names_of_parameters(
    part: str, states: Mapping[str, Any], given: Sequence[str] | None = None
) -> Numbering:
    """Of the optimizer `part`; `given` are those that a person has written down, in order.

    Where names are neither given nor written in the state, and just one model fits by number and shape, the order is
    taken to be the model's. That is the usual one, but another order of parameters with the same shape would fit as
    well: then there is a doubt. Raises CheckpointMismatch where no model fits, or several do, or there are groups.
    """
    optimizer = states[part]
    numbers = [number for group in optimizer[GROUPS] for number in group[PARAMS]]
    written = _written(optimizer)
    for names in (given, written):
        if names:
            if len(names) != len(numbers) or len(set(names)) != len(names):
                raise CheckpointMismatch(
                    f"part {part!r} has {len(numbers)} parameters, and {len(set(names))} names for them"
                )
            return Numbering(dict(zip(numbers, names, strict=True)))
    found = [one for one in _candidates(states) if _fit(optimizer, numbers, one.parameters)]
    if len(optimizer[GROUPS]) != 1 or len(found) != 1:
        raise CheckpointMismatch(
            f"it is not known which parameters the numbers of part {part!r} stand for: write their names into a file, "
            "one on each line, in the order of the optimizer's groups, and give it as --parameter-names FILE. In the "
            "script that is: names = {p: n for n, p in model.named_parameters()}; "
            'print(*(names[p] for g in optimizer.param_groups for p in g["params"]), sep="\\n")'
        )
    (model,) = found
    doubt = ""
    if exchangeable := _exchangeable(optimizer, numbers, model.parameters):
        doubt = (
            f"the numbers of part {part!r} were taken for the parameters of {model.parts} in their order, which is not "
            f"certain: {exchangeable}. If the optimizer has another order, convert again with --parameter-names FILE"
        )
    return Numbering(dict(zip(numbers, model.parameters, strict=True)), doubt)


@dataclass(frozen=True, slots=True)
class _Candidate:
    parts: str
    """Whose parameters they are, for a reader."""
    parameters: dict[str, torch.Tensor]


def _candidates(states: Mapping[str, Any]) -> list[_Candidate]:
    """Of each part that looks like a module, and of all of them: what may be its parameters, in their order."""
    modules = [
        _Candidate(repr(name), found) for name, state in states.items() if (found := _parameters(state))
    ]
    together = {name: tensor for one in modules for name, tensor in one.parameters.items()}
    if len(modules) > 1 and len(together) == sum(len(one.parameters) for one in modules):
        modules.append(_Candidate(" and ".join(one.parts for one in modules), together))
    return modules


def _parameters(state: Any) -> dict[str, torch.Tensor]:
    if not isinstance(state, Mapping) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in state.items()
    ):
        return {}
    found: dict[str, torch.Tensor] = {}
    seen = set()
    for name, tensor in state.items():
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape)
        # Weights that are tied have two names, of which `named_parameters` gives the first.
        is_tied = tensor.numel() > 0 and place in seen
        if tensor.is_floating_point() and name.rpartition(".")[2] not in _BUFFERS and not is_tied:
            found[name] = tensor
        seen.add(place)
    return found


def _fit(optimizer: Mapping[str, Any], numbers: Sequence[int], names: Mapping[str, torch.Tensor]) -> bool:
    """Whether these can be the parameters: as many, and each of the shape of what the optimizer keeps for it."""
    if len(numbers) != len(names):
        return False
    for number, weight in zip(numbers, names.values(), strict=True):
        shapes = _shapes(optimizer[STATE].get(number, {}), weight)
        if weight.dim() and shapes and shapes != {tuple(weight.shape)}:
            return False
    return True


def _shapes(kept: Mapping[str, Any], weight: torch.Tensor) -> set[tuple[int, ...]]:
    """Of what the optimizer keeps for a parameter, as far as it may show the parameter's shape."""
    return {
        tuple(one.shape)
        for one in kept.values()
        if isinstance(one, torch.Tensor) and one.dim() == weight.dim()
    }


def _exchangeable(
    optimizer: Mapping[str, Any], numbers: Sequence[int], names: Mapping[str, torch.Tensor]
) -> str:
    """Two of these that fit, whose states could be exchanged and would fit as well; empty: there are none."""
    by_shape: dict[tuple[int, ...], tuple[str, bool]] = {}
    for number, (name, weight) in zip(numbers, names.items(), strict=True):
        kept = optimizer[STATE].get(number, {})
        if kept and not _shapes(kept, weight) and len(names) > 1:
            other = next(one for one in names if one != name)
            return f"{name} and {other} cannot be told apart by what is kept for them"
        before, keeps = by_shape.get(tuple(weight.shape), (name, False))
        keeps = keeps or bool(kept)
        if keeps and before != name:
            return f"{before} and {name} have the same shape"
        by_shape[tuple(weight.shape)] = before, keeps
    return ""
