"""Makes a forked child of the preloaded process the worker that it is asked for: `python -u script.py args`.

Environment, command line, streams, signals, `__main__` and `sys.path` are the worker's; the modules that were imported
stay, as if the script had imported them, with what they registered for the end of the process. Where that would not do,
because of the environment or the script, the child starts cold: it executes the worker's command, and says why.

`become` returns the script, for its caller to execute where no frames of ours are below it.
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import gc
import importlib.util
import io
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn

from ....worker.wire import stack_dump
from ....worker.wire.environment import NAMES
from ..processes.spare_wire import SCRIPT, BecomeWorker
from .imported import Imported, obstacle, set_threads, set_too_late

TORCH_SEED = 67280421310721
"""With which older versions of torch begin in every process."""


@dataclass(frozen=True, slots=True)
class Script:
    """To be executed in the namespace of its module, which is `__main__` already."""

    code: CodeType
    main: ModuleType


def become(start: BecomeWorker, imported: Imported, report: Callable[[str], None]) -> Script:
    """In a process with one thread, whose first three descriptors are the worker's. `report` is called with why a
    worker starts cold."""
    os.chdir(start.cwd)
    first = _first_on_path(start)
    shadowed = "" if _safe_path() else imported.shadowed(first)
    if problem := imported.edited():
        _start_cold(start, report, f"{problem} has changed since it was imported")
    if problem := obstacle(imported.base, start.environment, imported.reads):
        _start_cold(start, report, problem)
    if shadowed:
        _start_cold(start, report, f"{first} has its own {shadowed}")
    script: Script | None = None
    if start.target_kind == SCRIPT:
        try:
            text, script = _script(os.path.join(os.getcwd(), start.target))
        except (OSError, SyntaxError, ValueError) as error:  # Python itself says it best
            _start_cold(start, report, f"{start.target} is no script that can be read: {error}")
        if problem := set_too_late(text, imported.reads):
            _start_cold(start, report, f"{start.target} is not forked: {problem}")
    _take_environment(start, imported)
    _take_interpreter(start, first)
    _renew()
    return script or _module(start.target)


def _start_cold(start: BecomeWorker, report: Callable[[str], None], why: str) -> NoReturn:
    report(why)
    os.execve(start.cold[0], start.cold, start.environment)


def _first_on_path(start: BecomeWorker) -> str:
    return os.path.dirname(os.path.realpath(start.target)) if start.target_kind == SCRIPT else os.getcwd()


def _safe_path() -> bool:
    return getattr(sys.flags, "safe_path", False)  # 3.11


def _take_environment(start: BecomeWorker, imported: Imported) -> None:
    wanted = start.environment
    show_process([sys.orig_argv[0], *start.command], wanted)
    name_process(os.path.basename(sys.orig_argv[0]))
    set_by_modules = {
        name: value
        for name, value in imported.variables.items()
        if wanted.get(name) == imported.base.get(name)
    }
    os.environ.update(set_by_modules)
    time.tzset()
    set_threads()
    if wanted.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    stack_dump.register(wanted.get(NAMES["stacks"], ""))


def _take_interpreter(start: BecomeWorker, first_on_path: str) -> None:
    sys.argv[:] = [start.target if start.target_kind == SCRIPT else "-m", *start.args]
    sys.orig_argv[:] = [sys.orig_argv[0], *start.command]
    if not _safe_path():
        sys.path.insert(0, first_on_path)
    importlib.invalidate_caches()
    gc.enable()  # what the preloaded process has frozen stays so: to look through it would copy all of it


def _renew() -> None:
    """What must not be equal in two processes, and is in two forks. (`random` renews itself.)"""
    modules: dict[str, Any] = dict(sys.modules)
    if (torch := modules.get("torch")) and torch.default_generator.initial_seed() != TORCH_SEED:
        torch.default_generator.seed()
    if numpy_random := modules.get("numpy.random"):
        numpy_random.seed()
    if multiprocessing := modules.get("multiprocessing"):
        multiprocessing.current_process().authkey = os.urandom(32)
    if tempfile := modules.get("tempfile"):
        tempfile.tempdir = None
    if (threading := modules.get("threading")) and hasattr(threading.main_thread(), "_set_native_id"):
        threading.main_thread()._set_native_id()  # Python keeps that of the process that has forked


# --- The script


def _main(loader: Any, file: str | None, spec: ModuleSpec | None = None) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(
        __loader__=loader,
        __file__=file,
        __cached__=None,
        __spec__=spec,
        __builtins__=builtins,
        __annotations__={},
    )
    if spec is not None:
        main.__package__ = spec.parent
    sys.modules["__main__"] = main
    if "multiprocessing" in sys.modules:
        sys.modules["__mp_main__"] = main
    return main


def _script(path: str) -> tuple[str, Script]:
    """Its text as far as that can be read, and what Python would execute."""
    with io.open_code(path) as file:
        data = file.read()
    code = compile(data, path, "exec", dont_inherit=True)
    return data.decode(errors="replace"), Script(code, _main(SourceFileLoader("__main__", path), path))


def _module(name: str) -> Script:
    """As `python -m` finds it: of a package its module `__main__`."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        sys.exit(f"{sys.executable}: No module named {name} that can be executed")
    sys.argv[0] = spec.origin or name
    return Script(code, _main(loader, spec.origin, spec))


# --- What /proc shows of this process


def show_process(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Shows these words to ps and py-spy, and these variables, which become the process' own, to all who look for
    workers by their marks.

    The kernel shows what lay on the stack at exec: that of the preloaded process, which was started with room for more.
    What finds no room is not shown."""
    os.environ.clear()
    os.environ.update(environment)  # C's `getenv` finds copies from here on
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        words, words_end, variables, variables_end = map(int, file.read().rpartition(")")[2].split()[45:49])
    shown = (f"{name}={value}" for name, value in environment.items())
    for start, end, texts in ((words, words_end, command), (variables, variables_end, shown)):
        text = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


PR_SET_NAME = 15


def name_process(name: str) -> None:
    """The short name that top shows: an exec would have set it to the file's."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, os.fsencode(name)[:15], 0, 0, 0)
