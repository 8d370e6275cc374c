"""Ends a worker without taking its interpreter apart, for which the next generation would wait.

With torch that takes most of a second: all that it has imported is touched once more, in a fork of the preloaded
process copied first. Everything that the script has registered for its end is done before, and what it has written to
files of Python and of C is flushed. What is left out are finalizers (`__del__`) and destructors of libraries.

A worker leaves so after the last step of a planned change (`drain`), and where an exception ends its script. No torch
here.
"""

from __future__ import annotations

import _io
import atexit
import contextlib
import ctypes
import gc
import os
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn


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


def leave_when_failed() -> None:
    """From now on the end of this process is a quick one where an exception ends the script."""
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


def _flush() -> None:
    # Not isinstance: it asks an object for its class, and that may be anyone's code. What was preloaded is not listed.
    files = [one for one in gc.get_objects() if issubclass(type(one), _io._IOBase)]
    for file in (*files, sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            file.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)
