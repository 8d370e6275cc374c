"""What the fork server has imported, and whether a fork with it is what a fresh process would be.

A fork has its parent's memory, and of its threads only the one that forked. So before each fork `check` makes sure that
the process has one thread and no CUDA context. It never computes anything: OpenMP's threads do not survive a fork
either. What has been installed or edited since is imported by a new agent.

Scripts find the modules in `sys.modules`, as if someone had imported them before. A file beside the script of the same
name as one of them would not be found, so such a script starts cold (`shadowed`).

In the job's interpreter, too, which need not know this package: standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from importlib.machinery import PathFinder
from typing import Any

DEFAULT_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data.distributed",
    # What DistributedDataParallel(...), the first backward pass, and torch.save import when they are first called.
    "torch._dynamo",
    "torch._dynamo.polyfills.loader",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "torch.distributed.elastic.multiprocessing.errors",
    "elastic_agent.worker",
    "elastic_agent.worker.checkpointing.checkpointer",
)
"""What makes the construction of DDP, its first steps and checkpoints import nothing. Not every torch has all of it."""


class Unfit(Exception):
    """Why no spares can be forked."""


class Imported:
    """Made once, in a process that has one thread and forks others later."""

    def __init__(self, words: Iterable[str]) -> None:
        """Imports what these words of --preload name."""
        self.base = dict(os.environ)
        """The environment that the modules have read."""
        self.skipped: dict[str, str] = {}
        """Words that name what could not be imported, and why."""
        before = len(sys.modules)
        with _recorded_reads() as self.reads:
            for word in words:
                for name in DEFAULT_PRELOAD if word == "default" else (word,):
                    try:
                        importlib.import_module(name)
                    except (Exception, SystemExit) as error:
                        if word != "default":
                            self.skipped[word] = f"{type(error).__name__}: {error}"
        importlib.invalidate_caches()
        self.count = len(sys.modules) - before
        self.variables = {name: value for name, value in os.environ.items() if self.base.get(name) != value}
        """That modules have set when they were imported: scripts shall have them, too."""
        self._tops = {name for name in sys.modules if "." not in name}.difference(sys.builtin_module_names)

    def check(self) -> None:
        """Raises Unfit when a fork would not be like a process that imports all of this now."""
        threads = os.listdir("/proc/self/task")
        if len(threads) > 1:
            raise Unfit(f"it has {len(threads)} threads, of which a fork has only one")
        cuda: Any = sys.modules.get("torch.cuda")
        if cuda is not None and cuda.is_initialized():
            raise Unfit("it has a CUDA context, which no fork can use")

    def shadowed(self, folder: str) -> str:
        """Imported modules in whose place something else is imported, when this folder comes first on sys.path."""
        try:
            lying_there = {entry.partition(".")[0] for entry in os.listdir(folder or ".")}
        except OSError:
            return ""
        found = []
        for name in sorted(self._tops & lying_there):
            spec = PathFinder.find_spec(name, [folder])
            # A folder without __init__.py gives way to any module further down the path.
            if spec is None or spec.loader is None:
                continue
            known = sys.modules[name].__spec__
            if known is None or spec.origin != known.origin:
                found.append(name)
        return ", ".join(found)


@contextlib.contextmanager
def _recorded_reads() -> Iterator[set[str]]:
    """The variables of the environment that Python code reads meanwhile."""
    kind: Any = type(os.environ)
    get, reads = kind.__getitem__, set[str]()

    def recorded(environ: Any, key: Any) -> Any:
        reads.add(os.fsdecode(key))
        return get(environ, key)

    kind.__getitem__ = recorded
    try:
        yield reads
    finally:
        kind.__getitem__ = get


# --- Its environment

ROOM_NAME = "ELASTIC_AGENT_PRELOADER_ROOM"
ROOM = {ROOM_NAME: " " * 2**16}
"""For the variables that the kernel shall show of a worker, see `show_process`."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""For the fork server, so that its libraries start no threads: a fork would not have them. MKL does as
OpenMP."""

HARMLESS = ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONBREAKPOINT", "PYTHONSTARTUP")
"""Of `AT_START`: what a fork does with them is the same."""

AT_START = ("PYTHON*", "LD_*", "GLIBC_TUNABLES", "MALLOC_*", "LANG", "LC_*", "OPENSSL_*")
"""Read when a process starts, so that what a script sets itself changes nothing."""

AT_LOADING = (
    *("OMP_*", "GOMP_*", "ACC_*", "KMP_*", "MKL_*", "MKLDNN_*", "DNNL_*", "ONEDNN_*", "I_MPI_*"),
    *("OPENBLAS_*", "GOTO_*", "NPY_*", "GFORTRAN_*", "KINETO_*", "*_ALLOC_CONF", "PYTORCH_*"),
    *("TORCH_ALLOW_*", "TORCH_BLAS_*", "TORCH_LINALG_*", "TORCH_ROCM_*", "TORCH_SHOW_CPP_STACKTRACES"),
    *("TORCH_CUSTOM_TERMINATE", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS*"),
)
"""Read by C code when torch, numpy or what they need is loaded."""

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")
NUMBER = re.compile(r"([1-9]\d*)?")

_SETTING = re.compile(
    r"""environb?\s*\[\s*b?["'](\w+)["']\s*\]\s*=(?!=)|(?:setdefault|putenv)\(\s*b?["'](\w+)["']"""
)


def obstacle(base: Mapping[str, str], worker: Mapping[str, str], reads: Collection[str] = ()) -> str:
    """Why a worker with this environment must start cold, when modules were loaded in the environment `base`, and
    read these variables of it; empty if it need not."""
    for name in sorted({*base, *worker}):
        value, was = worker.get(name), base.get(name)
        if value == was or name in HARMLESS or (name in THREADS and NUMBER.fullmatch(value or "")):
            continue
        if name in reads or _fits(name, AT_START) or _fits(name, AT_LOADING):
            return f"{name} is {_shown(value)}, and {_shown(was)} where its modules were loaded"
    return ""


def set_too_late(script: str, reads: Collection[str] = ()) -> str:
    """Why this text of a script asks for a cold start: a variable that it sets, as far as that can be seen, has been
    read already. Empty if there is none."""
    for name in sorted({first or second for first, second in _SETTING.findall(script)}):
        if not _fits(name, AT_START) and (name in reads or _fits(name, AT_LOADING)):
            return f"it sets {name}, which has an effect only before its modules are loaded"
    return ""


def _fits(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _shown(value: str | None) -> str:
    return "not set" if value is None else repr(value)


def set_threads() -> None:
    """As many as the libraries would have taken in this process' environment: OpenMP's, and OpenBLAS'."""
    cpus = len(os.sched_getaffinity(0))
    openmp = int(os.environ.get("OMP_NUM_THREADS") or cpus)
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.backends.mkl.is_available():
        openmp = min(openmp, _cores())
    wishes = (
        os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
    )
    openblas = min(next((int(wish) for wish in wishes if wish), cpus), cpus)
    for path in _loaded_libraries():
        library = os.path.basename(path)
        if library.startswith(("libgomp", "libomp", "libiomp")):
            ctypes.CDLL(path).omp_set_num_threads(openmp)
        elif "openblas" in library:
            loaded = ctypes.CDLL(path)
            for name in (f"{p}openblas_set_num_threads{s}" for p in ("", "scipy_") for s in ("", "64_")):
                if hasattr(loaded, name):
                    getattr(loaded, name)(openblas)
                    break


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


def _loaded_libraries() -> list[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        return sorted({line.split(maxsplit=5)[5].rstrip("\n") for line in file if "/" in line})
