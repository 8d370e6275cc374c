"""The checks of one node: for each the function that finds, what it is needed for, and how long it may take.

Each runs in a process of its own (`runner`): it may hang, crash or raise, and that is a finding, too. What a job needs
of this node, as far as checks look at it, is frozen and sent to that process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .finding import Finding, NodeNeeds, Outcome
from .gpus import GPU_CHECKS, check_gpus, check_xids
from .machine import (
    SILENT_ADVICE,
    SLOW_NAMES_ADVICE,
    WRONG_ADVICE,
    check_arithmetic,
    check_directory,
    check_interface,
    check_limits,
    check_names,
    check_peers,
    check_shared_memory,
)

CHECKPOINT_OPTION, LOG_OPTION = "--check-directory", "--log-dir"

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
    on_probe_failure: Outcome = Outcome.FAIL
    """The outcome when it does not answer or dies."""
    advice: str = ""
    """What to do then; not shown for an unknown outcome."""
    subject: Callable[[NodeNeeds], str] = lambda needs: ""
    """What is looked at, where the check's name does not say it."""
    findings: tuple[str, ...] = ()
    """The names of its findings; empty: only its own."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.findings or (self.name,)


def _directory_advice(option: str) -> str:
    return f"its disk or file server does not answer: look at dmesg, unmount it, or name another one with {option}"


NODE_CHECKS = (
    NodeCheck(
        name="gpu-visible",
        find=check_gpus,
        needed=lambda needs: needs.gpus,
        limit_s=NVML_S,
        advice="the driver hangs: look at dmesg for an Xid, and reboot this machine",
        subject=lambda needs: "NVML",
        findings=GPU_CHECKS,
    ),
    NodeCheck(
        name="gpu-xid",
        find=check_xids,
        needed=lambda needs: needs.gpus,
        on_probe_failure=Outcome.UNKNOWN,
    ),
    NodeCheck(
        name="shared-memory",
        find=check_shared_memory,
        advice="look at dmesg, and whether memory is short (free -h)",
    ),
    NodeCheck(
        name="checkpoint-directory",
        find=lambda needs: check_directory(
            "checkpoint-directory", needs.checkpoint_directory, CHECKPOINT_OPTION
        ),
        needed=lambda needs: needs.checkpoint_directory,
        advice=_directory_advice(CHECKPOINT_OPTION),
        subject=lambda needs: needs.checkpoint_directory,
    ),
    NodeCheck(
        name="log-directory",
        find=lambda needs: check_directory("log-directory", needs.log_directory, LOG_OPTION),
        needed=lambda needs: needs.log_directory,
        advice=_directory_advice(LOG_OPTION),
        subject=lambda needs: needs.log_directory,
    ),
    NodeCheck(
        name="open-files",
        find=check_limits,
        on_probe_failure=Outcome.UNKNOWN,
        findings=("open-files", "locked-memory"),
    ),
    NodeCheck(
        name="name-resolution",
        find=check_names,
        on_probe_failure=Outcome.WARN,
        advice=SLOW_NAMES_ADVICE,
    ),
    NodeCheck(
        name="interface",
        find=check_interface,
        needed=lambda needs: needs.interface,
        on_probe_failure=Outcome.WARN,
        advice="the kernel does not show the interface: look at dmesg for its driver",
        subject=lambda needs: needs.interface,
    ),
)

RECHECKS = (
    NodeCheck(
        name="arithmetic",
        find=check_arithmetic,
        limit_s=90.0,
        advice=WRONG_ADVICE,
    ),
    NodeCheck(
        name="peers",
        find=check_peers,
        needed=lambda needs: needs.peers,
        limit_s=20.0,
        advice=SILENT_ADVICE,
    ),
)
"""Checks of an excluded node before it is readmitted, in addition to those before a join. They take longer."""

BY_NAME = {check.name: check for check in (*NODE_CHECKS, *RECHECKS)}

AT_JOIN = tuple(name for check in NODE_CHECKS for name in check.names)
"""The findings of those before a join."""


def checks_for(needs: NodeNeeds) -> tuple[NodeCheck, ...]:
    """Those that this job needs."""
    return tuple(check for check in NODE_CHECKS if check.needed(needs))


def rechecks_for(needs: NodeNeeds) -> tuple[NodeCheck, ...]:
    """All checks of an excluded node before it is readmitted."""
    return checks_for(needs) + tuple(check for check in RECHECKS if check.needed(needs))
