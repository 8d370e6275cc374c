"""`--preload auto`: one worker of the first generation notes which modules it imports, and they are preloaded, too.

A finder at the front of its `sys.meta_path` is asked for every module that is not loaded yet. It notes the name, and
lets the others find it. What lies beside Python's own library, in site-packages, counts (`installed`): a job's own
modules are edited, and the standard library is quickly imported.

In the job's interpreter: standard library only.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable
from typing import Any

NOTES_MOST = 2**20

OUT_OF_THE_WAY = 100
"""Descriptors from here on: a script shall get the low ones that it would get without us."""


class Listener:
    """Writes a line for each name, at once: a worker may be killed at any moment."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        try:
            os.write(self._descriptor, f"{name}\n".encode())
        except OSError:  # closed by a script that closes all that it does not know
            pass


def profile_imports(descriptor: int) -> None:
    """From now on, in this process and those that it forks."""
    kept = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, OUT_OF_THE_WAY)
    os.close(descriptor)
    finder: Any = Listener(kept)
    sys.meta_path.insert(0, finder)


class ImportProfile:
    """The agent's end: where one worker of the first generation notes what it imports."""

    def __init__(self) -> None:
        self._file = os.memfd_create("imports", os.MFD_CLOEXEC)
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)
        self.handed_out = False

    def hand_out(self) -> tuple[int, ...]:
        """To the first who asks."""
        descriptors = () if self.handed_out else (self._file,)
        self.handed_out = True
        return descriptors

    def read(self) -> tuple[str, ...]:
        """All that was noted so far, for the last time."""
        text = os.pread(self._file, NOTES_MOST, 0)
        os.close(self._file)
        return noted(text)


def noted(text: bytes) -> tuple[str, ...]:
    """The names in the order in which they were first asked for; a line that was not finished is none."""
    lines = text.decode(errors="replace").split("\n")[:-1]
    return tuple(
        name for name in dict.fromkeys(lines) if all(part.isidentifier() for part in name.split("."))
    )


def installed(names: Iterable[str]) -> list[str]:
    """Those of packages in site-packages. Imports nothing."""
    folders = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    tops: dict[str, bool] = {}
    for name in names:
        top = name.partition(".")[0]
        if top not in tops:
            tops[top] = _origin(top).startswith(folders)
    return [name for name in names if tops[name.partition(".")[0]]]


def _origin(top: str) -> str:
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return ""
    return (spec.origin or "") if spec is not None else ""
