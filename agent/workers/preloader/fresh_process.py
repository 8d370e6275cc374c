"""Makes a forked child of the preloaded process a fresh `python -u script.py args`, and runs that.

All that a process shows of itself is set as Python's own start sets it: environment, command line, signals, streams,
`sys`, modules. What cannot be set so is found beforehand, and then the child *is* what it should look like: it executes
Python anew, and starts cold.

The script is run by the very function of the C API that `python script.py` uses, and from the same place: where no
Python code is running. Python calls `sys.excepthook` when an exception has left all of it, and there our hook is that
function. So no frame of ours is below the script's; `SystemExit`, tracebacks, syntax errors, Ctrl-C and the end of the
interpreter are Python's own doing, not ours. (With `-m` Python calls `runpy`; there one frame of ours is below.)

So `run` raises, and its caller must let `Become` pass to the very top: no `finally` that ends the process.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
import zipfile
from collections.abc import Callable, Collection
from importlib.machinery import BuiltinImporter
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from ....worker.wire import stack_dump
from ....worker.wire.environment import NAMES
from .fidelity import env_rules, proc_title
from .fidelity.import_cache import ImportCache
from .wire import SCRIPT, BecomeWorker

IGNORED_BY_PYTHON = tuple(getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signal, name))
UNCHANGEABLE = (signal.SIGKILL, signal.SIGSTOP)
LEFT_BY_AN_EXCEPTION = ("last_type", "last_value", "last_traceback", "last_exc")


class Become(BaseException):
    """Leaves all Python code, at whose end the script is run."""


def run(
    start: BecomeWorker,
    cache: ImportCache,
    report: Callable[[str], None] = lambda problem: None,
    stay_ignored: Collection[int] = (),
) -> NoReturn:
    """Raises Become, or executes the same command anew when it cannot be had otherwise.

    To be called after `cache.hide`, in a process with one thread, whose first three descriptors are the worker's, and
    which has no others that stay open. `report` is called with why a worker starts cold, and with differences found too
    late for that. Signals that are to `stay_ignored` are those that the agent was started to ignore.
    """
    os.chdir(start.cwd)
    if problem := obstacle(start, cache):
        report(problem)
        _start_cold(start, stay_ignored)
    cache.report = report
    _show(start)
    _take_environment(start, cache)
    _take_signals(stay_ignored)
    _take_streams()
    stack_dump.register(start.environment.get(NAMES["stacks"], ""))
    _take_interpreter(start, cache)
    sys.excepthook = _script_hook(start) if start.target_kind == SCRIPT else _module_hook(start)
    raise Become


def obstacle(start: BecomeWorker, cache: ImportCache) -> str:
    """Why this cannot be run in a fork of this process; empty if it can. To be asked in the worker's directory."""
    script = start.target if start.target_kind == SCRIPT else None
    if problem := env_rules.obstacle(cache.base, start.environment, script, cache.reads):
        return problem
    if script is not None and (not os.path.isfile(script) or not os.access(script, os.R_OK)):
        return f"{script} is no file that can be read"
    if script is not None and zipfile.is_zipfile(script):
        return f"{script} is an archive"
    if not _safe_path() and (names := cache.shadowed([_first_on_path(start)])):
        return f"{_first_on_path(start)} has its own {', '.join(names)}"
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return "a tracer or a profiler watches this process from its start"
    return proc_title.refusal()


def _start_cold(start: BecomeWorker, stay_ignored: Collection[int]) -> NoReturn:
    for number in signal.valid_signals():
        if number not in UNCHANGEABLE:
            signal.signal(number, signal.SIG_IGN if number in stay_ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execvpe(sys.orig_argv[0], [sys.orig_argv[0], *start.command], start.environment)


# --- What a process shows of itself


def _show(start: BecomeWorker) -> None:
    proc_title.show([sys.orig_argv[0], *start.command], start.environment)
    proc_title.name(os.path.basename(sys.orig_argv[0]))


def _take_environment(start: BecomeWorker, cache: ImportCache) -> None:
    os.environ.clear()
    os.environ.update(start.environment)
    env_rules.at_start(cache.base, start.environment)


def _take_signals(stay_ignored: Collection[int]) -> None:
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number in UNCHANGEABLE:
            continue
        ignored = number in IGNORED_BY_PYTHON or number in stay_ignored
        handler: Any = signal.SIG_IGN if ignored else signal.SIG_DFL
        if number == signal.SIGINT:
            handler = signal.default_int_handler
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _take_streams() -> None:
    """They know what their descriptors can do, and those are others now. The objects stay: loggers hold them."""
    for stream, descriptor, mode in ((sys.stdin, 0, "r"), (sys.stdout, 1, "w"), (sys.stderr, 2, "w")):
        text: Any = stream
        encoding, errors, name = text.encoding, text.errors, text.name
        buffered = -1 if mode == "r" else 0
        buffer: Any = open(descriptor, mode + "b", buffered, closefd=False)  # noqa: SIM115
        getattr(buffer, "raw", buffer).name = name
        writing = {"line_buffering": text.line_buffering, "write_through": text.write_through}
        text.__init__(buffer, encoding, errors, newline="\n", **writing)
        text.mode = mode


def _take_interpreter(start: BecomeWorker, cache: ImportCache) -> None:
    sys.argv[:] = [start.target if start.target_kind == SCRIPT else "-m", *start.args]
    sys.orig_argv[:] = [sys.orig_argv[0], *start.command]
    sys.path[:] = cache.path if _safe_path() else [_first_on_path(start), *cache.path]
    finders: list[Any] = list(sys.path_importer_cache.values())
    for finder in finders:
        if hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()
    atexit._clear()
    _leave_libraries_whole(start)
    gc.enable()  # what the preloaded process has frozen stays so: to look through it would copy all of it
    # Kept for ever: what the script never asked for is not to be taken apart at its end.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(cache))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules["__main__"]))
    sys.modules["__main__"] = _fresh_main()
    if start.environment.get("PYTHONFAULTHANDLER") or sys.flags.dev_mode:
        importlib.import_module("faulthandler").enable()  # the script's, which Python has imported


def _leave_libraries_whole(start: BecomeWorker) -> None:
    """At the end of the process what libraries do that the preloaded process has loaded is left out.

    To unload torch is to write to all that it has registered, a good part of a second in a fork, which must copy it
    first; then the system takes it all. It comes after the end of Python, and after the exit handlers of libraries that
    the script has loaded itself: C calls the last that was registered first. Their ELF destructors would come last, and
    are left out, too. What `stdio` holds is written, as ever.
    """
    if "LD_PRELOAD" in start.environment or "LD_AUDIT" in start.environment:
        return  # a profiler, maybe, which writes at the end
    libc = ctypes.CDLL(None)
    try:
        last = [ctypes.cast(function, ctypes.c_void_p) for function in (libc._exit, libc.fcloseall)]
        for function in last:
            libc.on_exit(function, None)
    except AttributeError:
        return  # only glibc has these


def _first_on_path(start: BecomeWorker) -> str:
    if start.target_kind == SCRIPT:
        return os.path.dirname(os.path.realpath(start.target))
    return os.getcwd()


def _safe_path() -> bool:
    return getattr(sys.flags, "safe_path", False)  # 3.11


def _fresh_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__loader__ = BuiltinImporter
    main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    return main


# --- At the end of all Python code


def _leave_no_trace(left: BaseException) -> None:
    sys.excepthook = sys.__excepthook__
    for name in LEFT_BY_AN_EXCEPTION:
        if hasattr(sys, name):
            delattr(sys, name)
    frames = left.__traceback__
    while frames is not None:
        frames.tb_frame.clear()
        frames = frames.tb_next


class _Argument:
    """For one argument of a C function: made by us, whatever the caller has given."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.from_param = make


def _script_hook(start: BecomeWorker) -> Any:
    """PyRun_SimpleFileEx(file, name, close it), in the shape of an excepthook(type, exception, traceback)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fopen.restype = ctypes.c_void_p
    name = os.fsencode(_absolute(start.target))
    file = ctypes.c_void_p(libc.fopen(name, b"rb"))

    def named(left: BaseException) -> Any:
        _leave_no_trace(left)
        return ctypes.c_char_p(name)

    arguments: list[Any] = [_Argument(lambda _: file), _Argument(named), _Argument(lambda _: ctypes.c_int(1))]
    run_file: Any = ctypes.PYFUNCTYPE(ctypes.c_int, *arguments)(("PyRun_SimpleFileEx", ctypes.pythonapi))
    run_file.errcheck = _end_well
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(run_file))  # Python does not hold the hook that it calls
    return run_file


def _end_well(result: int, *_: object) -> None:
    """Where Python goes on it has failed, because of us, and would end with 1. For a failed script that is right."""
    if result == 0:
        raise SystemExit(0)


def _absolute(script: str) -> str:
    """As Python makes the name of a script absolute: nothing else in it is changed."""
    return os.path.join(os.getcwd(), script)


def _module_hook(start: BecomeWorker) -> Any:
    import runpy  # not earlier: the script shall see the one that runs it

    run_as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]

    def run_module(kind: type[BaseException], left: BaseException, traceback: TracebackType | None) -> None:
        _leave_no_trace(left)
        failed = None
        try:
            run_as_main(start.target)
        except SystemExit:
            raise
        except BaseException as error:
            failed = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        if failed is None:
            raise SystemExit(0)
        _show_as_python(failed)

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(run_module))
    return run_module


def _show_as_python(error: BaseException) -> None:
    """Lets Python itself come across the error: it remembers an interrupt, by which it then ends."""
    chosen = sys.excepthook

    def without_us(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
        sys.excepthook = chosen
        sys.last_traceback = traceback = traceback and traceback.tb_next
        return chosen(kind, error.with_traceback(traceback), traceback)

    without_us.error = error  # type: ignore[attr-defined]
    sys.excepthook = without_us
    ctypes.pythonapi.PyRun_SimpleString(b"raise __import__('sys').excepthook.error")
