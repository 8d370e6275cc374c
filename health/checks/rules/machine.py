"""What the kernel gives to processes here: shared memory, descriptors, locked memory, the queue of connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ....codec import Checked, Count, Text
from ..finding import Finding, Outcome
from ..needs import NodeNeeds
from ..text import MIB, size

SHARED_MEMORY = "/dev/shm"
MEMORY = ("tmpfs", "ramfs", "devtmpfs", "")
"""File systems in memory; the last one could not be found out."""
DOCKERS_DEFAULT = 64 * MIB
LEAST_FREE = 16 * MIB
LEAST_LOCKED = 64 * MIB
"""Less is a default of systemd or Docker, which NCCL's buffers do not fit into."""

PER_WORKER = 64
"""Descriptors that a worker with data loaders has open, about."""
OF_THE_AGENT = 128
MORE_SHARED = (
    "make it larger (Docker: --shm-size, the chart: sharedMemory, else mount -o remount,size=8G /dev/shm)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemoryFacts(Checked):
    problem: Annotated[str, Text(1024)] = ""
    """Why a file cannot be made there; empty where it can."""
    file_system: Annotated[str, Text(128)] = ""
    total_bytes: Count = 0
    """0: it has no limit of its own."""
    free_bytes: Count = 0


def judge_shared_memory(facts: SharedMemoryFacts, needs: NodeNeeds) -> Finding:
    """NCCL and data loaders use what the copies of the state leave."""
    values: dict[str, float] = {"total_bytes": facts.total_bytes, "free_bytes": facts.free_bytes}

    def found(outcome: Outcome, summary: str, advice: str = "") -> Finding:
        return Finding("shared-memory", outcome, f"{SHARED_MEMORY}: {summary}", advice, values)

    room = f"{size(facts.free_bytes)} free of {size(facts.total_bytes)}"
    if facts.problem:
        return found(
            Outcome.FAIL, facts.problem, f"mount a tmpfs at {SHARED_MEMORY} that this user may write to"
        )
    if facts.file_system not in MEMORY:
        return found(
            Outcome.FAIL,
            f"a file system of type {facts.file_system}, and not memory",
            f"mount a tmpfs there (mount -t tmpfs -o size=8G tmpfs {SHARED_MEMORY}): NCCL, data loaders and copies in"
            " memory would write to a disk",
        )
    if facts.total_bytes == 0:
        return found(Outcome.OK, f"{facts.file_system} without a limit")
    if facts.free_bytes < LEAST_FREE:
        return found(
            Outcome.FAIL, f"only {room}", f"delete what ended processes have left there, or {MORE_SHARED}"
        )
    if facts.total_bytes <= DOCKERS_DEFAULT:
        return found(
            Outcome.WARN,
            f"{room}, a container's default",
            f"data loaders and NCCL end with 'Bus error' or 'No space left on device': {MORE_SHARED}",
        )
    if needs.copies_bytes > facts.free_bytes:
        return found(
            Outcome.WARN,
            f"{room}, and copies of the state may take {size(needs.copies_bytes)}",
            f"delete what ended processes have left there, lower --memory-checkpoints, or {MORE_SHARED}",
        )
    return found(Outcome.OK, room)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitFacts(Checked):
    """Soft and hard limits; None: unlimited."""

    open_files: tuple[Count | None, Count | None]
    locked_bytes: tuple[Count | None, Count | None]
    locks_freely: bool = False
    """The limit of locked memory does not bind this user (CAP_IPC_LOCK)."""
    somaxconn: Count | None
    """None: the kernel does not show it."""


def judge_limits(facts: LimitFacts, needs: NodeNeeds) -> tuple[Finding, ...]:
    return _open_files(facts, needs), _locked(facts, needs), _queue(facts, needs)


def _open_files(facts: LimitFacts, needs: NodeNeeds) -> Finding:
    """A node's processes each have the limit for themselves; the store of the workers has a connection of each rank."""
    soft, hard = facts.open_files
    needed = max(OF_THE_AGENT + needs.ranks, PER_WORKER)
    values = {"soft": -1.0 if soft is None else soft, "needed": needed}
    shown = "no limit" if soft is None else f"{soft} descriptors for each process"
    if soft is None or soft >= needed:
        return Finding("open-files", Outcome.OK, shown, values=values)
    enough = hard is None or hard >= needed
    how = f"ulimit -n {needed} before the agent" if enough else f"LimitNOFILE={needed} or limits.conf"
    advice = f"raise it: {how} (systemd: LimitNOFILE, Docker: --ulimit nofile)"
    return Finding(
        "open-files", Outcome.FAIL, f"{shown}, and {needs.ranks} ranks need {needed}", advice, values
    )


def _locked(facts: LimitFacts, needs: NodeNeeds) -> Finding:
    """InfiniBand registers memory, which locks it."""
    soft, _ = facts.locked_bytes
    values = {"soft_bytes": -1.0 if soft is None else soft}
    shown = "no limit" if soft is None else f"{size(soft)} of locked memory for each process"
    if not needs.rdma:
        return Finding("locked-memory", Outcome.OK, f"{shown}; not needed without RDMA", values=values)
    if facts.locks_freely:
        return Finding("locked-memory", Outcome.OK, f"{shown}, lifted by CAP_IPC_LOCK", values=values)
    if soft is not None and soft < LEAST_LOCKED:
        advice = (
            "NCCL cannot register its buffers for RDMA: set it to unlimited (ulimit -l unlimited; systemd:"
            " LimitMEMLOCK=infinity, Docker: --ulimit memlock=-1, Slurm: PropagateResourceLimitsExcept=MEMLOCK)"
        )
        return Finding("locked-memory", Outcome.FAIL, shown, advice, values)
    return Finding("locked-memory", Outcome.OK, shown, values=values)


def _queue(facts: LimitFacts, needs: NodeNeeds) -> Finding:
    """All ranks connect to one store in one moment."""
    if facts.somaxconn is None:
        return Finding("connection-queue", Outcome.UNKNOWN, "net.core.somaxconn cannot be read here")
    values: dict[str, float] = {"somaxconn": facts.somaxconn}
    shown = f"net.core.somaxconn is {facts.somaxconn}"
    if facts.somaxconn < needs.ranks:
        advice = "connections are dropped, and tried again seconds later: sysctl -w net.core.somaxconn=4096"
        return Finding(
            "connection-queue",
            Outcome.WARN,
            f"{shown}, and {needs.ranks} ranks connect at once",
            advice,
            values,
        )
    return Finding("connection-queue", Outcome.OK, shown, values=values)
