"""What the agent that hosts a c10d store leaves for its next life on this machine: the newest world, in a file.

The store itself is gone with its agent. Its next host must not give a generation's number away a second time, and must
not let a world begin while members of the last one may still train; the file has both. It lies in the machine's
memory: a machine that starts anew takes longer than any lease lasts.

The file outlives a job whose agents were all killed, and the next job at the endpoint may be another one of the same
id. So its number and its members count for every job, but restarts, step and run only where an agent of that world
has joined again (`decide`). The file's age does not tell these apart: another job may come after a second, and the
same job, started again as a whole, is a new run either way, which takes over the checkpoints of the dead one
(`worker/storage/disk/ownership.py`).

All users share the folder. So a part of the file's name is drawn by chance, for no other user to take it first, and the
file counts only when it belongs to this user and no other user may have written it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path

from ...rendezvous.errors import RecordInvalid
from ...rendezvous.records import MAX_RECORD_BYTES, WORLD_KEY, Phase, World
from ..common.own_folder import temporary_places

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


class StoreMemory:
    """The newest world of one job at one endpoint, in a file."""

    def __init__(self, job: str, endpoint: str, folder: Path | None = None) -> None:
        """`folder` is for tests."""
        if folder is None:
            usable = os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
            folder = SHARED_MEMORY if usable else temporary_places()[0]
        name = hashlib.sha256(f"{os.getuid()} {endpoint} {job}".encode()).hexdigest()[:16]
        self._job = job
        prefix = f".elastic-agent-store-{name}-"
        self.file = _newest_own(folder, prefix) or folder / f"{prefix}{secrets.token_hex(8)}.json"
        self._failed = False

    def recall(self) -> World | None:
        """The newest world of an earlier host that did not end the job."""
        try:
            world = World.from_json(self._read())
            if world.job != self._job:
                raise RecordInvalid(WORLD_KEY, f"it is that of job {world.job!r}")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, RecordInvalid) as error:
            log.warning("what an earlier host of the store knew cannot be used: %s: %s", self.file, error)
            return None
        return world if world.phase is not Phase.ENDED else None

    def remember(self, text: str) -> None:
        """`text` is the world that is about to be seen by all."""
        try:
            if World.from_json(text).phase is Phase.ENDED:
                self.file.unlink(missing_ok=True)
            else:
                self._write(text.encode())
        except (OSError, RecordInvalid) as error:
            if not self._failed:
                log.warning(
                    "the next host of the store will not know of this world: %s: %s", self.file, error
                )
            self._failed = True

    def _read(self) -> str:
        fd = os.open(self.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            others_may_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or others_may_write:
                raise PermissionError("it is not this user's own file")
            return file.read(MAX_RECORD_BYTES + 1).decode()

    def _write(self, content: bytes) -> None:
        """A reader sees all of it, or all of the one before."""
        fd, new = tempfile.mkstemp(prefix=f".{self.file.name}", dir=self.file.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
            os.replace(new, self.file)
        except OSError:
            os.unlink(new)
            raise


def _newest_own(folder: Path, prefix: str) -> Path | None:
    """An earlier host's file; those of other users do not count."""
    found = []
    for file in folder.glob(f"{prefix}*.json"):
        with contextlib.suppress(OSError):
            status = file.lstat()
            if status.st_uid == os.getuid():
                found.append((status.st_mtime_ns, file))
    return max(found)[1] if found else None
