"""The place of a worker, in its variables: torchrun's contract in full, and what we add to it.

Pure functions, so that what a script will see can be read, tested and printed. Every name that torchrun sets is
set here with the same spelling and meaning, except that TORCHELASTIC_RESTART_COUNT is one number for the whole job
(generation - 1), the same on all nodes, where torchrun counts each agent's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ....rendezvous.records import Member, World
from ....worker.wire.environment import WorkerEnv
from ...checkpoints.folder import MemoryFolder
from ...common.variables import Variable
from ...configuration.config import Config
from ...machine.inventory import Machine
from ...machine.network.choice import network_variables
from ...machine.network.discovery import Network
from .torch_settings import Facts, torch_settings

USES_AGENT_STORE = 1
"""Rank 0's torch hosts each store that its script asks for, and MASTER_PORT's is the agent's all the same.

torchrun writes "True", and up to 2.13 torch's Python code takes that to mean that the agent hosts *every* store:
`tcp://` at another port, or a MASTER_PORT of the script's own, and all ranks wait for a server that is not there. With
another word for true rank 0 tries to host, and where the agent already does, at MASTER_PORT, torch's C++ code, which
knows this word, too, makes it a client: after a line that `bind_of_rank_0_failed` has.
"""

UNLIMITED_RESTARTS = 2**31 - 1
"""TORCHELASTIC_MAX_RESTARTS is read as a number; this one is never reached."""


def bind_of_rank_0_failed(master_port: int) -> bytes:
    """What torch writes, in rank 0's stderr, of the store that the agent hosts. It is no error, and looks like one."""
    what = f"The server socket on {master_port} has failed to bind."
    return f"{what} TORCHELASTIC_USE_AGENT_STORE is enabled so ignoring the error.".encode()


def worker_env(
    incarnation: str,
    run_dir: Path,
    memory: MemoryFolder | None,
    config: Config,
    memory_address: str = "",
) -> WorkerEnv:
    """What all workers of this agent are given; `run_dir` has the sockets at which it answers them.

    `memory_address` is the memory server's, HOST:PORT; empty: there is none.
    """
    env = WorkerEnv(
        incarnation=incarnation,
        devices=config.devices_per_worker,
        socket=str(run_dir / "socket"),
        reports=str(run_dir / "reports"),
    )
    if memory is None:
        return env
    env = replace(env, memory=str(memory.path), memory_bytes=memory.limit, writes=str(run_dir / "writes"))
    if not memory_address:
        return env
    return replace(
        env,
        memory_server=str(run_dir / "memory"),
        memory_address=memory_address,
        memory_replicas=min(config.memory_replicas, config.nodes.max - 1),
        failure_domain=config.failure_domain or "",
    )


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where one worker stands in its world, and the files that are its own."""

    world: World
    member: Member
    local_rank: int
    error_file: Path
    env: WorkerEnv
    """What it is given whatever its world: `contract` adds its place."""
    flight_records: Path | None = None
    """Where torch's flight recorder writes what it knows of this generation's collectives."""

    @property
    def rank(self) -> int:
        return self.member.first_rank + self.local_rank


def chosen_variables(config: Config, machine: Machine, place: WorkerPlace) -> tuple[Variable, ...]:
    """All variables of one worker that the user has not set; of two with one name the later counts."""
    facts = Facts(
        machine.software,
        machine.profile,
        config.timeouts,
        workers=place.member.slots,
        flight_records=place.flight_records,
    )
    return (
        *torch_settings(facts),
        *(network_variables(machine.network.choice) if isinstance(machine.network, Network) else ()),
        *contract(place, config.max_restarts),
        *machine.variables(place.local_rank),
    )


def contract(place: WorkerPlace, max_restarts: int | None) -> tuple[Variable, ...]:
    """Where the worker stands and whom it meets: only the agent chooses these."""
    world, member = place.world, place.member
    node_rank = str(world.members.index(member))
    limit = world.max_restarts(max_restarts)
    restarts = UNLIMITED_RESTARTS if limit is None else limit
    role = world.in_role(member.role)
    torchrun = {
        "RANK": place.rank,
        "LOCAL_RANK": place.local_rank,
        "WORLD_SIZE": world.size,
        "LOCAL_WORLD_SIZE": member.slots,
        "NODE_RANK": node_rank,
        "GROUP_RANK": node_rank,
        "GROUP_WORLD_SIZE": len(world.members),
        "ROLE_NAME": member.role,
        "ROLE_RANK": sum(each.slots for each in role[: role.index(member)]) + place.local_rank,
        "ROLE_WORLD_SIZE": sum(each.slots for each in role),
        "MASTER_ADDR": world.master.address,
        "MASTER_PORT": world.master.port,
        "TORCHELASTIC_RUN_ID": world.job,
        "TORCHELASTIC_RESTART_COUNT": world.generation - 1,
        "TORCHELASTIC_MAX_RESTARTS": restarts,
        "TORCHELASTIC_USE_AGENT_STORE": USES_AGENT_STORE,
        "TORCHELASTIC_ERROR_FILE": place.error_file,
    }
    bad = world.restarts.bad_state
    ours = replace(
        place.env,
        generation=world.generation,
        run=world.run,
        node=member.node,
        local_rank=place.local_rank,
        master_port=world.master.port,
        memory_standbys=" ".join(f"{one.node}={one.memory}" for one in world.standbys),
        bad_state=f"{bad.generation}:{bad.step}" if bad is not None else "",
    ).variables()
    return tuple(
        Variable(name, str(value), reason, yielding=False, by=room)
        for room, reason, group in (
            ("torchrun", "its contract: where a worker stands and whom it meets", torchrun),
            ("elastic-agent", "for the worker library", ours),
        )
        for name, value in group.items()
    )
