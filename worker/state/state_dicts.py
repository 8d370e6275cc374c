"""What the parts of a training script give as their state, and how a state that was loaded reaches them."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import zip_longest
from typing import Any, BinaryIO, Protocol

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..errors import CheckpointMismatch, NotPlainData

_MAX_REASON_CHARS = 500
_PLAIN_ONLY = (
    "torch.load(weights_only=True) refuses that; let its state_dict() return tensors, numbers, strings, lists and "
    "dicts only"
)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, torch.Size, torch.dtype})


class Stateful(Protocol):
    """Anything whose state can be taken out and put back: modules, optimizers, schedulers, samplers, scalers."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


Part = Stateful | dict[str, Any]


def state_of(part: Part) -> Any:
    return dict(part) if isinstance(part, dict) else unwrapped(part).state_dict()


def load_into(part: Part, state: Any, modules: Iterable[torch.nn.Module] = ()) -> None:
    """The tensors of `state` are not the part's to keep. `modules` as in `update`."""
    put_into(part, _copied(state), modules)


def put_into(part: Part, state: Any, modules: Iterable[torch.nn.Module]) -> None:
    """The state is the part's to keep. Raises CheckpointMismatch, and what `load_state_dict` raises."""
    if isinstance(part, dict):
        update(part, state, modules)
        return
    part = unwrapped(part)
    if isinstance(part, torch.optim.Optimizer):
        groups = named_alike(state["param_groups"], part.param_groups)
        load_optimizer(part, {**state, "param_groups": groups})
    else:
        part.load_state_dict(state)


def update(part: dict[str, Any], state: dict[str, Any], modules: Iterable[torch.nn.Module]) -> None:
    """Give a plain dict these values, which are its to keep.

    The script may hold what is in it: its dicts and lists stay, and its dense tensors of the same shape and dtype,
    where they are. One that is a weight or buffer of `modules` is replaced: it is of a `state_dict()` that was not
    cloned, and its value may be of another step than the module's. Keys that `state` lacks stay.
    """
    new_in_script = {key: value for key, value in part.items() if key not in state}
    _filled(part, dict(state), {_address(one) for module in modules for one in own_tensors(module)})
    part.update(new_in_script)


def _filled(own: Any, state: Any, taken: AbstractSet[int]) -> Any:
    """`state`, in what `own` has for it."""
    if isinstance(own, dict) and isinstance(state, dict):
        values = {key: _filled(own.get(key), value, taken) for key, value in state.items()}
        own.clear()
        own.update(values)
        return own
    if type(own) is type(state) and type(own) in (list, tuple):
        made = [_filled(*pair, taken) for pair in zip_longest(own[: len(state)], state)]
        if isinstance(own, tuple):
            return tuple(made)
        own[:] = made
        return own
    if isinstance(own, torch.Tensor) and isinstance(state, torch.Tensor):
        # Another layout or mesh, an expanded tensor: torch says so before it changes anything.
        with contextlib.suppress(RuntimeError), torch.no_grad():
            alike = own.shape == state.shape and own.dtype == state.dtype and not own.is_meta
            if alike and _address(own) not in taken:
                return own.copy_(state)
    return state


def _address(tensor: torch.Tensor) -> int:
    """Where its elements are, of a DTensor those of this rank. Raises RuntimeError for one without a storage."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()


def load_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Raises CheckpointMismatch for the state of an optimizer of another kind, which torch takes without a word.

    Its groups have hyperparameters that this one does not know, and lack some that it needs. Those that are new in a
    version of torch, the optimizer adds by itself as it loads.
    """
    own: set[str] = set().union(*optimizer.param_groups)
    try:
        optimizer.load_state_dict(state)
    finally:
        known = own.intersection(*optimizer.param_groups)
        lacking = (own & optimizer.defaults.keys()) - known
        foreign = set().union(*state["param_groups"]) - own - {"param_names"}
        if lacking and foreign:
            raise CheckpointMismatch(
                f"the state is another optimizer's: it has {sorted(foreign)}, and lacks {sorted(lacking)} of "
                f"{type(optimizer).__name__}. Give Checkpointer the optimizer that was saved, or use another directory"
            )


def named_alike(groups: list[dict[str, Any]], own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of an optimizer's state, without the names of parameters where it has none of its own: with them torch
    would let no group without names be added."""
    return [
        {key: value for key, value in group.items() if key != "param_names" or any(key in one for one in own)}
        for group in groups
    ]


def _copied(state: Any) -> Any:
    # Not every layout has a storage, which deepcopy asks for.
    memo: dict[int, Any] = {
        id(tensor): tensor.clone() for tensor in _tensors(state) if tensor.layout != torch.strided
    }
    return copy.deepcopy(state, memo)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)


def unwrapped(part: Stateful) -> Stateful:
    return part.module if isinstance(part, DistributedDataParallel | DataParallel) else part


def modules_in(state: Mapping[str, Part]) -> list[torch.nn.Module]:
    parts = [unwrapped(part) for part in state.values() if not isinstance(part, dict)]
    return [part for part in parts if isinstance(part, torch.nn.Module)]


def own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def is_plain(state: Any) -> bool:
    """Whether it holds nothing but what `torch.load(weights_only=True)` always takes: then nothing need be proven."""
    kind = type(state)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return not state.__dict__  # a tensor's own attributes are saved with it
    if kind in (dict, OrderedDict):
        return all(is_plain(key) and is_plain(value) for key, value in state.items())
    if kind in (list, tuple):
        return all(map(is_plain, state))
    if kind is bytes:
        return len(state) > 0  # pickle writes none as a call, which a load refuses
    return kind in _PLAIN


def with_numbers(state: Any) -> Any:
    """The same with Python's numbers in the place of numpy's scalars, which a load would refuse."""
    if is_plain(state):
        return state
    kind = type(state)
    if kind in (dict, OrderedDict):
        made = copy.copy(state)  # with the versions that modules keep beside their states
        for key, value in state.items():
            made[key] = with_numbers(value)
        return made
    if kind in (list, tuple):
        return kind(map(with_numbers, state))
    numpy: Any = sys.modules.get("numpy")
    return state.item() if numpy is not None and isinstance(state, numpy.generic) else state


def refuse_code(parts: Mapping[str, Part]) -> None:
    """Raises NotPlainData, by part and key, for what could not be loaded again, if a part has it by now.

    Not looked at are modules and optimizers, whose states may be large, and tensors.
    """
    states = {}
    for name, part in parts.items():
        if isinstance(part, dict) or not isinstance(unwrapped(part), torch.nn.Module | torch.optim.Optimizer):
            with contextlib.suppress(Exception):  # the first save says why there is no state
                states[name] = state_of(part)
    if what := _refused_in(states):
        raise NotPlainData(f"{what}: {_PLAIN_ONLY}")


def prove_loadable(file: BinaryIO, step: int, states: Mapping[str, Any]) -> None:
    """Load it by the very rules that a load obeys. `states` are those in it, by part. Raises NotPlainData."""
    try:
        torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        what = _refused_in(states) or _what_was_refused(error)
        raise NotPlainData(f"step {step} not saved: {what}: {_PLAIN_ONLY}") from error


def _refused_in(states: Mapping[str, Any]) -> str:
    """Part, key and type of the first object that a load refuses; empty: there is none."""
    for name, state in states.items():
        if found := _refused(with_numbers(state)):
            keys, kind = found
            key = f", key {'/'.join(map(str, keys))}" if keys else ""
            return f"part {name!r}{key}: {kind.__module__}.{kind.__qualname__}"
    return ""


def _refused(state: Any) -> tuple[tuple[Any, ...], type] | None:
    kind = type(state)
    if is_plain(state) or isinstance(state, torch.Tensor):
        return None
    if kind in (dict, OrderedDict, list, tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            for one in (key, value):
                if found := _refused(one):
                    return (key, *found[0]), found[1]
        return None
    stream = io.BytesIO()
    try:
        torch.save(state, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception:
        return (), kind
    return None


def _what_was_refused(error: Exception) -> str:
    # torch explains at length how to switch the protection off; what it refused is in one line of that.
    lines = [line.strip() for line in str(error).splitlines() if "Unsupported" in line]
    return (lines or [repr(error)])[0][:_MAX_REASON_CHARS]
