"""What a DDP communication hook knows from one step to the next, as a part of a Checkpointer's state.

torch's fp16 and bf16 hooks know nothing. Post-local SGD counts steps. PowerSGD keeps for each of DDP's buckets the
error that this rank has not sent yet, and its last approximation: they belong to the parameters of that bucket, in
their order. How a restarted process gets these buckets: see `hook_buckets`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


# ---------------------------------------------------------------- DDP's buckets
#
# Calls a DDP communication hook with the buckets to which its state belongs.
#
# DDP makes its buckets anew after the first backward of a process, in the order in which the gradients have come. In
# the first one it has a bucket for each dtype. So a restarted process has other buckets in its first step than the
# process had that saved, and theirs may alternate where its own come one after the other: a bucket waits for its turn.


Layout = Mapping[int, Sequence[int]]
"""By bucket, from 0 on, the numbers of its parameters in their order."""

Future = torch.futures.Future[Any]
Hook = Callable[[Any, Any], Future]


def due(
    layout: Layout, called: int, arrived: Sequence[Collection[int]], *, is_last: bool
) -> Sequence[int] | None:
    """The buckets of `layout` whose turn has come; None: `layout` does not fit to what DDP has.

    called: how many of them were called in this backward. arrived: the parameters in each of DDP's buckets that this
    backward has brought, the newest at the end. is_last: it brings no more.
    """
    newest = set(arrived[-1])
    if newest != {number for order in layout.values() if newest.issuperset(order) for number in order}:
        return None
    here = set[int]().union(*arrived)
    end = called
    while end in layout and here.issuperset(layout[end]):
        end += 1
    return None if is_last and end != len(layout) else range(called, end)


class HookBuckets:
    def __init__(self, parameters: Iterable[torch.nn.Parameter], on_other: Callable[[], None]) -> None:
        """`on_other` is called where `layout` does not fit, which is then forgotten: raise to refuse that."""
        self._numbers = {id(one): number for number, one in enumerate(parameters)}
        self._on_other = on_other
        self.layout: Layout = {}
        """The buckets to which the state belongs; empty as long as DDP may make others."""
        self._arrived: list[_Arrived] = []
        self._called = 0
        self._backwards = 0

    def call(self, hook: Hook, state: Any, bucket: Any) -> Future:
        if bucket.index() == 0:
            self._arrived, self._called = [], 0
        newest = _Arrived(bucket, [self._numbers[id(one)] for one in bucket.parameters()])
        self._arrived.append(newest)
        turns: Sequence[int] | None = None
        if self.layout:
            orders = [one.numbers for one in self._arrived]
            turns = due(self.layout, self._called, orders, is_last=bucket.is_last())
            if turns is None:
                self._on_other()
                self._forget_layout(hook, state)
        as_it_is = turns is None or (
            list(turns) == [bucket.index()] and self.layout[bucket.index()] == newest.numbers
        )
        if turns is not None:
            self._called += len(turns)
        try:
            if as_it_is:
                newest.is_done = True
                return hook(state, bucket)
            for index in turns or ():
                self._take_turn(hook, state, index)
            return newest.future
        finally:
            if bucket.is_last():
                self._end_backward()

    def _take_turn(self, hook: Hook, state: Any, index: int) -> None:
        order = self.layout[index]
        gradients = {
            number: gradient
            for one in self._arrived
            for number, gradient in zip(one.numbers, one.gradients, strict=True)
        }
        bucket = Bucket(index, [gradients[number] for number in order], is_last=index + 1 == len(self.layout))
        rows = _reduced(hook, state, bucket)
        for one in self._arrived:
            one.take(dict(zip(order, rows, strict=True)))

    def _forget_layout(self, hook: Hook, state: Any) -> None:
        """DDP's buckets that wait for a turn are called as they are."""
        self.layout = {}
        for index, one in enumerate(self._arrived[:-1]):
            if not one.is_done:
                rows = _reduced(hook, state, Bucket(index, one.gradients, is_last=False))
                one.take(dict(zip(one.numbers, rows, strict=True)))

    def _end_backward(self) -> None:
        self._backwards += 1
        # After its first backward DDP makes its buckets anew, and never again.
        if self._backwards > 1 and not self.layout:
            self.layout = {index: one.numbers for index, one in enumerate(self._arrived)}
        self._arrived = []


class _Arrived:
    """One of DDP's buckets, and what comes back for it when all its parameters have had their turn."""

    def __init__(self, bucket: Any, numbers: list[int]) -> None:
        self.numbers = numbers
        self.gradients: list[torch.Tensor] = list(bucket.gradients())
        self.is_done = False
        buffer: torch.Tensor = bucket.buffer()
        self._result = torch.empty_like(buffer)
        lengths = [gradient.numel() for gradient in self.gradients]
        self._missing = dict(zip(numbers, self._result.split_with_sizes(lengths), strict=True))
        self.future: Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)

    def take(self, rows: Mapping[int, torch.Tensor]) -> None:
        """`rows` by parameter, also those of other buckets."""
        if self.is_done:
            return
        for number in self._missing.keys() & rows.keys():
            self._missing.pop(number).copy_(rows[number])
        if not self._missing:
            self.is_done = True
            self.future.set_result(self._result)


def _reduced(hook: Hook, state: Any, bucket: Bucket) -> Sequence[torch.Tensor]:
    """By parameter of the bucket, a row of what the hook makes of its gradient."""
    lengths = [gradient.numel() for gradient in bucket.gradients()]
    found = hook(state, bucket).wait()
    reduced: torch.Tensor = found if isinstance(found, torch.Tensor) else found[0]
    return reduced.split_with_sizes(lengths)


class Bucket:
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
