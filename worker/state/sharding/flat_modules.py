"""The state of a module in which FullyShardedDataParallel (FSDP1) has made parameters flat, without its `state_dict()`.

The names are those that `state_dict()` gives. What is not flat, buffers and ignored parameters, is taken where it is,
which all ranks have alike. A module that makes its state in a way of its own would be asked for it by a collective, so
it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...errors import Sharded
from .flat_parameters import flat_parameters_of
from .items import FormCache, Taken
from .leaves import Path, key_of
from .modules import Names, check_names, fill, is_of_torch, wanted_for
from .pieces import Held, placed, refuse
from .reading import Reader

_AS_TORCH_READS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_OF_TORCH = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
_HOOKS = ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class FlatModuleState:
    """One part that is such a module."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._name = name
        self._module = module
        self._flat = flat_parameters_of(module)
        self._flat_names = {name for one in self._flat for slot in one.slots for name in slot.names}
        self._forms = FormCache()
        self._paths: list[Path] = []
        self._modules: list[torch.nn.Module] = []
        self._counts: list[tuple[int, int, int]] | None = None
        self._places: list[tuple[str, dict[str, Any], str]] = []

    def refuse(self) -> None:
        """Raises NotPlainData or Sharded."""
        for flat in self._flat:
            flat.refuse(self._name)
        for path, one in self._module.named_modules():
            if what := _own_way(one):
                raise Sharded(
                    f"module {path!r} of part {self._name!r} has its own {what}, which a Checkpointer does not call in "
                    "a FullyShardedDataParallel: use torch.distributed.fsdp.fully_shard instead"
                )
        for name, held in self._held().items():
            refuse(self._name, name, held)

    def take(self, world_size: int, *, shared: bool) -> list[Taken]:
        held = self._held()
        if len(held) != len(self._paths) or any(
            path[1] != name for path, name in zip(self._paths, held, strict=True)
        ):
            self._paths = [(self._name, name) for name in held]
        return [Taken(*self._forms.take(self._paths, list(held.values()), world_size, shared=shared), [])]

    def _held(self) -> dict[str, Held]:
        found: dict[str, Held] = {}
        for flat in self._flat:
            for slot, run in zip(flat.slots, flat.runs(), strict=True):
                found.update(dict.fromkeys(slot.names, run))
        for name, container, key in self._others():
            found[name] = container[key]
        return found

    def _others(self) -> list[tuple[str, dict[str, Any], str]]:
        """Of what is not flat the name, and where it lies."""
        counts = [(len(one._parameters), len(one._buffers), len(one._modules)) for one in self._modules]
        if counts != self._counts:
            self._modules = list(self._module.modules())
            self._counts = [
                (len(one._parameters), len(one._buffers), len(one._modules)) for one in self._modules
            ]
            self._places = list(self._found())
        return self._places

    def _found(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        names = Names(self._module)
        for prefix, one in self._module.named_modules(remove_duplicate=False):
            for container in (one._parameters, one._buffers):
                for key, value in container.items():
                    if value is None or key in one._non_persistent_buffers_set or _is_flat(value):
                        continue
                    name = names.clean(f"{prefix}.{key}" if prefix else key)
                    if name not in self._flat_names:
                        yield name, container, key

    # ---------------------------------------------------------------- the way back

    def prepare(self, reader: Reader) -> Callable[[], None]:
        """Name what is wanted; the function puts it into the module. Raises CheckpointMismatch."""
        held = self._held()
        keys = {name: key_of((self._name, name)) for name in held}
        # Of what this rank has nothing of, its own copy has nothing, either.
        needed = {keys[name] for name, one in held.items() if placed(one)}
        saved = set(reader.under((self._name,)))
        expected = needed | (saved & set(keys.values()))
        check_names(f"part {self._name!r}", saved, expected, has_stages=reader.has_stages)
        buffers = {id(one) for one in self._module.buffers()}
        wanted = {
            # FSDP1 has buffers in another precision from the first forward on.
            name: wanted_for(reader, keys[name], one, any_dtype=id(one) in buffers)
            for name, one in held.items()
            if keys[name] in needed
        }

        def apply() -> None:
            now = self._held()
            for name, pieces in wanted.items():
                fill(now[name], pieces)
            for flat in self._flat:
                flat.reshard()

        return apply


def _is_flat(value: Any) -> bool:
    return getattr(value, "_is_flat_param", False) is True


def _own_way(module: torch.nn.Module) -> str:
    """What of a module makes its state in a way of its own; empty: nothing."""
    kind = type(module)
    for name in _AS_TORCH_READS:
        if getattr(kind, name) is not getattr(torch.nn.Module, name):
            return f"{name}()"
    for name in _OF_TORCH:
        if not is_of_torch(getattr(kind, name)):
            return f"{name}()"
    for name in _HOOKS:
        for hook in getattr(module, name).values():
            function = getattr(hook, "hook", hook)
            while isinstance(function, functools.partial):
                function = function.func
            if not is_of_torch(function):
                return f"hook of {name.removeprefix('_').removesuffix('_hooks')}"
    return ""
