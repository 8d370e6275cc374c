"""What a process reads only once, at its start or while a library is loaded; and what to do where a worker's differs.

A forked worker has an environment of its own, but the preloaded process has read parts of its environment already. For
what Python and C code read so early, RULES declares what follows when a worker has another value: the same effect can
still be had (a replay), or the worker must start cold. Variables that Python code reads while a module is loaded need
no rule to be noticed, `import_tracer` saw them: without a rule they, too, mean a cold start.

Asked three times. `obstacle`: before a worker is started, what of its environment, or of what its script sets itself,
asks for a cold start. `at_import`: modules are being given to a script, which may have set variables in whatever way;
what can be replayed is replayed now, the rest can only be reported. And what must not be equal in two processes, but
is in two forks, is renewed.

Standard library only, and no cached module by name: what is replayed is done to the modules that are given.
"""

from __future__ import annotations

import ctypes
import fnmatch
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

Modules = Mapping[str, ModuleType]

AT_START = ""
"""In place of a module: read when the process started, so that a script's own setting changes nothing."""

UNSET = ""
"""How a variable that is not set is written where values are matched."""

ANY_NUMBER = r"[1-9]\d*"


class CannotReplay(Exception):
    """This value, here, after all: the message is the reason."""


@dataclass(frozen=True, slots=True)
class Rule:
    """For variables that are read when `read_by` is loaded."""

    names: tuple[str, ...]
    """Patterns like a shell's."""
    read_by: str
    replay: Callable[[Modules], None] | None = None
    """To be called with the modules that are given; it reads os.environ. Raises CannotReplay. None: there is none."""
    values: str = r"(?s).*"
    """A pattern for the whole of a value that can be replayed."""

    def replays(self, value: str | None) -> bool:
        return self.replay is not None and re.fullmatch(self.values, value or UNSET) is not None


# --- Replays


def _threads_of_openmp(modules: Modules) -> None:
    """Torch takes as many as MKL does, which takes no more than there are cores."""
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    if modules["torch"].backends.mkl.is_available():
        threads = min(threads, _cores())
    for library in [path for name in ("libgomp", "libomp", "libiomp") for path in _loaded_libraries(name)]:
        ctypes.CDLL(library).omp_set_num_threads(threads)


def _cores() -> int:
    """Of those CPUs on which this process may run: several may be threads of one core."""
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                siblings.add(file.read())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)


def _threads_of_openblas(modules: Modules) -> None:
    """As many as OpenBLAS would have taken, by its own order of precedence, when it was loaded."""
    cpus = len(os.sched_getaffinity(0))
    wishes = (
        os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
    )
    threads = min(next((int(wish) for wish in wishes if re.fullmatch(ANY_NUMBER, wish)), cpus), cpus)
    for library in _loaded_libraries("openblas"):
        loaded = ctypes.CDLL(library)
        setters = (f"{p}openblas_set_num_threads{s}" for p in ("", "scipy_") for s in ("", "64_"))
        setter = next((getattr(loaded, name) for name in setters if hasattr(loaded, name)), None)
        if setter is None:
            raise CannotReplay(f"{os.path.basename(library)} does not let its number of threads be set")
        setter(threads)


def _loaded_libraries(word: str) -> list[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in file if "/" in line}
    return sorted(path for path in paths if word in os.path.basename(path))


def _log_level_of_torch(modules: Modules) -> None:
    for library in _loaded_libraries("libc10.so"):
        loaded: Any = ctypes.CDLL(library)
        try:
            read_level = loaded._ZN3c1011initLoggingEv  # c10::initLogging()
        except AttributeError:
            break
        read_level()
        return
    raise CannotReplay("torch's log level cannot be read again")


RULES = (
    # Python reads these when they are used, or for nothing that workers do.
    Rule(
        ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONBREAKPOINT", "PYTHONSTARTUP"),
        AT_START,
        lambda _: None,
    ),
    Rule(("TZ",), AT_START, lambda _: time.tzset()),
    Rule(("PYTHON*", "LD_*", "GLIBC_TUNABLES", "MALLOC_*", "LANG", "LC_*", "OPENSSL_*"), AT_START),
    Rule(("OMP_NUM_THREADS",), "torch", _threads_of_openmp, f"({ANY_NUMBER})?"),
    Rule(("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"), "numpy", _threads_of_openblas),
    Rule(("TORCH_CPP_LOG_LEVEL",), "torch", _log_level_of_torch),
    Rule(
        ("TORCH_DISTRIBUTED_DEBUG",),
        "torch.distributed",
        lambda modules: modules["torch.distributed"].set_debug_level_from_env(),
    ),
    Rule(
        ("TORCH_LOGS", "TORCH_LOGS_OUT"),
        "torch._logging._internal",
        lambda modules: modules["torch._logging._internal"]._init_logs(),
    ),
    Rule(
        ("OMP_*", "GOMP_*", "ACC_*", "KMP_*", "MKL_*", "MKLDNN_*", "DNNL_*", "ONEDNN_*", "I_MPI_*"), "torch"
    ),
    Rule(("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_*", "TORCH_LINALG_PREFER_*"), "torch"),
    Rule(("TORCH_ROCM_*", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_CUSTOM_TERMINATE"), "torch"),
    Rule(("PYTORCH_API_USAGE_STDERR", "KINETO_*"), "torch"),
    Rule(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"), "torch"),
    Rule(("OPENBLAS_*", "NPY_*", "GFORTRAN_*", "OMP_ADAPTIVE"), "numpy"),
)
"""For each variable the first that fits, and of those after it that name it in full, all."""


@cache
def rules_for(name: str) -> tuple[Rule, ...]:
    fitting = [rule for rule in RULES if any(fnmatch.fnmatchcase(name, pattern) for pattern in rule.names)]
    return tuple(rule for rule in fitting if rule is fitting[0] or name in rule.names)


# --- Before a worker is started


def obstacle(
    base: Mapping[str, str],
    worker: Mapping[str, str],
    script: str | None = None,
    reads: Collection[str] = (),
) -> str:
    """Why a worker with this environment must start cold, when modules were loaded in the environment `base`, and
    read these variables of it; empty if it need not. `script` is the file that it will run, if that is known."""
    for name in sorted(_different(base, worker)):
        rules = rules_for(name)
        if not all(rule.replays(worker.get(name)) for rule in rules) or (name in reads and not rules):
            return f"{name} is {_value(worker.get(name))}, and {_value(base.get(name))} where its modules were loaded"
    if script is None:
        return ""
    if too_late := _set_too_late(script, reads):
        return f"{script} sets {too_late}, which has an effect only before its modules are loaded"
    return ""


def _different(base: Mapping[str, str], worker: Mapping[str, str]) -> set[str]:
    return {name for name in {*base, *worker} if base.get(name) != worker.get(name)}


def _value(value: str | None) -> str:
    return "not set" if value is None else repr(value)


_SETTING = re.compile(
    r"""environb?\s*\[\s*b?["'](\w+)["']\s*\]\s*=(?!=)|(?:setdefault|putenv)\(\s*b?["'](\w+)["']"""
)
_UPDATING = re.compile(r"environb?\s*(?:\.update\(|\|=)")
_WORD = re.compile(r"\b[A-Z][A-Z0-9_]{2,}\b")


def _set_too_late(script: str, reads: Collection[str]) -> str:
    """A variable that the text of the script sets, as far as that can be seen, and that cannot be replayed; or an
    empty word. A script that cannot be read has none: Python refuses it."""
    try:
        with open(script, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return ""
    names: set[str] = {first or second for first, second in _SETTING.findall(text)}
    if _UPDATING.search(text):
        names |= set(_WORD.findall(text))
    for name in sorted(names):
        rules = [rule for rule in rules_for(name) if rule.read_by != AT_START]
        if any(rule.replay is None for rule in rules) or (name in reads and not rules_for(name)):
            return name
    return ""


# --- When modules are given to a script


def at_start(base: Mapping[str, str], worker: Mapping[str, str]) -> None:
    """In the new process, which has its environment already, before its script begins."""
    for name in _different(base, worker):
        for rule in rules_for(name):
            if rule.read_by == AT_START and rule.replay is not None:
                rule.replay({})


def at_import(given: Modules, reads: Collection[str], base: Mapping[str, str]) -> Iterator[str]:
    """Replays what these modules would have read now, and renews them. Yields what differs from a fresh import."""
    replays: dict[Callable[[Modules], None], None] = {}
    for name in sorted(_different(base, os.environ)):
        rules = rules_for(name)
        due = [rule for rule in rules if rule.read_by in given]
        value = os.environ.get(name)
        if not all(rule.replays(value) for rule in due) or (name in reads and not rules):
            yield f"{name} is {_value(value)} only since its readers were loaded, and changes them no more"
        else:
            replays.update({rule.replay: None for rule in due if rule.replay is not None})
    for replay in replays:
        try:
            replay(given)
        except CannotReplay as problem:
            yield str(problem)
    for name in RENEWED:
        if name in given:
            _renew(name, given[name])


# --- What must not be equal in two forks


TORCH_SEED = 67280421310721
"""With which older versions of torch begin in every process."""

RENEWED = (
    "torch",
    "numpy.random",
    "multiprocessing",
    "multiprocessing.process",
    "tempfile",
    "threading",
    "logging",
)
"""Modules with something that must not be equal in two forks. (`random` renews itself in every fork.)"""


def _renew(name: str, module: Any) -> None:
    if name == "torch" and module.default_generator.initial_seed() != TORCH_SEED:
        module.default_generator.seed()
    elif name == "numpy.random":
        module.seed()
    elif name == "multiprocessing":
        sys.modules["__mp_main__"] = sys.modules["__main__"]
    elif name == "multiprocessing.process":
        module._current_process._config["authkey"] = module.AuthenticationString(os.urandom(32))
        module.ORIGINAL_DIR = os.path.abspath(os.getcwd())
    elif name == "tempfile":
        module.tempdir = None
    elif name == "threading":
        module.main_thread()._set_native_id()
    elif name == "logging":  # records have the time since it was imported
        module._startTime = time.time() if isinstance(module._startTime, float) else time.time_ns()
