"""A checkpoint's state as one process has it whole: what every form of a checkpoint is made of, and made into.

A replicated checkpoint knows the parameters of an optimizer by numbers, a sharded one by their names in the model. From
names to numbers is a matter of counting. From numbers to names it is not, for a state does not say which parameter has
which number: newer optimizers write the names down, else they are found by order and shape, or have to be given.
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


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer by names, as torch's own `state_dict` has it."""
    numbers: dict[str, int] = {}
    for group in state[GROUPS]:
        for name in group[PARAMS]:
            numbers.setdefault(name, len(numbers))
    groups = [{**group, PARAMS: [numbers[name] for name in group[PARAMS]]} for group in state[GROUPS]]
    by_number = {numbers[name]: one for name, one in state[STATE].items()}
    return {STATE: dict(sorted(by_number.items())), GROUPS: groups}


def named(part: str, state: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """The other way round. Raises CheckpointMismatch for a state that is no parameter's."""
    if unknown := sorted(map(str, set(state[STATE]) - set(names))):
        raise CheckpointMismatch(
            f"part {part!r} has a state for {unknown[0]}, which is none of its parameters"
        )
    groups = [{**group, PARAMS: [names[number] for number in group[PARAMS]]} for group in state[GROUPS]]
    return {STATE: {names[number]: one for number, one in state[STATE].items()}, GROUPS: groups}


def names_of_parameters(
    part: str, states: Mapping[str, Any], given: Sequence[str] | None = None
) -> dict[int, str]:
    """By number, of the optimizer `part`; `given` are those that a person has written down, in order.

    Raises CheckpointMismatch where they cannot be known for certain.
    """
    optimizer = states[part]
    numbers = [number for group in optimizer[GROUPS] for number in group[PARAMS]]
    written = [name for group in optimizer[GROUPS] for name in group.get(NAMES, ())]
    for names in (given, written):
        if names:
            if len(names) != len(numbers) or len(set(names)) != len(names):
                raise CheckpointMismatch(
                    f"part {part!r} has {len(numbers)} parameters, and {len(set(names))} names for them"
                )
            return dict(zip(numbers, names, strict=True))
    found = [names for names in _candidates(states) if _fit(optimizer, numbers, names)]
    if len(optimizer[GROUPS]) != 1 or len(found) != 1:
        raise CheckpointMismatch(
            f"it is not known which parameters the numbers of part {part!r} stand for: write their names into a file, "
            "one on each line, in the order of the optimizer's groups, and give it as --parameter-names FILE. In the "
            "script that is: names = {p: n for n, p in model.named_parameters()}; "
            'print(*(names[p] for g in optimizer.param_groups for p in g["params"]), sep="\\n")'
        )
    return dict(zip(numbers, found[0], strict=True))


def _candidates(states: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Of each part that looks like a module, and of all of them: what may be its parameters, in their order."""
    modules = [found for state in states.values() if (found := _parameters(state))]
    together = {name: tensor for found in modules for name, tensor in found.items()}
    if len(modules) > 1 and len(together) == sum(map(len, modules)):
        modules.append(together)
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
        kept = optimizer[STATE].get(number, {})
        shapes = {
            tuple(one.shape)
            for one in kept.values()
            if isinstance(one, torch.Tensor) and one.dim() == weight.dim()
        }
        if weight.dim() and shapes and shapes != {tuple(weight.shape)}:
            return False
    return True
