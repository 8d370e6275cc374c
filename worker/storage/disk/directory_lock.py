"""`owner.lock` in a checkpoint directory: held by the processes of one run, on all of its nodes, and of no other run.

Rank 0 takes it before it loads, and lends it to its agent (an open file over a socket), which keeps it until it ends:
a run that waits here would otherwise come in between two generations of the owner. The file holds the run's name, by
which its other processes know that they may share the lock, and which one that is refused is told.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Callable
from io import FileIO

from ...wire.run import Run

LOCK_NAME = "owner.lock"
_MOST_BYTES = 4096


class Lock:
    """Of one run in one directory. A process that was forked off does not hold it."""

    def __init__(self, run: Run, lend: Callable[..., bool]) -> None:
        """`lend(run, *descriptors)` gives them to the agent; False when the agent did not get it."""
        self._run = run
        self._lend = lend
        self._lent = False
        self._file: FileIO | None = None
        _locks.add(self)

    def take(self, dir_fd: int) -> bool:
        """False: another run has it. True: this run has it, or the file system knows no locks."""
        if self._file is not None:
            return True
        file = self._open(dir_fd, os.O_CREAT)
        if file is None:
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._share(file)
        except OSError:
            file.close()
            return True
        # No process of another run had it. One may get it in between: then that one's name is in the file.
        file.truncate()
        file.write(str(self._run).encode())
        return self._share(file)

    def join(self, dir_fd: int) -> None:
        """Share it where another process of this run has it."""
        if self._file is None and (file := self._open(dir_fd)) is not None:
            self._share(file)

    def holder(self, dir_fd: int) -> str:
        """The name of the run that took it last; empty where none is known."""
        with contextlib.suppress(OSError), os.fdopen(_open(dir_fd, os.O_RDONLY), "rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
        return ""

    @property
    def is_held(self) -> bool:
        """For certain: no file system without locks."""
        return self._file is not None

    def lend(self) -> None:
        """Let the agent have it too."""
        if self._file is not None and not self._lent:
            self._lent = self._lend(self._run.id, self._file.fileno())

    def release_former(self) -> None:
        """Let the agent release the locks of a run that this job was before."""
        self._lend(self._run.id)

    def forget(self) -> None:
        """Close this process's descriptor. Another process that has one, as a fork's parent, keeps the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, dir_fd: int, more_flags: int = 0) -> FileIO | None:
        # Writable: NFS asks for that. Never replaced: what is locked is the file, not its name.
        try:
            return FileIO(_open(dir_fd, os.O_RDWR | more_flags), "r+")
        except OSError:
            return None

    def _share(self, file: FileIO) -> bool:
        """Whether this run's processes have it, of which this is one then."""
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.pread(file.fileno(), _MOST_BYTES, 0).partition(b" ")[0] == self._run.id.encode():
                self._file, self._lent = file, False
                return True
        except OSError:
            pass
        file.close()
        return False


def _open(dir_fd: int, flags: int) -> int:
    return os.open(LOCK_NAME, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=dir_fd)


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _leave_them_to_the_parent() -> None:
    for lock in _locks:
        lock.forget()


os.register_at_fork(after_in_child=_leave_them_to_the_parent)
