"""The folder in memory that holds this node's newest states: the agent's own, so that it outlives every worker.

Only its user may enter it. The agent removes it when it ends, and the guard when the agent could not.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ...worker.storage.memory.available_memory import size_text

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "elastic-agent-"

YOUNG_S = 60.0

DEFAULT_SHARE = 0.5
"""Of the shared memory: the workers' data loaders and NCCL need theirs."""


@dataclass(frozen=True, slots=True)
class MemoryFolder:
    """`limit` is the most bytes that the copies of all workers here may take."""

    path: Path
    limit: int
    lock: int | None = None
    """A descriptor that is locked while the agent lives, so that others know an abandoned folder. None: this
    folder is only described."""

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock is not None:
            os.close(self.lock)


def describe_folder(limit: int | None, place: Path = SHARED_MEMORY) -> MemoryFolder | None:
    """The folder that an agent would make here, with its name left open."""
    try:
        share = _share_of(place)
    except OSError:
        return None
    if limit == 0:
        return None
    return MemoryFolder(place / f"{PREFIX}<random>", share if limit is None else limit)


def make_folder(limit: int | None, place: Path = SHARED_MEMORY) -> MemoryFolder | None:
    """None, and the log says why, when checkpoints go to disk only. `limit` None: a share of what there is; 0: off."""
    if limit == 0:
        return None
    try:
        remove_abandoned(place)
        share = _share_of(place)
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        lock = _lock(path)
    except OSError as error:
        log.warning("no checkpoints in memory, they go to disk only: %s", error)
        return None
    if limit is None:
        limit = share
    log.info("checkpoints in memory: at most %s in %s", size_text(limit), path)
    return MemoryFolder(path, limit, lock)


def remove_abandoned(place: Path) -> None:
    """What agents left whose guard was killed with them: memory that would never be given back otherwise."""
    for path in place.glob(f"{PREFIX}*"):
        try:
            found = path.lstat()
            # A new one is locked a moment after it was made.
            if found.st_uid != os.getuid() or time.time() - found.st_ctime < YOUNG_S:
                continue
            lock = _lock(path)
        except OSError:  # its agent lives, it has just gone, or it is no such folder
            continue
        log.warning("removing what an agent that was killed has left in memory: %s", path)
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _share_of(place: Path) -> int:
    """Bytes. Raises OSError."""
    found = os.statvfs(place)
    return int(found.f_blocks * found.f_frsize * DEFAULT_SHARE)


def _lock(path: Path) -> int:
    """Raises OSError when another has it."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
