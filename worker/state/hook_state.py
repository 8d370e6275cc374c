"""What a DDP communication hook knows from one step to the next, as a part of a Checkpointer's state.

torch's fp16 and bf16 hooks know nothing. Post-local SGD counts steps. PowerSGD keeps for each of DDP's buckets the
error that this rank has not sent yet, and its last approximation: they belong to the parameters of that bucket, in
their order. How a restarted process gets these buckets: see `hook_buckets`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from .hook_buckets import Hook, HookBuckets
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


class HookState:
    """The state of the hook that `register_comm_hook` has registered; name it in `per_rank`."""

    def __init__(self, state: object, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._state = state
        trained = [one for one in parameters if one.requires_grad]
        self._device = trained[0].device if trained else torch.device("cpu")
        self._buckets = HookBuckets(trained, self._refuse_other_buckets)
        self._loaded = False

    def watching(self, hook: Hook) -> Hook:
        """The hook. Where its state is kept by bucket, it gets the buckets to which that belongs."""
        if _name_of(self._state) != _POWER_SGD:
            return hook

        @functools.wraps(hook)
        def watched(state: Any, bucket: Any) -> torch.futures.Future[Any]:
            return self._buckets.call(hook, state, bucket)

        return watched

    def state_dict(self) -> dict[str, Any]:
        """Raises CheckpointError where it could not be loaded again."""
        state, kind = self._state, _kind_of(self._state)
        if kind == "state_dict":
            return {"state": state.state_dict()}  # type: ignore[attr-defined]
        if isinstance(state, dict):
            return {"state": dict(state)}
        if not kind:
            return {}
        found: dict[str, Any] = {name: getattr(state, name) for name in _CARRIED[kind]}
        found["form"] = self._form(kind)
        if kind == _POWER_SGD:
            found["rng"] = plain(state.rng.get_state(legacy=False))  # type: ignore[attr-defined]
            found["buckets"] = dict(self._buckets.layout)
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
            self._buckets.layout, self._loaded = dict(saved["buckets"]), True
            if not self._buckets.layout and not self._belongs_to_buckets():
                self._put_off_compression()

    def _form(self, kind: str) -> dict[str, Any]:
        return {name: getattr(self._state, name) for name in _FORM[kind]}

    def _refuse_other_buckets(self) -> None:
        """Raises CheckpointError where a loaded state belongs to buckets that DDP does not have."""
        if self._loaded and self._belongs_to_buckets():
            raise CheckpointError(
                "the state of DDP's communication hook belongs to other buckets than DDP has now: give "
                "DistributedDataParallel the model and the options that it had when this was saved, or start from "
                "another checkpoint"
            )
        self._put_off_compression()

    def _belongs_to_buckets(self) -> bool:
        state: Any = self._state
        return bool(
            (state.use_error_feedback and state.error_dict)
            or (state.warm_start and (state.p_memory_dict or state.q_memory_dict))
        )

    def _put_off_compression(self) -> None:
        """PowerSGD has begun with no bucket yet: this step, whose buckets may be DDP's first, is sent as it is."""
        state: Any = self._state
        if state.use_error_feedback or state.warm_start:
            state.iter = min(state.iter, state.start_powerSGD_iter - 1)


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
