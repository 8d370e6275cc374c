"""What the agents of a pool's jobs print on one node, and who may read it: DIR/<node>/<job>.log, below the daemon's log
directory. The newest `KEPT` are kept, and those of jobs that go on.

The folders of the jobs' runs, with a file for each worker, are beside, as without a pool (`agent/output/log_files.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import re
import stat
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from ..health.http import TEXT, Page, Request
from ..threads import Thread

KEPT = 1000
PATH = "/logs"
"""Of the page."""
MOST_BYTES = 256 * 1024
"""Of one answer."""
_JOB = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class JobLogs:
    """Of one node."""

    def __init__(self, root: Path, node: str) -> None:
        self._folder = root / node
        self._unfinished = [log for log in self._folder.glob("*.log") if _is_held(log)]

    def unfinished(self) -> tuple[str, ...]:
        """Jobs of an earlier daemon of this node that have processes here still."""
        self._unfinished = [log for log in self._unfinished if _is_held(log)]
        return tuple(sorted(log.stem for log in self._unfinished))

    def begin(self, job: str) -> BinaryIO:
        """The open file for what the job's agents print here. As long as a process that was started with it lives,
        `unfinished` finds it, and it is not deleted; a disk without locks has none to find. Raises OSError."""
        if _JOB.fullmatch(job) is None:
            raise OSError(f"{job!r} is no name for a file: submit the job anew")
        self._folder.mkdir(parents=True, exist_ok=True)
        output = (self._folder / f"{job}.log").open("a+b")  # NFS locks for sharing what is open for reading
        with contextlib.suppress(OSError):
            os.utime(output.fileno())  # the newest, on a disk without locks, too
            fcntl.flock(output, fcntl.LOCK_SH | fcntl.LOCK_NB)
        Thread(self._prune, "job-logs", lambda: None).start()
        return output

    def _prune(self) -> None:
        """In a thread of its own: a disk takes its time for a thousand files."""
        with contextlib.suppress(OSError):
            for log in sorted(self._folder.glob("*.log"), key=lambda log: log.lstat().st_mtime)[:-KEPT]:
                if not _is_held(log):
                    log.unlink()

    def read(self, job: str, start: int) -> bytes:
        """What the job's agents have printed, from this byte on; `MOST_BYTES` at most. Raises FileNotFoundError when
        nothing of the job is on this node, and OSError."""
        if _JOB.fullmatch(job) is None:
            raise FileNotFoundError(f"nothing of a job {job!r} is here")
        fd = os.open(self._folder / f"{job}.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.pread(fd, MOST_BYTES, start) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        finally:
            os.close(fd)


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


class LogPage:
    """Pieces of these logs, for readers of the store: the token is in this node's record there."""

    def __init__(self, logs: JobLogs, token: str) -> None:
        self._logs, self._token = logs, token

    def answer(self, request: Request) -> Page:
        if not hmac.compare_digest(request.token.encode(), self._token.encode()):
            missing = b"the token in this node's record of the pool is missing\n"
            return Page(HTTPStatus.UNAUTHORIZED, TEXT, missing)
        try:
            piece = self._logs.read(request.query.get("job", ""), int(request.query.get("start", 0)))
        except FileNotFoundError:
            return Page(HTTPStatus.NOT_FOUND, TEXT, b"nothing of this job is here\n")
        except (ValueError, OverflowError, OSError) as error:
            return Page(HTTPStatus.BAD_REQUEST, TEXT, f"{type(error).__name__}\n".encode())
        return Page(HTTPStatus.OK, "application/octet-stream", piece)
