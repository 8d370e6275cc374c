"""The state of a module: names without those of wrappers, and its tensors read and written where they are.

`state_dict()` is called once. Where all that it gives are the module's own parameters and buffers, later saves take
these as they are, behind the hooks that go before a `state_dict()`: FSDP's puts its shards back into the module. A
module that gives anything else is asked each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from ...errors import CheckpointMismatch
from ..kinds import is_dtensor, is_sharded_tensor, is_tensor
from .items import FormCache, Leaf, Taken
from .leaves import Path, key_of
from .pieces import placed, refuse
from .reading import Reader, Wanted

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_READING = ("state_dict", "_save_to_state_dict")
_WRITING = ("load_state_dict", "_load_from_state_dict")


class Names:
    """Of one module's tensors, as they are without wrappers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._of_parallel = {
            f"{prefix}.module" if prefix else "module"
            for prefix, one in module.named_modules(remove_duplicate=False)
            if isinstance(one, DistributedDataParallel)
        }

    def clean(self, raw: str) -> str:
        parts = raw.split(".")
        return ".".join(
            part
            for end, part in enumerate(parts, 1)
            if part not in _WRAPPERS and not (part == "module" and ".".join(parts[:end]) in self._of_parallel)
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the tensors of a state are found in the module itself."""

    paths: list[Path]
    places: list[tuple[dict[str, Any], str]]
    tree: list[tuple[torch.nn.Module, list[torch.nn.Module | None], tuple[int, ...]]]
    hooks: list[tuple[torch.nn.Module, Callable[..., Any]]]

    @classmethod
    def of(cls, name: str, module: torch.nn.Module, state: dict[str, Any]) -> _Plan | None:
        """None: the state has something that is no parameter or buffer of the module."""
        names = Names(module)
        places: dict[str, tuple[dict[str, Any], str]] = {}
        for prefix, one in module.named_modules(remove_duplicate=False):
            for container in (one._parameters, one._buffers):
                for key in container:
                    raw = f"{prefix}.{key}" if prefix else key
                    places.setdefault(names.clean(raw), (container, key))
        found: dict[str, tuple[dict[str, Any], str]] = {}
        for raw, value in state.items():
            clean = names.clean(raw)
            place = places.get(clean)
            if place is None or not _is_alias(value, place[0][place[1]]):
                return None
            found[clean] = place
        modules = list(module.modules())
        return cls(
            [(name, clean) for clean in found],
            list(found.values()),
            [(one, list(one._modules.values()), _counts(one)) for one in modules],
            [(one, hook) for one in modules for hook in one._state_dict_pre_hooks.values()],
        )

    def tensors(self) -> list[torch.Tensor] | None:
        """None: the module has changed."""
        if any(
            list(one._modules.values()) != old or _counts(one) != counts for one, old, counts in self.tree
        ):
            return None
        for module, hook in self.hooks:
            hook(module, "", False)
        found = [container.get(key) for container, key in self.places]
        return None if any(one is None for one in found) else cast(list[torch.Tensor], found)


def _counts(module: torch.nn.Module) -> tuple[int, ...]:
    return (
        len(module._parameters),
        len(module._buffers),
        len(module._state_dict_pre_hooks),
        len(module._state_dict_hooks),
    )


def _is_alias(value: Any, own: Any) -> bool:
    """Whether a value in a state is this very parameter or buffer."""
    if is_dtensor(value) and is_dtensor(own):
        return value._spec == own._spec and _is_alias(value._local_tensor, own._local_tensor)
    if not isinstance(value, torch.Tensor) or not isinstance(own, torch.Tensor) or is_sharded_tensor(value):
        return False
    return (
        not is_dtensor(value)
        and not is_dtensor(own)
        and value.layout == own.layout == torch.strided
        and value.dtype == own.dtype
        and value.shape == own.shape
        and value.stride() == own.stride()
        and value.data_ptr() == own.data_ptr()
    )


def _is_written_by_copy(module: torch.nn.Module) -> bool:
    """Whether `load_state_dict` copies into parameters and buffers, and does nothing else that counts."""
    for one in module.modules():
        kind = type(one)
        methods = [getattr(kind, name) for name in (*_READING, *_WRITING)]
        hooks = (*one._load_state_dict_pre_hooks.values(), *one._load_state_dict_post_hooks.values())
        if not all(is_of_torch(method) for method in (*methods, *hooks)):
            return False
    return True


def is_of_torch(function: Any) -> bool:
    return str(getattr(getattr(function, "hook", function), "__module__", "")).startswith("torch.")


class ModuleState:
    """One part that is a module."""

    is_collective = False

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._name = name
        self._module = module
        self._plan: _Plan | None = None
        self._forms = FormCache()

    def _settle(self) -> None:
        """Let the module have its shards, where it has gathered all of them for its computation."""
        for module in self._module.modules():
            for hook in module._state_dict_pre_hooks.values():
                hook(module, "", False)

    def refuse(self) -> None:
        """Raises NotPlainData or Sharded."""
        self._settle()
        self._refuse_tensors()

    def _refuse_tensors(self) -> None:
        names = Names(self._module)
        for raw, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            refuse(self._name, names.clean(raw), tensor)

    def take(self, world_size: int, *, shared: bool) -> list[Taken]:
        plan, tensors = self._plan, None
        if plan is not None:
            tensors = plan.tensors()
        if plan is None or tensors is None:
            state = self._module.state_dict()
            plan = self._plan = _Plan.of(self._name, self._module, state)
            if plan is None:
                return self._asked(state, world_size, shared)
            tensors = plan.tensors()
            assert tensors is not None
        return [Taken(*self._forms.take(plan.paths, tensors, world_size, shared=shared), [])]

    def _asked(self, state: dict[str, Any], world_size: int, shared: bool) -> list[Taken]:
        names = Names(self._module)
        paths: list[Path] = []
        tensors: list[torch.Tensor] = []
        leaves: list[Leaf] = []
        for raw, value in state.items():
            path = (self._name, names.clean(raw))
            if is_tensor(value):
                refuse(self._name, path[1], value)
                paths.append(path)
                tensors.append(value)
            else:
                leaves.append(Leaf(path, value, shared))
        return [Taken(*self._forms.take(paths, tensors, world_size, shared=shared), leaves)]

    # ---------------------------------------------------------------- the way back

    def begin_load(self) -> None:
        """Nothing has to be done by all ranks together."""

    def prepare(self, reader: Reader) -> Callable[[], None]:
        """Name what is wanted; the function puts it into the module. Raises CheckpointMismatch."""
        state = self._module.state_dict()
        wanted, values = self._wanted(reader, state)
        copies = (
            not values
            and _Plan.of(self._name, self._module, state) is not None
            and _is_written_by_copy(self._module)
        )
        del state

        def apply() -> None:
            now = self._module.state_dict()
            for raw, pieces in wanted.items():
                fill(now[raw], pieces)
            if not copies:
                now.update(values)
                self._module.load_state_dict(now)

        return apply

    def _wanted(
        self, reader: Reader, state: Mapping[str, Any]
    ) -> tuple[dict[str, list[Wanted]], dict[str, Any]]:
        """For the keys of this state what its tensors need of the copies, and the values that are no tensors.

        Raises CheckpointMismatch.
        """
        names = Names(self._module)
        expected = {key_of((self._name, names.clean(raw))): raw for raw in state}
        saved = reader.under((self._name,))
        check_names(f"part {self._name!r}", saved, expected, has_stages=reader.has_stages)
        wanted = {
            raw: wanted_for(reader, key, state[raw])
            for key, raw in expected.items()
            if is_tensor(state[raw]) and reader.is_tensor(key)
        }
        return wanted, {raw: reader.value(key) for key, raw in expected.items() if not reader.is_tensor(key)}


def check_names(what: str, saved: Any, expected: Any, *, has_stages: bool = False) -> None:
    """Raises CheckpointMismatch. `has_stages`: what is not expected here is another rank's."""
    if missing := sorted(set(expected) - set(saved)):
        raise CheckpointMismatch(
            f"the checkpoint lacks {_some(missing)}, which {what} has: give Checkpointer the state that was saved, or "
            "use another directory"
        )
    unknown = [] if has_stages else sorted(set(saved) - set(expected))
    if unknown:
        raise CheckpointMismatch(
            f"the checkpoint has {_some(unknown)}, which {what} has not: give Checkpointer the state that was saved, "
            "or use another directory"
        )


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def wanted_for(reader: Reader, key: str, target: torch.Tensor) -> list[Wanted]:
    """What a tensor needs of the copies, by the boxes that this rank has of it. Raises CheckpointMismatch."""
    saved = reader.shard(key)
    other = saved.dtype != str(target.dtype).removeprefix("torch.")
    if saved.shape != tuple(target.shape) or other:
        raise CheckpointMismatch(
            f"{key!r} was saved as {saved.dtype} of shape {saved.shape}, and is "
            f"{str(target.dtype).removeprefix('torch.')} of shape {tuple(target.shape)} in this script"
        )
    return [reader.want(key, one.box) for one in placed(target)]


@torch.no_grad()
def fill(target: torch.Tensor, pieces: list[Wanted]) -> None:
    """Copy what was wanted into the tensor that it was wanted for."""
    for one, piece in zip(placed(target), pieces, strict=True):
        one.tensor.copy_(piece.tensor)
