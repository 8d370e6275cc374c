"""All that this library replaces in a training process: names of torch, and how Python ends after an error.

- `torch.distributed.destroy_process_group`: itself, after gloo's threads have come to rest. Seen with torch 2.13: a
  script hangs for ever after its last step (`settle_before_destroy`).
- torch's rendezvous handlers of `env://` and `tcp://`: themselves, after a warning of a script that sets MASTER_PORT
  anew on each rank, and waits for a store that is not there until torch's timeout (`warn_of_other_port`).
- `sys.excepthook`: itself; then the process ends as soon as the error is shown. To take torch apart takes 2.4 s on two
  busy cores, and 0.2 s when that is left out; the restart waits for it (`leave_when_failed`).
- `Work.wait`, `_broadcast_coalesced` and `torch.autograd.backward`: themselves, with a clock, where the script has
  called `measure_own_time()` (`watch_waits`).
- The defaults of signals that a scheduler sends to an agent and to all other processes of a job alike.

The variable `environment.TORCH_WORKAROUNDS`, set to 0 for the agent, leaves all but the signals out. A version of torch
that lacks one of these names is left as it is. No torch here: what a script does not use has nothing to mend.
"""

from __future__ import annotations

import _io
import atexit
import contextlib
import ctypes
import functools
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, NoReturn
from urllib.parse import urlparse

from ...codec import Invalid
from ..wire.environment import TORCH_WORKAROUNDS, WorkerEnv


def are_on(environ: Mapping[str, str]) -> bool:
    return environ.get(TORCH_WORKAROUNDS, "1") != "0"


def install() -> None:
    """What is for every process that uses torch.distributed: before workers are forked, and by `init_process_group`."""
    if are_on(os.environ):
        settle_before_destroy()
        warn_of_other_port()


# ---------------------------------------------------------------- torch's gloo threads

THREAD = "pt_gloo_runloop"
LOOK_S = 0.001
LOOKS = 3
"""In a row must find all of them asleep."""
MOST_S = 2.0


def settle_before_destroy() -> None:
    """From now on torch's `destroy_process_group` waits for what gloo's threads need Python's lock for.

    torch joins these threads where the group's last reference is dropped. With a DDP model that is where the model is
    freed, and the thread that frees it has the lock. A gloo thread that is about to free its last work needs it, so
    both wait for ever. Until then such a thread is only late: while this one sleeps it gets the lock.
    """
    for name in ("torch.distributed.distributed_c10d", "torch.distributed"):
        module = sys.modules.get(name)
        destroy = getattr(module, "destroy_process_group", None)
        if destroy is not None and not hasattr(destroy, "__wrapped__"):
            module.destroy_process_group = _settled(destroy)  # type: ignore[union-attr]


def _settled(destroy: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(destroy)
    def settle_first(*args: Any, **more: Any) -> Any:
        settle()
        return destroy(*args, **more)

    return settle_first


def settle(clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns when no gloo thread of this process has anything to do, or after `MOST_S`."""
    give_up_at, asleep = clock() + MOST_S, 0
    while asleep < LOOKS and clock() < give_up_at:
        states = list(thread_states(THREAD))
        if not states:
            return
        asleep = asleep + 1 if all(state == "S" for state in states) else 0
        sleep(LOOK_S)


def thread_states(name: str, tasks: str = "/proc/self/task") -> Iterator[str]:
    """Of this process' threads of this name: the kernel's letter for their state."""
    for task in os.listdir(tasks):
        try:
            with open(f"{tasks}/{task}/stat", "rb") as file:
                command, _, rest = file.read().partition(b"(")[2].rpartition(b")")
        except OSError:  # it has just ended
            continue
        if command.decode(errors="replace") == name[:15]:
            yield rest.split()[0].decode()


# ---------------------------------------------------------------- the port that the agent has bound

_SCHEMES = ("env", "tcp")


def problem_of(url: str, environ: Mapping[str, str]) -> str:
    """What was given, what was set, and on which rank; empty if they are the same, and without an agent.

    Also of a `tcp://` without a port, which torch refuses.
    """
    try:
        given = WorkerEnv.of(environ).master_port
        address = urlparse(url)
        own = environ.get("MASTER_PORT", "") if address.scheme == "env" else address.port
    except (Invalid, ValueError):
        return ""
    if not given or own is None or str(own) == str(given):
        return ""
    return (
        f"rank {environ.get('RANK', '?')} of this script meets at port {own or 'none'}; the agent has given it "
        f"MASTER_PORT={given}, which is bound and answers. Leave MASTER_PORT as it is: a port of the script's own may "
        "be taken, and ranks that each choose one never meet"
    )


def warn_of_other_port() -> None:
    """Put the warning before torch's own handlers, which otherwise do what they did.

    A script that sets MASTER_PORT anew works as long as all ranks set the same, and the port is free on rank 0's node.
    """
    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", None)
    if not isinstance(handlers, dict):
        return
    for scheme in _SCHEMES:
        handler = handlers.get(scheme)
        if handler is not None and not hasattr(handler, "__wrapped__"):
            handlers[scheme] = _warning(handler)


def _warning(handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)
    def warn_first(url: str, *args: Any, **more: Any) -> Any:
        if problem := problem_of(url, os.environ):
            print(f"elastic-agent: {problem}", file=sys.stderr, flush=True)
        return handler(url, *args, **more)

    return warn_first


# ---------------------------------------------------------------- the end after an error


def leave_when_failed() -> None:
    """From now on the end of this process is a quick one where an exception ends the script."""
    if not are_on(os.environ):
        return
    shown: Callable[..., Any] = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown(kind, error, trace)
        # A console of the script's calls the hook, too, and goes on.
        if issubclass(kind, Exception) and not _script_runs():
            atexit.register(_leave_failed, os.getpid())  # the last to be registered is called first

    sys.excepthook = show


def _script_runs() -> bool:
    """Whether code of its module calls this; below a hook that the interpreter has called there is none."""
    main, frame = vars(sys.modules["__main__"]), sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals is main:
            return True
    return False


def _leave_failed(pid: int) -> None:
    if os.getpid() == pid:
        leave(1, _leave_failed)


# ---------------------------------------------------------------- this rank's own work

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


def watch_waits() -> Waits | None:
    """Count this thread's waits from now on; None where the script does not use torch.distributed, or has it off.

    In a synchronous job the time between two steps is the same on all ranks, as the fast ones wait for the slow one.
    What differs is how long each waits. Waits in collectives are counted where Python code waits (`Work.wait`, which is
    also where FSDP2 and all functions of torch.distributed wait on the CPU), and where DDP does: at the end of a
    backward pass, after whatever the autograd engine was asked to call before; and in the broadcast of its buffers. So
    a callback that is queued as a pass begins tells when this rank's own part of it has ended. Waits that are not seen
    count as work, on all ranks alike: those of a GPU, where the device's stream waits and not the processor.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not are_on(os.environ):
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


# ---------------------------------------------------------------- signals for all processes of a job
#
# Each would end the worker, while its agent makes a planned change of it. A script's own handlers stay. Only the main
# thread may set handlers: a worker whose main thread does not call the library keeps the defaults.


def leave_warnings_to_agent() -> None:
    """Slurm's "your end is near" may go to all processes. What the script starts from now on ignores it, too."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            with contextlib.suppress(ValueError):
                signal.signal(number, signal.SIG_IGN)


def leave_sigterm_to_agent() -> bool:
    """Whether a SIGTERM does nothing to this process from now on.

    The agent must know: it sends SIGKILL then where it would have sent SIGTERM, which would have ended this process
    just so. By a handler that does nothing, and not by SIG_IGN, which programs that the script starts would inherit.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, _nothing)
            signal.siginterrupt(signal.SIGTERM, False)
            return True
    return False


def leave_nothing_to_agent() -> None:
    """In a child of a worker, which has no agent."""
    if signal.getsignal(signal.SIGTERM) is _nothing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def script_handles_sigterm() -> bool:
    handler = signal.getsignal(signal.SIGTERM)
    return callable(handler) and handler is not _nothing


def _nothing(_number: int, _frame: object) -> None:
    pass


# ---------------------------------------------------------------- an end without destructors
#
# Ends a worker without taking its interpreter apart, for which the next generation would wait.
#
# With torch that takes most of a second: all that it has imported is touched once more, in a fork of the preloaded
# process copied first. Everything that the script has registered for its end is done before, and what it has written to
# files of Python and of C is flushed. What is left out are finalizers (`__del__`) and destructors of libraries.
#
# A worker leaves so after the last step of a planned change (`drain`), and where an exception ends its script
# (`torch_workarounds`). No torch here.


def leave(code: int, registered: Callable[..., object]) -> NoReturn:
    """Call all that is registered for the end of the process, but for `registered`, which calls this; then end."""
    atexit.unregister(registered)
    for finalizer in finalizers_of_torch():
        finalizer.atexit = False
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def finalizers_of_torch() -> list[weakref.finalize[..., Any]]:
    """They take operators out of torch's dispatcher, which ends with the process: 25 ms for those that torch has."""
    registry = getattr(weakref.finalize, "_registry", {})
    return [
        one for one, info in [*registry.items()] if getattr(info.func, "__module__", "") == "torch.library"
    ]


def _flush() -> None:
    # Not isinstance: it asks an object for its class, and that may be anyone's code. What was preloaded is not listed.
    files = [one for one in gc.get_objects() if issubclass(type(one), _io._IOBase)]
    for file in (*files, sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            file.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)
