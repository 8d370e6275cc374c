"""What this machine lacks, for now or for good: another machine could do it, or this one later.

A lack is no failure of the script. While a job runs, what this node cannot have is tried again for `GIVES_UP_S` by
this node alone; then it leaves, with exit code 73, as it does at once for a lack at its own start.
"""

from __future__ import annotations

import errno
import math

from .own_folder import NoTemporaryDirectory

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between two tries: it doubles."""
GIVES_UP_S = 10.0

REMEDIES = {
    errno.EMFILE: "this process has no file descriptors left; raise `ulimit -n` (systemd: LimitNOFILE)",
    errno.ENFILE: "this machine has no file descriptors left; end what holds them, or raise fs.file-max",
    errno.EAGAIN: "this user or cgroup has no processes and threads left; raise `ulimit -u` or pids.max (systemd: "
    "TasksMax)",
    errno.ENOBUFS: "this machine's kernel has no memory left for sockets; make room",
    errno.ENOMEM: "this machine or cgroup has no memory left; make room, or raise its limit",
    errno.ENOSPC: "a file system of this machine is full (df and df -i say which); make room",
    errno.EDQUOT: "this user's share of a file system is used up (quota says which); make room",
    errno.EROFS: "a file system of this machine is read-only; mount a writable one there",
}


def lack_in(error: BaseException) -> str:
    """The error, and what to do about it; empty for one that is no lack of this machine."""
    if isinstance(error, NoTemporaryDirectory):
        return str(error)
    remedy = REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{error}: {remedy}" if remedy else ""


class Lack:
    """What is lacking in one thread, from the first try that shows it to the one that goes well."""

    def __init__(self) -> None:
        self.over()

    def over(self) -> None:
        self._since = math.inf
        self._tries = 0
        self.again_at = -math.inf
        """When there may be another try."""

    def __bool__(self) -> bool:
        return self._tries > 0

    def met(self, now: float) -> bool:
        """By a try. Whether there may be another."""
        self._since = min(self._since, now)
        self.again_at = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**self._tries)
        self._tries += 1
        return now < self._since + GIVES_UP_S
