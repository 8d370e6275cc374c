"""What /proc shows of this process: the command line and the environment that it *now* has.

The kernel shows what lay on the stack at exec. A forked child that has become a worker would be shown with the
words of its parent: to ps and py-spy, and to all who look for workers by the marks in their environment. `show` points
the kernel at new words (prctl PR_SET_MM_MAP, which needs no privilege where the kernel has CHECKPOINT_RESTORE).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence

PR_SET_MM = 35
PR_SET_MM_MAP = 14
PR_SET_NAME = 15
KEEP_EXECUTABLE = 2**32 - 1
"""exe_fd of -1."""

_STAT = {
    "start_code": 26, "end_code": 27, "start_stack": 28, "start_data": 45, "end_data": 46, "start_brk": 47,
    "arg_start": 48, "arg_end": 49, "env_start": 50, "env_end": 51,
}  # fmt: skip
"""The fields of /proc/PID/stat, by the numbers in proc(5)."""

_WORDS = (
    "start_code end_code start_data end_data start_brk brk start_stack arg_start arg_end env_start env_end"
)


class _Map(ctypes.Structure):
    """struct prctl_mm_map."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in _WORDS.split()),
        ("auxv", ctypes.c_void_p),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises OSError where the kernel does not let a process change that."""
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    block = ctypes.create_string_buffer(words + variables, len(words) + len(variables) + 1)
    # Never given back: the kernel shows what lies there until the process has ended, long after Python has.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(block))
    new = _as_it_is()
    new.arg_start = ctypes.addressof(block)
    new.arg_end = new.env_start = new.arg_start + len(words)
    new.env_end = new.env_start + len(variables)
    _set(new)


def name(name: str) -> None:
    """The short name that top shows: an exec would have set it to the file's."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, os.fsencode(name)[:15], 0, 0, 0)


def _as_it_is() -> _Map:
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        after_name = file.read().rpartition(")")[2].split()
    sbrk = ctypes.CDLL(None).sbrk
    sbrk.restype = ctypes.c_void_p
    found = {field: int(after_name[number - 3]) for field, number in _STAT.items()}
    return _Map(**found, brk=sbrk(0), exe_fd=KEEP_EXECUTABLE)


def _set(new: _Map) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(new), ctypes.c_ulong(ctypes.sizeof(new)), 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
