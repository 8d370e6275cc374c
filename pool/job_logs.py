"""Below the log directory of a pool's daemon: a folder for each job that has run here, and which of them are kept.

    DIR/<job>/<node>.log                    what the job's agents print on this node
    DIR/<job>/<job>-<run>/gen<generation>/  what its workers print (`log_files`)

The folders of jobs that the pool's store still knows are kept, and the newest few of others: a store may have lost all.
What is deleted bears our mark with the same pool's name, and no process has the job's output open. What people have
put into such a folder stays, and the folder with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ..agent.output.log_files import delete_run
from ..threads import Thread

KEPT_BEYOND = 10
"""Folders of jobs that the store does not know any more."""

MARK = ".elastic-agent-job"
_MARK_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_NAME = 4096
_JOB = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class JobFolders:
    """One daemon's part in these folders. For its main thread."""

    def __init__(self, root: Path, pool: str, node: str) -> None:
        """`pool` is its name among all pools, in words."""
        self._root, self._pool, self._node = root, pool, node
        self._tidying: Thread | None = None
        self._unfinished = [log for log in root.glob(f"*/{node}.log") if _is_held(log)]

    def unfinished(self) -> tuple[str, ...]:
        """Jobs of an earlier daemon of this node that have processes here still."""
        self._unfinished = [log for log in self._unfinished if _is_held(log)]
        return tuple(sorted(log.parent.name for log in self._unfinished))

    def begin(self, job: str) -> BinaryIO:
        """The open file for what the job's agents print here. As long as a process that was started with it lives,
        `unfinished` finds it, and its folder is not deleted; a disk without locks has none to find. Raises OSError."""
        if _JOB.fullmatch(job) is None:
            raise OSError(f"{job!r} is no name for a folder: submit the job anew")
        folder = self._root / job
        folder.mkdir(parents=True, exist_ok=True)
        with open(os.open(folder / MARK, _MARK_FLAGS | os.O_CREAT | os.O_TRUNC, 0o640), "wb") as mark:
            mark.write(os.fsencode(self._pool))
        output = (folder / f"{self._node}.log").open("a+b")  # NFS locks for sharing what is open for reading
        with contextlib.suppress(OSError):
            fcntl.flock(output, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return output

    def tidy(self, known: Collection[str]) -> None:
        """Deletes what is not kept while the store knows these jobs, in a thread of its own."""
        if self._tidying is None or not self._tidying.is_alive():
            work = partial(prune, self._root, self._pool, known)
            self._tidying = Thread(work, "job-folders", lambda: None)
            self._tidying.start()


def _is_held(output: Path) -> bool:
    """NFS gives this lock only on a file that is open for writing."""
    try:
        file = os.open(output, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)


def prune(root: Path, pool: str, known: Collection[str]) -> None:
    """Deletes the folders of the pool's jobs that are not `known`, but for the newest. May take as long as the disk
    does; one that fails here fails the next job, too, where it is logged."""
    found = []
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            if folder.name not in known and (mark := _marked(folder)) is not None and mark[1] == pool:
                found.append((mark[0], folder))
    for _, folder in sorted(found, reverse=True)[KEPT_BEYOND:]:
        _delete(folder)


def _marked(folder: Path) -> tuple[float, str] | None:
    """When a job began to run there, and for which pool; None if it is none of our folders."""
    with contextlib.suppress(OSError):
        if folder.is_symlink():
            return None
        mark = os.open(folder / MARK, _MARK_FLAGS)
        try:
            return os.fstat(mark).st_mtime, os.fsdecode(os.read(mark, _MOST_NAME))
        finally:
            os.close(mark)
    return None


def _delete(folder: Path) -> None:
    """If no process of the job is left. The mark goes last, so that what could not be deleted is tried again."""
    with contextlib.suppress(OSError):
        printed = [each for each in folder.iterdir() if each.name.endswith(".log") and not each.is_dir()]
        if any(map(_is_held, printed)):
            return
        for each in printed:
            each.unlink()
        for each in folder.iterdir():
            if each.name.startswith(f"{folder.name}-"):
                delete_run(each)
        if os.listdir(folder) == [MARK]:
            (folder / MARK).unlink()
            folder.rmdir()


PATH = "/logs"
"""Of the page."""
MOST_BYTES = 256 * 1024
"""Of one answer."""


def read_piece(root: Path, node: str, job: str, start: int) -> bytes:
    """What the job's agents have printed on this node, from this byte on; `MOST_BYTES` at most. Raises
    FileNotFoundError when nothing of the job is on this node, and OSError."""
    if _JOB.fullmatch(job) is None or _marked(root / job) is None:
        raise FileNotFoundError(f"nothing of a job {job!r} is here")
    fd = os.open(root / job / f"{node}.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.pread(fd, MOST_BYTES, start) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)
