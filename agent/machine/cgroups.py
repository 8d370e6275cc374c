"""Cgroups for the workers: whether this agent may make its own, and the one that holds them all.

No process leaves a cgroup by forking, by a session of its own or by forgetting its environment: what a worker starts
can be found and killed for certain. Only version 2 can do that, and a cgroup has one owner alone, who marks
part of it as another program's to divide. *Delegated* is what systemd marks as such (`Delegate=yes`: an extended
attribute), or what belongs to this user while the cgroup around it does not: systemd before 251 hands over without
a mark that others than root can read. Being able to write is no sign: root can write everywhere.

Below the agent's own cgroup lies `elastic-agent-INCARNATION`, below that one for each generation; `workers` makes and
empties those, `guard` empties and removes all at the end. No controller is enabled here, so the agent may stay where
it is: the kernel's rule against processes beside child cgroups is about controllers.

Without delegation nothing is made, and what is left behind is found by marks, sessions and descent (`guard`).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ...worker.storage.memory.available_memory import own_cgroup

log = logging.getLogger(__name__)

MARKS = ("user.delegate", "trusted.delegate")
"""The second is older, and only root can read it."""


def claim_cgroup(incarnation: str) -> Path | None:
    """The cgroup for all workers of this incarnation, made now; None where this agent may have none."""
    here = own_cgroup()
    if here is None or not is_delegated(here, os.geteuid()):
        return None
    ours = here / f"elastic-agent-{incarnation}"
    problem = _make(ours)
    if problem:
        log.warning(
            "the cgroup %s is delegated to this agent, but cannot be used (%s); what workers leave behind is found"
            " by other means",
            here,
            problem,
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


def _make(cgroup: Path) -> str:
    """Why workers cannot be put there; empty, and the cgroup is made, if they can."""
    try:
        cgroup.mkdir()
    except OSError as error:
        return f"{cgroup}: {error.strerror}"
    if (kind := (cgroup / "cgroup.type").read_text().strip()) != "domain":
        problem = f"it is {kind}"  # below a threaded one
    elif not os.access(cgroup.parent / "cgroup.procs", os.W_OK):
        problem = "its processes may not be moved"
    else:
        return ""
    cgroup.rmdir()
    return problem
