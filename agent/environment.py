"""What every worker is told of its place: torchrun's contract in full, and what we add to it.

Pure functions, so that what a script will see can be read, tested and printed. Every name that torchrun sets is
set here with the same spelling and meaning, except that TORCHELASTIC_RESTART_COUNT is one number for the whole job
(generation - 1), the same on all nodes, where torchrun counts each agent's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..rendezvous.records import Member, World
from .variables import Variable

UNLIMITED_RESTARTS = 2**31 - 1
"""TORCHELASTIC_MAX_RESTARTS is read as a number; this one is never reached."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where one worker stands in its world, and the files that are its own."""

    world: World
    member: Member
    local_rank: int
    error_file: Path
    reports: Path
    commits: Path

    @property
    def rank(self) -> int:
        return self.member.first_rank + self.local_rank


def contract(place: WorkerPlace, *, agent_incarnation: str, max_restarts: int | None) -> tuple[Variable, ...]:
    """Where the worker stands and whom it meets: nobody may choose these but the agent."""
    world, member = place.world, place.member
    node_rank = str(world.members.index(member))
    restarts = UNLIMITED_RESTARTS if max_restarts is None else max_restarts
    torchrun = {
        "RANK": place.rank,
        "LOCAL_RANK": place.local_rank,
        "WORLD_SIZE": world.size,
        "LOCAL_WORLD_SIZE": member.slots,
        "NODE_RANK": node_rank,
        "GROUP_RANK": node_rank,
        "GROUP_WORLD_SIZE": len(world.members),
        "ROLE_NAME": "default",
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": world.size,
        "MASTER_ADDR": world.master.address,
        "MASTER_PORT": world.master.port,
        "TORCHELASTIC_RUN_ID": world.job,
        "TORCHELASTIC_RESTART_COUNT": world.generation - 1,
        "TORCHELASTIC_MAX_RESTARTS": restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": place.error_file,
    }
    ours = {
        "ELASTIC_AGENT_GENERATION": world.generation,
        "ELASTIC_AGENT_NODE": member.node,
        "ELASTIC_AGENT_LOCAL_RANK": place.local_rank,
        "ELASTIC_AGENT_INCARNATION": agent_incarnation,
        "ELASTIC_AGENT_REPORTS": place.reports,
        "ELASTIC_AGENT_COMMITS": place.commits,
    }
    return tuple(
        Variable(name, str(value), reason, yielding=False, by=room)
        for room, reason, group in (
            ("torchrun", "its contract: where a worker stands and whom it meets", torchrun),
            ("elastic-agent", "for the worker library", ours),
        )
        for name, value in group.items()
    )


def torch_settings(workers: int) -> tuple[Variable, ...]:
    """What torchrun, too, sets where the user has not."""
    threads = Variable("OMP_NUM_THREADS", "1", "a thread per core in each of several workers is too many")
    return (
        *((threads,) if workers > 1 else ()),
        Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "a collective that failed ends its process"),
    )
