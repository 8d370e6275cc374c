"""Whether the kernel's out-of-memory killer has ended a process of this agent, by its counters.

A worker that it kills ends by SIGKILL, as one that a person kills. The kernel counts its victims by cgroup, in
`memory.events` (version 2, with all cgroups below) or `memory.oom_control` (version 1), and it counts before it kills.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ....worker.storage.memory.available_memory import own_cgroup, read_rows, upwards

log = logging.getLogger(__name__)

LATELY_S = 60.0
"""A process with much memory takes its time to end."""

LOOK_EVERY_S = 1.0


class OomKills:
    """Owned by one thread. Instants are seconds on the monotonic clock."""

    def __init__(self, counter: Path | None) -> None:
        """None: this kernel does not count."""
        self._counter = counter
        self._count = _read(counter)
        self._looked_at = 0.0
        self._struck_at: float | None = None

    def update(self, now: float) -> None:
        """To be called now and then, so that an old strike is not taken for a new one."""
        if now >= self._looked_at + LOOK_EVERY_S:
            self._read_count(now)

    def lately(self, now: float) -> bool:
        self._read_count(now)
        return self._struck_at is not None and now <= self._struck_at + LATELY_S

    def _read_count(self, now: float) -> None:
        count, self._looked_at = _read(self._counter), now
        if count is None:
            return
        if self._count is not None and count > self._count:
            self._struck_at = now
        self._count = count


def find_counter(proc: Path = Path("/proc/self")) -> Path | None:
    """Of the cgroup of this process, or of the nearest around it that counts."""
    for folder in upwards(own_cgroup("", proc)):
        if (folder / "memory.events").exists():
            return folder / "memory.events"
    here = own_cgroup("memory", proc)
    if here is not None and (here / "memory.oom_control").exists():
        return here / "memory.oom_control"
    return None


def warn_of_group_kill(proc: Path = Path("/proc/self")) -> None:
    """Where the kernel is set to kill a cgroup as a whole, the agent dies with its first worker."""
    for folder in upwards(own_cgroup("", proc)):
        try:
            as_a_whole = (folder / "memory.oom.group").read_text().strip() == "1"
        except OSError:
            continue
        if as_a_whole:
            log.warning(
                "when memory runs out, the kernel will kill this agent and the states in its memory together with the"
                " worker that is too large: memory.oom.group is 1 in %s. Kubernetes from 1.28 on: singleProcessOOMKill:"
                " true in the kubelet's configuration (1.32); systemd: OOMPolicy=continue in the unit",
                folder,
            )
            return


def _read(counter: Path | None) -> int | None:
    """None: there is no count now."""
    return read_rows(counter).get("oom_kill") if counter is not None else None
