"""What a DDP communication hook knows from one step to the next, as a part of a Checkpointer's state.

torch's fp16 and bf16 hooks know nothing. Post-local SGD counts steps. PowerSGD keeps for each of DDP's buckets the
error that this rank has not sent yet, and its last approximation: they belong to the parameters of that bucket, in
their order. But DDP makes its buckets anew after the first backward of a process, in the order in which the gradients
have come. So a restarted process has other buckets in its first step than the process had that saved. There the hook is
called with buckets that are put together as they were when the state was saved.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
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

Layout = dict[int, list[int]]
"""By bucket, the numbers of its parameters in their order."""

Hook = Callable[[Any, Any], torch.futures.Future[Any]]


class HookState:
    """The state of the hook that `register_comm_hook` has registered; name it in `of_each_rank`."""

    def __init__(self, state: object, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._state = state
        trained = [one for one in parameters if one.requires_grad]
        self._numbers = {id(one): number for number, one in enumerate(trained)}
        self._device = trained[0].device if trained else torch.device("cpu")
        self._buckets: Layout = {}
        """Those to which the state belongs; empty as long as DDP may make others."""
        self._seen: Layout = {}
        """Of the backward that is under way."""
        self._backwards = 0
        self._next = 0
        """Of the buckets of the state, the one that comes now."""
        self._loaded = False

    def watching(self, hook: Hook) -> Hook:
        """The hook. Where its state is kept by bucket, it gets the buckets to which that belongs."""
        if _name_of(self._state) != _POWER_SGD:
            return hook

        @functools.wraps(hook)
        def watched(state: Any, bucket: Any) -> torch.futures.Future[Any]:
            numbers = [self._numbers[id(one)] for one in bucket.parameters()]
            called = self._in_place_of(bucket.index(), numbers)
            self._see(bucket.index(), numbers, is_last=bucket.is_last())
            if called == [bucket.index()] and self._buckets.get(called[0], numbers) == numbers:
                return hook(state, bucket)
            return self._regroup(hook, bucket, numbers, called)

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
            self._buckets, self._loaded = dict(saved["buckets"]), True

    def _form(self, kind: str) -> dict[str, Any]:
        return {name: getattr(self._state, name) for name in _FORM[kind]}

    def _see(self, index: int, numbers: list[int], *, is_last: bool) -> None:
        self._seen[index] = numbers
        if is_last:
            self._backwards += 1
            # After its first backward DDP makes its buckets anew, and never again.
            if self._backwards > 1 and not self._buckets:
                self._buckets = self._seen
            self._seen, self._next = {}, 0

    def _in_place_of(self, index: int, numbers: list[int]) -> list[int]:
        """The buckets of the state that together have these parameters; this one, where it is as it was.

        Raises CheckpointError where the state belongs to other parameters.
        """
        known, wanted = self._buckets, set(numbers)
        found = [one for one in sorted(known) if wanted.issuperset(known[one])]
        # The last one counts the step for all, so they come in their order.
        in_order = found == list(range(self._next, self._next + len(found)))
        if in_order and sorted(itertools.chain.from_iterable(map(known.__getitem__, found))) == sorted(
            numbers
        ):
            self._next += len(found)
            return found
        if self._loaded and self._belongs_to_buckets():
            raise CheckpointError(
                "the state of DDP's communication hook belongs to other buckets than DDP has now: give "
                "DistributedDataParallel the model and the options that it had when this was saved, or start from "
                "another checkpoint"
            )
        self._buckets = {}
        return [index]

    def _belongs_to_buckets(self) -> bool:
        state: Any = self._state
        return bool(
            state.iter >= state.start_powerSGD_iter and (state.use_error_feedback or state.warm_start)
        )

    def _regroup(
        self, hook: Hook, bucket: Any, numbers: list[int], called: Sequence[int]
    ) -> torch.futures.Future[Any]:
        """Call the hook for these buckets of the state, one after the other; the future has those of `bucket`."""
        before = dict(zip(numbers, bucket.gradients(), strict=True))
        result = torch.empty_like(bucket.buffer())
        lengths = [gradient.numel() for gradient in before.values()]
        after = dict(zip(numbers, result.split_with_sizes(lengths), strict=True))
        last = max(self._buckets)
        for index in called:
            order = self._buckets[index]
            one = _Bucket(index, [before[number] for number in order], is_last=index == last)
            found = hook(self._state, one).wait()
            reduced = found if isinstance(found, torch.Tensor) else found[0]
            for number, row in zip(
                order, reduced.split_with_sizes([before[number].numel() for number in order]), strict=True
            ):
                after[number].copy_(row)
        devices: list[Any] | None = [result.device] if result.is_cuda else None
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        future.set_result(result)
        return future


class _Bucket:
    """In the form of torch's `GradBucket`."""

    def __init__(self, index: int, gradients: Sequence[torch.Tensor], *, is_last: bool) -> None:
        self._index = index
        self._shapes = [gradient.shape for gradient in gradients]
        self._buffer = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._is_last = is_last

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        rows = self._buffer.split_with_sizes([shape.numel() for shape in self._shapes])
        return [row.view(shape) for row, shape in zip(rows, self._shapes, strict=True)]


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
