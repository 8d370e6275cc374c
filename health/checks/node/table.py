"""The checks of one node: for each its probe, the rule that judges what the probe finds, and how long it may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..finding import Finding, Outcome
from ..needs import NodeNeeds
from ..probes.arithmetic import probe_arithmetic
from ..probes.directories import probe_directory
from ..probes.gpus import probe_nvml, probe_xids
from ..probes.machine import probe_limits, probe_shared_memory
from ..probes.network import probe_interface, probe_names, probe_ports
from ..probes.peers import probe_peers
from ..rules.directories import DirectoryFacts, judge_directory
from ..rules.gpus import GPU_CHECKS, NvmlFacts, XidFacts, judge_nvml, judge_xids
from ..rules.machine import LimitFacts, SharedMemoryFacts, judge_limits, judge_shared_memory
from ..rules.network import (
    SLOW_NAMES_ADVICE,
    InterfaceFacts,
    NameFacts,
    PortFacts,
    judge_interface,
    judge_names,
    judge_ports,
)
from ..rules.recheck import (
    SILENT_ADVICE,
    WRONG_ADVICE,
    ArithmeticFacts,
    PeerFacts,
    judge_arithmetic,
    judge_peers,
)

CHECKPOINT_OPTION, LOG_OPTION = "--check-directory", "--log-dir"

NVML_S = 10.0
"""Without persistence mode the driver loads for each GPU in turn, a second or so each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """One process: it probes, and findings follow."""

    name: str
    """Of the probe, and of the finding where there is no other."""
    facts: type
    probe: Callable[[NodeNeeds], Any]
    """In a process of its own. It may hang, crash or raise."""
    judge: Callable[[Any, NodeNeeds], Finding | tuple[Finding, ...]]
    needed: Callable[[NodeNeeds], object] = lambda needs: True
    """Whether this job needs it at all."""
    limit_s: float = 5.0
    on_probe_failure: Outcome = Outcome.FAIL
    """The outcome when the probe does not answer or dies."""
    advice: str = ""
    """What to do then; not shown for an unknown outcome."""
    subject: Callable[[NodeNeeds], str] = lambda needs: ""
    """What is looked at, where the check's name does not say it."""
    findings: tuple[str, ...] = ()
    """The names of its findings; empty: only its own."""
    at_join: bool = True
    """Also before a join."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.findings or (self.name,)


def _directory_advice(option: str) -> str:
    return f"its disk or file server does not answer: look at dmesg, unmount it, or name another one with {option}"


NODE_CHECKS = (
    NodeCheck(
        name="gpu-visible",
        facts=NvmlFacts,
        probe=probe_nvml,
        judge=judge_nvml,
        needed=lambda needs: needs.gpus,
        limit_s=NVML_S,
        advice="the driver hangs: look at dmesg for an Xid, and reboot this machine",
        subject=lambda needs: "NVML",
        findings=GPU_CHECKS,
    ),
    NodeCheck(
        name="gpu-xid",
        facts=XidFacts,
        probe=lambda needs: probe_xids(),
        judge=judge_xids,
        needed=lambda needs: needs.gpus,
        on_probe_failure=Outcome.UNKNOWN,
    ),
    NodeCheck(
        name="shared-memory",
        facts=SharedMemoryFacts,
        probe=lambda needs: probe_shared_memory(),
        judge=judge_shared_memory,
        advice="look at dmesg, and whether memory is short (free -h)",
    ),
    NodeCheck(
        name="checkpoint-directory",
        facts=DirectoryFacts,
        probe=lambda needs: probe_directory(needs.checkpoint_directory),
        judge=lambda facts, needs: judge_directory(
            "checkpoint-directory", needs.checkpoint_directory, CHECKPOINT_OPTION, facts
        ),
        needed=lambda needs: needs.checkpoint_directory,
        advice=_directory_advice(CHECKPOINT_OPTION),
        subject=lambda needs: needs.checkpoint_directory,
    ),
    NodeCheck(
        name="log-directory",
        facts=DirectoryFacts,
        probe=lambda needs: probe_directory(needs.log_directory),
        judge=lambda facts, needs: judge_directory("log-directory", needs.log_directory, LOG_OPTION, facts),
        needed=lambda needs: needs.log_directory,
        advice=_directory_advice(LOG_OPTION),
        subject=lambda needs: needs.log_directory,
    ),
    NodeCheck(
        name="open-files",
        facts=LimitFacts,
        probe=lambda needs: probe_limits(),
        judge=judge_limits,
        on_probe_failure=Outcome.UNKNOWN,
        findings=("open-files", "locked-memory", "connection-queue"),
    ),
    NodeCheck(
        name="name-resolution",
        facts=NameFacts,
        probe=probe_names,
        judge=judge_names,
        on_probe_failure=Outcome.WARN,
        advice=SLOW_NAMES_ADVICE,
    ),
    NodeCheck(
        name="interface",
        facts=InterfaceFacts,
        probe=probe_interface,
        judge=judge_interface,
        needed=lambda needs: needs.interface,
        on_probe_failure=Outcome.WARN,
        advice="the kernel does not show the interface: look at dmesg for its driver",
        subject=lambda needs: needs.interface,
    ),
    NodeCheck(
        name="port-range",
        facts=PortFacts,
        probe=probe_ports,
        judge=judge_ports,
        needed=lambda needs: needs.ports is not None,
        on_probe_failure=Outcome.UNKNOWN,
        at_join=False,  # the agent has bound its ports by then, and binds no more of them meanwhile
    ),
)

RECHECKS = (
    NodeCheck(
        name="arithmetic",
        facts=ArithmeticFacts,
        probe=lambda needs: probe_arithmetic(),
        judge=judge_arithmetic,
        limit_s=90.0,
        advice=WRONG_ADVICE,
        at_join=False,
    ),
    NodeCheck(
        name="peers",
        facts=PeerFacts,
        probe=lambda needs: probe_peers(needs.peers),
        judge=judge_peers,
        needed=lambda needs: needs.peers,
        limit_s=20.0,
        advice=SILENT_ADVICE,
        at_join=False,
    ),
)
"""Checks of an excluded node before it is readmitted, in addition to those before a join. They take longer."""

BY_NAME = {check.name: check for check in (*NODE_CHECKS, *RECHECKS)}

AT_JOIN = tuple(name for check in NODE_CHECKS if check.at_join for name in check.names)
"""The findings of those before a join."""


def checks_for(needs: NodeNeeds, *, at_join: bool) -> tuple[NodeCheck, ...]:
    """Those that this job needs. `at_join`: the fast ones that are worth it before each join."""
    return tuple(check for check in NODE_CHECKS if check.needed(needs) and (check.at_join or not at_join))


def rechecks_for(needs: NodeNeeds) -> tuple[NodeCheck, ...]:
    """All checks of an excluded node before it is readmitted."""
    return checks_for(needs, at_join=True) + tuple(check for check in RECHECKS if check.needed(needs))
