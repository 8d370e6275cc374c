"""What a process reads of its environment only once, at its start or when a library is loaded: where a worker's differs
there, it must start cold.

A forked worker has an environment of its own, but the preloaded process has read parts of its environment already.
`AT_START` and `AT_LOADING` name what Python and libraries in C read so early; what Python code reads while a module is
imported, `imported` has recorded. Numbers of threads alone can still be set in a fork (`set_threads`), since the agent
chooses them for each worker.

Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""For the preloaded process, so that its libraries start no threads: a fork would not have them. MKL does as
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
_UPDATING = re.compile(r"environb?\s*(?:\.update\(|\|=)")
_WORD = re.compile(r"\b[A-Z][A-Z0-9_]{2,}\b")


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
    names: set[str] = {first or second for first, second in _SETTING.findall(script)}
    if _UPDATING.search(script):
        names |= set(_WORD.findall(script))
    for name in sorted(names):
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
