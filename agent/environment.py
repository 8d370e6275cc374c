"""The environment of one worker: torchrun's contract in full, and what we add to it.

A pure function, so that what a script will see can be read, tested and printed. Every name that torchrun sets is
set here with the same spelling and meaning, except that TORCHELASTIC_RESTART_COUNT is one number for the whole job
(generation - 1), the same on all nodes, where torchrun counts each agent's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..rendezvous.records import Member, World

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


def worker_environment(
    base: Mapping[str, str], place: WorkerPlace, *, agent_incarnation: str, max_restarts: int | None
) -> dict[str, str]:
    """`base` is the agent's own environment: inherited, and stronger where a setting is the user's to choose."""
    world, member = place.world, place.member
    node_rank = world.members.index(member)
    env = dict(base)
    if member.slots > 1:
        # As torchrun does: a node full of workers with a thread per core each would trample on itself.
        env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.local_rank),
        WORLD_SIZE=str(world.size),
        LOCAL_WORLD_SIZE=str(member.slots),
        NODE_RANK=str(node_rank),
        GROUP_RANK=str(node_rank),
        GROUP_WORLD_SIZE=str(len(world.members)),
        ROLE_NAME="default",
        ROLE_RANK=str(place.rank),
        ROLE_WORLD_SIZE=str(world.size),
        MASTER_ADDR=world.master.address,
        MASTER_PORT=str(world.master.port),
        TORCHELASTIC_RUN_ID=world.job,
        TORCHELASTIC_RESTART_COUNT=str(world.generation - 1),
        TORCHELASTIC_MAX_RESTARTS=str(UNLIMITED_RESTARTS if max_restarts is None else max_restarts),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_ERROR_FILE=str(place.error_file),
        ELASTIC_AGENT_GENERATION=str(world.generation),
        ELASTIC_AGENT_NODE=member.node,
        ELASTIC_AGENT_LOCAL_RANK=str(place.local_rank),
        ELASTIC_AGENT_INCARNATION=agent_incarnation,
        ELASTIC_AGENT_REPORTS=str(place.reports),
        ELASTIC_AGENT_COMMITS=str(place.commits),
    )
    return env
