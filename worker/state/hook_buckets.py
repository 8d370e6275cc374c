"""Calls a DDP communication hook with the buckets to which its state belongs.

DDP makes its buckets anew after the first backward of a process, in the order in which the gradients have come. In the
first one it has a bucket for each dtype. So a restarted process has other buckets in its first step than the process
had that saved, and theirs may alternate where its own come one after the other: a bucket waits until its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

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
