"""The state of a module: names without those of wrappers, and its tensors read and written where they are.

`state_dict()` is asked each time, behind the hooks that go before it: FSDP's puts its shards back into the module. It
gives the parameters and buffers themselves, since views of many DTensors take longer than all else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ...errors import CheckpointMismatch
from ..kinds import is_tensor
from .leaves import Leaves, key_of
from .pieces import placed, refuse
from .reading import Reader, Wanted

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


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


class ModuleState:
    """One part that is a module."""

    is_collective = False

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._name = name
        self._module = module
        self._paths: dict[str, tuple[str, str]] = {}
        """By the names that the newest state has."""
        self._current: dict[str, Any] | None = None
        """While a state is loaded, that of now."""

    def _sharded(self) -> contextlib.AbstractContextManager[None]:
        """Within, `state_dict()` and `load_state_dict()` give and take what this rank has."""
        return contextlib.nullcontext()

    def _state_dict(self) -> dict[str, Any]:
        method: Any = self._module.state_dict
        is_of_torch = getattr(method, "__func__", None) is torch.nn.Module.state_dict
        state: dict[str, Any] = method(keep_vars=True) if is_of_torch else method()
        return state

    @torch.no_grad()
    def _state(self) -> dict[str, Any]:
        with self._sharded():
            state = self._state_dict()
        if state.keys() != self._paths.keys():
            names = Names(self._module)
            self._paths = {raw: (self._name, names.clean(raw)) for raw in state}
        return state

    def refuse(self) -> None:
        """Raises NotPlainData or Sharded."""
        for raw, value in self._state().items():
            if is_tensor(value):
                refuse(*self._paths[raw], value)

    def take(self, *, shared: bool) -> Leaves:
        found = Leaves()
        for raw, value in self._state().items():
            found.put(self._paths[raw], value)
        return found

    # ---------------------------------------------------------------- the way back

    def begin_load(self) -> None:
        self._current = self._state()

    def prepare(self, reader: Reader) -> Callable[[], None]:
        """Name what is wanted; the function puts it into the module. Raises CheckpointMismatch."""
        if self._current is None:
            self.begin_load()
        state = self._current
        assert state is not None
        wanted, values = self._wanted(reader, state)

        def apply() -> None:
            with self._sharded():
                for raw, pieces in wanted.items():
                    fill(state[raw], pieces)
                state.update(values)
                self._module.load_state_dict(state)
            self._current = None

        return apply

    def _wanted(
        self, reader: Reader, state: Mapping[str, Any]
    ) -> tuple[dict[str, list[Wanted]], dict[str, Any]]:
        """For the keys of this state what its tensors need of the copies, and the values that are no tensors.

        Raises CheckpointMismatch.
        """
        expected = {key_of(self._paths[raw]): raw for raw in state}
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
