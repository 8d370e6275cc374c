"""What a DDP communication hook knows from one step to the next, as a part of a Checkpointer's state.

torch's fp16 and bf16 hooks know nothing. Post-local SGD counts steps. PowerSGD keeps for each of DDP's buckets the
error that this rank has not sent yet, and its last approximation: they belong to the parameters of that bucket, in
their order. By default DDP makes its buckets anew after the first backward of a process, so a restarted one would have
others: that is refused at the first save after it. With `find_unused_parameters=True` DDP keeps those that it has.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from .rng import plain

_POWER_SGD = "PowerSGDState"
_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")
_CARRIED = {
    _POWER_SGD: (
        *_BY_BUCKET,
        "iter",
        "next_stats_report",
        "total_numel_before_compression",
        "total_numel_after_compression",
    ),
    "PostLocalSGDState": ("iter",),
}
"""By the type of torch's state, the attributes that training changes."""
_FORM = {
    _POWER_SGD: (
        "matrix_approximation_rank",
        "min_compression_rate",
        "use_error_feedback",
        "warm_start",
        "batch_tensors_with_same_shape",
    ),
    "PostLocalSGDState": (),
}
"""Attributes that give the others their form."""

Hook = Callable[[Any, Any], torch.futures.Future[Any]]


class HookState:
    """The state of the hook that `register_comm_hook` has registered; name it in `per_rank`."""

    def __init__(self, state: object, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._state = state
        trained = [one for one in parameters if one.requires_grad]
        self._device = trained[0].device if trained else torch.device("cpu")
        self._numbers = {id(one): number for number, one in enumerate(trained)}
        self._buckets: dict[int, list[int]] = {}
        """The parameters of each of DDP's, in their order."""
        self._have_changed = False
        self._loaded = False

    def watching(self, hook: Hook) -> Hook:
        """The hook. Where its state is kept by bucket, it is seen whether DDP keeps these."""
        if _name_of(self._state) != _POWER_SGD:
            return hook

        @functools.wraps(hook)
        def watched(state: Any, bucket: Any) -> torch.futures.Future[Any]:
            self._look_at(bucket.index(), [self._numbers[id(one)] for one in bucket.parameters()])
            future = hook(state, bucket)
            if not bucket.buffer().is_cuda:
                # Its callbacks wait in gloo's few threads for collectives that need these, and in another order on
                # each rank than what DDP sends meanwhile.
                future.wait()
            return future

        return watched

    def state_dict(self) -> dict[str, Any]:
        """Raises CheckpointError where it could not be loaded again."""
        state: Any = self._state
        kind = _kind_of(state)
        if kind == "state_dict":
            return {"state": state.state_dict()}
        if isinstance(state, dict):
            return {"state": dict(state)}
        if not kind:
            return {}
        if self._have_changed and (state.use_error_feedback or state.warm_start):
            raise CheckpointError(
                "PowerSGD's error belongs to DDP's buckets, which are others in the first step of a process than "
                "later: give DistributedDataParallel find_unused_parameters=True, which keeps them, or PowerSGDState "
                "use_error_feedback=False and warm_start=False, or leave the hook out of the Checkpointer's state"
            )
        found: dict[str, Any] = {name: getattr(state, name) for name in _CARRIED[kind]}
        found["form"] = self._form(kind)
        if kind == _POWER_SGD:
            found["rng"] = plain(state.rng.get_state(legacy=False))
            found["buckets"] = dict(self._buckets)
        return found

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError for the state of another hook."""
        state, kind = self._state, _kind_of(self._state)
        if kind in _CARRIED:
            self._take(saved, kind)
        elif not kind:
            if saved:
                raise ValueError(f"this hook has no state, and the checkpoint has its {sorted(saved)}")
        elif saved.keys() != {"state"}:
            raise ValueError(f"the checkpoint has the {sorted(saved)} of another hook")
        elif isinstance(state, dict):
            state.clear()
            state.update(saved["state"])
        else:
            state.load_state_dict(saved["state"])  # type: ignore[attr-defined]

    def _take(self, saved: Mapping[str, Any], kind: str) -> None:
        expected = {*_CARRIED[kind], "form"} | ({"rng", "buckets"} if kind == _POWER_SGD else set())
        if saved.keys() != expected:
            raise ValueError(f"the checkpoint has the {sorted(saved)} of another hook, this one is {kind}")
        if saved["form"] != self._form(kind):
            raise ValueError(
                f"the checkpoint's hook had {saved['form']}, this one has {self._form(kind)}: make them the same"
            )
        for name in _CARRIED[kind]:
            value = saved[name]
            if name in _BY_BUCKET:
                value = {bucket: tensor.to(self._device) for bucket, tensor in value.items()}
            setattr(self._state, name, value)
        if kind == _POWER_SGD:
            generator = importlib.import_module("numpy").random.RandomState()
            generator.set_state(saved["rng"])
            self._state.rng = generator  # type: ignore[attr-defined]
            self._buckets = dict(saved["buckets"]) if self._belongs_to_buckets() else {}
            self._have_changed, self._loaded = False, True

    def _form(self, kind: str) -> dict[str, Any]:
        return {name: getattr(self._state, name) for name in _FORM[kind]}

    def _look_at(self, index: int, numbers: list[int]) -> None:
        """Raises CheckpointError where a loaded state belongs to buckets that DDP does not have."""
        if self._buckets.setdefault(index, numbers) == numbers:
            return
        if self._loaded and self._belongs_to_buckets():
            raise CheckpointError(
                "the state of DDP's communication hook belongs to other buckets than DDP has now: give "
                "DistributedDataParallel the model and the options that it had when this was saved, or start from "
                "another checkpoint"
            )
        self._buckets[index], self._have_changed = numbers, True

    def _belongs_to_buckets(self) -> bool:
        state: Any = self._state
        return bool(
            (state.use_error_feedback and state.error_dict)
            or (state.warm_start and (state.p_memory_dict or state.q_memory_dict))
        )


def _name_of(state: object) -> str:
    """Of torch's states that are carried; empty: it is none of them."""
    kind = type(state)
    return kind.__name__ if kind.__name__ in _CARRIED and kind.__module__.startswith("torch.") else ""


def _kind_of(state: object) -> str:
    """How to get at it; empty: there is nothing to carry. Raises CheckpointError for what is unknown."""
    if state is None or isinstance(state, torch.distributed.ProcessGroup):
        return ""
    if callable(getattr(state, "state_dict", None)) and callable(getattr(state, "load_state_dict", None)):
        return "state_dict"
    if name := _name_of(state):
        return name
    if isinstance(state, dict):
        return "dict"
    raise CheckpointError(
        f"the state of the communication hook is a {type(state).__qualname__}, of which it is not known what to keep: "
        "give it state_dict() and load_state_dict()"
    )
