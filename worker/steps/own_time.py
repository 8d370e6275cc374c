"""How long this process itself was at work: the time since it began to count, without its waits for other ranks.

In a synchronous job the time between two steps is the same on all ranks, as the fast ones wait for the slow one. What
differs is how long each waits. Waits in collectives are counted where Python code waits (`Work.wait`, which is also
where FSDP2 and all functions of torch.distributed wait on the CPU), and where DDP does: at the end of a backward pass,
after whatever the autograd engine was asked to call before; and in the broadcast of its buffers. So a callback that is
queued as a pass begins tells when this rank's own part of it has ended.

Two readings of the clock are all that a wait costs. Nothing is changed but three names of torch, each of them replaced
by a function that calls it. A version of torch that has one of these no more loses that part of the measure: waits
that are not seen count as work, on all ranks alike, and then no rank is slower than the others.

Waits of a GPU are not seen: where a collective of NCCL is waited for by the device's stream, the processor is not held
up. No torch here: where the script has not imported torch.distributed there is nothing to measure.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

_now_ns = time.monotonic_ns
_ident = threading.get_ident


class Waits:
    """Those of one thread, which trains. What other threads wait for does not hold it up."""

    def __init__(self, thread: int, is_compiling: Callable[[], bool] = lambda: False) -> None:
        """`is_compiling`: of torch; where its compiler goes through a function, it is to find torch's own."""
        self.total_ns = 0
        self._is_compiling = is_compiling
        self._thread = thread
        self._inside = False
        """Of a wait: one in another counts once."""

    def timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """`wait`, as it was; the time that it takes is counted."""
        is_compiling = self._is_compiling

        @functools.wraps(wait)
        def waits(*args: Any, **more: Any) -> Any:
            if is_compiling() or self._inside or _ident() != self._thread:
                return wait(*args, **more)
            self._inside, begun = True, _now_ns()
            try:
                return wait(*args, **more)
            finally:
                self.total_ns += _now_ns() - begun
                self._inside = False

        return waits

    def in_backward(
        self, backward: Callable[..., Any], queue_callback: Callable[[Callable[[], None]], None]
    ) -> Callable[..., Any]:
        """`backward`, as it was; what is left of it when its own work is done is counted as a wait.

        Unless Python code waits in that part: then this code says itself when it does, and works in between.
        """
        under_way, is_compiling = False, self._is_compiling
        ended_at: list[int] = []
        """When the own part has ended, and what had been waited for until then."""

        def own_part_ended() -> None:
            ended_at[:] = _now_ns(), self.total_ns

        def begins(_gradients: object) -> None:
            queue_callback(own_part_ended)

        @functools.wraps(backward)
        def passes(tensors: Any, *args: Any, **more: Any) -> Any:
            nonlocal under_way
            if is_compiling():
                return backward(tensors, *args, **more)
            node = _first_node(tensors)
            if node is None or under_way or _ident() != self._thread or _compiles_backward():
                return backward(tensors, *args, **more)
            under_way = True
            ended_at.clear()
            hook = node.register_prehook(begins)
            try:
                return backward(tensors, *args, **more)
            finally:
                hook.remove()
                under_way = False
                if ended_at and ended_at[1] == self.total_ns:
                    self.total_ns += _now_ns() - ended_at[0]

        return passes


def _first_node(tensors: Any) -> Any:
    """Of the graph that a backward pass goes through; None where nothing can be attached to it."""
    if isinstance(tensors, Sequence):
        tensors = tensors[0] if tensors else None
    node = getattr(tensors, "grad_fn", None)
    return node if hasattr(node, "register_prehook") else None


def _compiles_backward() -> bool:
    """Compiled autograd traces the hooks of a graph: it must find none of ours."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(getattr(module, "compiled_autograd_enabled", True))


def watch() -> Waits | None:
    """Counts the waits of this thread from now on; None where the script does not use torch.distributed."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None:
        return None
    waits = Waits(_ident(), _is_compiling_of(sys.modules.get("torch.compiler")))
    for place, name, replacement in _replacements(distributed, waits):
        with contextlib.suppress(AttributeError, TypeError):  # another version of torch
            setattr(place, name, replacement(getattr(place, name)))
    return waits


def _is_compiling_of(compiler: ModuleType | None) -> Callable[[], bool]:
    found: Callable[[], bool] = getattr(compiler, "is_compiling", lambda: False)
    return found


def _replacements(
    distributed: ModuleType, waits: Waits
) -> Iterator[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]]:
    """Where each name stands, and what makes the function that takes its place."""
    with contextlib.suppress(AttributeError):
        yield distributed.Work, "wait", waits.timed
    yield distributed, "_broadcast_coalesced", waits.timed
    autograd = sys.modules.get("torch.autograd")
    with contextlib.suppress(AttributeError):
        queue_callback = autograd.Variable._execution_engine.queue_callback  # type: ignore[union-attr]
        yield autograd, "backward", functools.partial(waits.in_backward, queue_callback=queue_callback)
