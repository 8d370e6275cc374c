"""What this machine lacks, for now or for good: another machine could do it, or this one later.

One boundary for all of it: what cannot be claimed or started for a lack is tried again under `AGAIN`, by this node
alone. Then the node leaves with exit code 73: a lack is no failure of the script, and spends none of its restarts.
"""

from __future__ import annotations

import errno

from ...rendezvous.store.requests import RetryPolicy

AGAIN, GIVES_UP_S = RetryPolicy(first_wait_s=0.1, max_wait_s=2.0), 10.0

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
    remedy = REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{error}: {remedy}" if remedy else ""
