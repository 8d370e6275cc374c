"""The files of worker logs: written by a thread that does nothing else, so that only it waits for the disk.

A disk may be full, read-only or gone, which is an error; or it does not answer (a dead NFS, a frozen file system), and
then its writers stand still for as long as it does. Workers must do neither. What finds no room in the queue is
dropped and counted, and where the file goes on it has how many bytes are missing. There is one warning of each.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .backlog import Backlog

QUEUE_MAX = 4 * 1024 * 1024
"""Bytes that may wait for the disk."""
PATIENCE_S = 1.0
"""How long workers may be kept waiting for room, once."""
STILL_S = 10.0
"""A disk that takes longer for one write counts as standing still."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LogFile:
    """One file, whose `fd` only the thread touches."""

    generation: int
    path: Path
    fd: int = -1
    written: bool = False
    """It was made."""
    failed: bool = False
    """It is not written any more."""
    lost: int = 0
    """Bytes that are missing behind what was put last. Only who saves touches it."""


@dataclass(frozen=True, slots=True)
class _Work:
    do: Callable[[], None]
    file: LogFile | None = None
    size: int = 0


class LogFiles(Backlog[_Work]):
    def __init__(self, count_lost: Callable[[int], None] = lambda size: None) -> None:
        """`count_lost` is given how many bytes were dropped."""
        super().__init__("log-files")
        self._count_lost = count_lost
        self._complained = -1  # the generation whose first disk trouble was reported
        self._busy_since = math.inf
        self._still = False
        """The log has that the disk stands still."""

    def open(self, generation: int, path: Path) -> LogFile:
        file = LogFile(generation, path)
        self.do(partial(self._open, file))
        return file

    def save(self, file: LogFile, data: bytes) -> None:
        """May wait, see the module's docstring."""
        if file.failed:
            return
        if time.monotonic() - self._busy_since > STILL_S:
            self._warn_still(file)
        work = _Work(partial(self._save, file, data, file.lost), file, len(data))
        if self.put(work, work.size, QUEUE_MAX, PATIENCE_S):
            file.lost = 0

    def finish(self, file: LogFile) -> None:
        """It is closed when all is written."""
        self.do(partial(self._end, file))

    def do(self, action: Callable[[], None]) -> None:
        """In the thread, when all before it is done. Never waits."""
        self.put(_Work(action), 0, math.inf)

    def _refused(self, work: _Work) -> None:
        assert work.file is not None, "all others have room"
        work.file.lost += work.size
        self._count_lost(work.size)
        self._warn_still(work.file)

    def _moved(self) -> None:
        if self._still and not self._waiting:
            self._still = False
            _log.warning("the disk of the worker logs moves again")

    def _warn_still(self, file: LogFile) -> None:
        with self._changed:
            logged, self._still = self._still, True
        if not logged:
            _log.warning(
                "the disk of worker log %s stands still: training goes on, and what finds no room in memory "
                "meanwhile is missing in the files",
                file.path,
            )

    # Everything below runs in the thread.

    def _do(self, work: _Work) -> None:
        self._busy_since = time.monotonic()
        work.do()
        self._busy_since = math.inf

    def _open(self, file: LogFile) -> None:
        try:
            file.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            file.fd = os.open(file.path, flags, 0o640)
            file.written = True
        except OSError as error:
            self._complain(file, error)

    def _save(self, file: LogFile, data: bytes, missing: int) -> None:
        mark = b""
        if missing:
            mark = b"\n[elastic-agent: the disk stood still: %d bytes missing here]\n" % missing
        rest = memoryview(mark + data)
        try:
            while rest and file.fd >= 0:
                rest = rest[os.write(file.fd, rest) :]
        except OSError as error:
            self._complain(file, error)
            self._close(file)

    def _end(self, file: LogFile) -> None:
        self._save(file, b"", file.lost)
        self._close(file)

    def _close(self, file: LogFile) -> None:
        if file.fd >= 0:
            with contextlib.suppress(OSError):  # an error of a network disk at close was logged at write
                os.close(file.fd)
            file.fd = -1

    def _complain(self, file: LogFile, error: OSError) -> None:
        """One warning for a generation: a full disk is one fact, not one for each rank and stream."""
        file.failed = True
        if self._complained == file.generation:
            return
        self._complained = file.generation
        _log.warning(
            "worker log %s is not written: %s; this generation's lines go to the console only where that "
            "happens: make room or set another --log-dir",
            file.path,
            error.strerror,
        )
