"""The checks of one node: for each the function that finds, what it is needed for, and how long it may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .finding import Finding, NodeNeeds, Outcome
from .gpus import GPU_CHECKS, check_gpus, check_xids
from .machine import (
    SLOW_NAMES_ADVICE,
    WRONG_ADVICE,
    check_arithmetic,
    check_interface,
    check_locked_memory,
    check_log_directory,
    check_names,
    check_open_files,
    check_shared_memory,
)

NVML_S = 10.0
"""Without persistence mode the driver loads for each GPU in turn, a second or so each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """One process, and what it may find."""

    name: str
    """Also of the finding where there is no other."""
    find: Callable[[NodeNeeds], Finding | tuple[Finding, ...]]
    """In a process of its own."""
    needed: Callable[[NodeNeeds], object] = lambda needs: True
    """Whether this job needs it at all."""
    limit_s: float = 5.0
    without_answer: Outcome = Outcome.FAIL
    """The outcome when it does not answer or dies."""
    advice: str = ""
    """What to do then."""
    names: tuple[str, ...] = ()
    """Of its findings; empty: only its own."""


NODE_CHECKS = (
    NodeCheck(
        name="gpu-visible",
        find=check_gpus,
        needed=lambda needs: needs.gpus,
        limit_s=NVML_S,
        advice="the driver hangs: look at dmesg for an Xid, and reboot this machine",
        names=GPU_CHECKS,
    ),
    NodeCheck(
        name="gpu-xid",
        find=check_xids,
        needed=lambda needs: needs.gpus,
        without_answer=Outcome.UNKNOWN,
    ),
    NodeCheck(
        name="shared-memory",
        find=check_shared_memory,
        advice="look at dmesg, and whether memory is short (free -h)",
    ),
    NodeCheck(
        name="log-directory",
        find=check_log_directory,
        needed=lambda needs: needs.log_directory,
        advice="its disk or file server does not answer: look at dmesg, unmount it, or choose another --log-dir",
    ),
    NodeCheck(name="open-files", find=check_open_files, without_answer=Outcome.UNKNOWN),
    NodeCheck(
        name="locked-memory",
        find=check_locked_memory,
        needed=lambda needs: needs.rdma,
        without_answer=Outcome.UNKNOWN,
    ),
    NodeCheck(
        name="name-resolution",
        find=check_names,
        without_answer=Outcome.WARN,
        advice=SLOW_NAMES_ADVICE,
    ),
    NodeCheck(
        name="interface",
        find=check_interface,
        needed=lambda needs: needs.interface,
        without_answer=Outcome.WARN,
        advice="the kernel does not show the interface: look at dmesg for its driver",
    ),
)

RECHECKS = (NodeCheck(name="arithmetic", find=check_arithmetic, limit_s=90.0, advice=WRONG_ADVICE),)
"""Checks of an excluded node before it is readmitted, in addition to those before a join. They take longer."""

BY_NAME = {check.name: check for check in (*NODE_CHECKS, *RECHECKS)}

AT_JOIN = tuple(name for check in NODE_CHECKS for name in check.names or (check.name,))
"""The findings of those before a join."""


def checks_for(needs: NodeNeeds) -> tuple[NodeCheck, ...]:
    """Those that this job needs."""
    return tuple(check for check in NODE_CHECKS if check.needed(needs))
