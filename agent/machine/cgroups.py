"""Cgroups: the one that holds this agent's workers, and what the kernel has killed in them.

No process leaves a cgroup by forking, by a session of its own or by forgetting its environment: what a worker starts
can be found and killed for certain. Only version 2 can do that, and a cgroup has one owner alone, who marks
part of it as another program's to divide. *Delegated* is what systemd marks as such (`Delegate=yes`: an extended
attribute), or what belongs to this user while the cgroup around it does not: systemd before 251 hands over without
a mark that others than root can read. Being able to write is no sign: root can write everywhere.

Below the agent's own cgroup lies `elastic-agent-INCARNATION`, below that one for each generation; `workers` makes and
empties those, `guard` empties and removes all at the end. No controller is enabled here, so the agent may stay where
it is: the kernel's rule against processes beside child cgroups is about controllers. Without delegation nothing is
made, and what is left behind is found by marks, sessions and descent (`guard`).

A worker that the kernel's out-of-memory killer ends does so by SIGKILL, as one that a person kills. The kernel counts
its victims before it kills them, in `memory.events` of each cgroup, with all those below (version 2), or in
`memory.oom_control` (version 1).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ...worker.storage.memory.available_memory import own_cgroup, read_rows, upwards

log = logging.getLogger(__name__)

MARKS = ("user.delegate", "trusted.delegate")
"""The second is older, and only root can read it."""


def claim_cgroup(incarnation: str) -> Path | None:
    """The cgroup for all workers of this incarnation, made now; None where this agent may have none."""
    here = own_cgroup()
    if here is None or not is_delegated(here, os.geteuid()):
        return None
    ours = here / f"elastic-agent-{incarnation}"
    try:
        if not os.access(here / "cgroup.procs", os.W_OK):
            raise OSError(0, "its processes may not be moved")
        ours.mkdir()
        if (kind := (ours / "cgroup.type").read_text().strip()) != "domain":  # below a threaded one
            ours.rmdir()
            raise OSError(0, f"it is {kind}")
    except OSError as error:
        log.warning(
            "the cgroup %s is delegated to this agent, but cannot be used (%s); what workers leave behind is found"
            " by other means",
            here,
            error.strerror,
        )
        return None
    log.info("the workers of each generation are held in a cgroup below %s", ours)
    return ours


def is_delegated(cgroup: Path, uid: int) -> bool:
    """Whether its owner may divide it."""
    for mark in MARKS:
        try:
            if os.getxattr(cgroup, mark) == b"1":
                return True
        except OSError:
            pass
    return uid != 0 and cgroup.stat().st_uid == uid != cgroup.parent.stat().st_uid


# --- Out of memory

LATELY_S = 60.0
"""A process with much memory takes its time to end."""

LOOK_EVERY_S = 1.0


class OomKills:
    """Owned by one thread. Instants are seconds on the monotonic clock."""

    def __init__(self, counter: Path | None) -> None:
        """None: this kernel does not count."""
        self._counter = counter
        self._count = _kills(counter)
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
        count, self._looked_at = _kills(self._counter), now
        if count is None:
            return
        if self._count is not None and count > self._count:
            self._struck_at = now
        self._count = count


def find_counter(proc: Path = Path("/proc/self")) -> Path | None:
    """Of the cgroup of this process, or of the nearest around it that counts."""
    counters = [folder / "memory.events" for folder in upwards(own_cgroup("", proc))]
    if (here := own_cgroup("memory", proc)) is not None:
        counters.append(here / "memory.oom_control")
    return next(filter(Path.exists, counters), None)


def _kills(counter: Path | None) -> int | None:
    """None: there is no count now."""
    return read_rows(counter).get("oom_kill") if counter is not None else None
