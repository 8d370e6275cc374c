"""Ends a worker without taking its interpreter apart, for which the next generation would wait.

With torch that takes most of a second: all that it has imported is touched once more, in a fork of the preloaded
process copied first. Everything that the script has registered for its end is done before, and what it has written to
files of Python and of C is flushed. What is left out are finalizers (`__del__`) and destructors of libraries.

A worker leaves so after the last step of a planned change (`drain`), and where an exception ends its script
(`torch_workarounds`). No torch here.
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


def _flush() -> None:
    # Not isinstance: it asks an object for its class, and that may be anyone's code. What was preloaded is not listed.
    files = [one for one in gc.get_objects() if issubclass(type(one), _io._IOBase)]
    for file in (*files, sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            file.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)
