"""The variables of a worker: its place, which is torchrun's contract in full, and settings of torch and NCCL.

Pure functions, so that what a script will see can be read, tested and printed. Every name that torchrun sets is
set here with the same spelling and meaning, except that TORCHELASTIC_RESTART_COUNT is one number for the whole job
(generation - 1), the same on all nodes, where torchrun counts each agent's own.

The settings of NCCL and torch where the user has set none are a table. A row's value may name *facts* in braces: it
holds only where these are known. docs/tuning.md shows the same rows. What costs speed, or has been seen to hang
(timing, desync debugging, stack traces from the watchdog's thread), is not switched on.

`Node` is this node as it was found at the start; from it and the rest follows the `WorkerSpec` of one worker. Nothing
is started here, and nothing written but the folder of a generation.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Formatter, Template

from ...rendezvous.records import Member, World
from ...worker.wire.environment import PROCESS_GROUP_TIMEOUT, WorkerEnv
from ..checkpoints.folder import MemoryFolder
from ..common.exits import NoTemporaryDirectory
from ..common.variables import Variable, compose
from ..configuration.config import Config, LogConfig
from ..configuration.stopping import HEARTBEAT_VARIABLE, TimeoutConfig, watchdog_s
from ..machine.devices import Software
from ..machine.inventory import Machine
from ..machine.network import Network, network_variables
from ..output.worker_logs import OutputRoute
from .processes.workers import WorkerSpec

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
    if memory is None:
        memory_address = ""
    return WorkerEnv(
        incarnation=incarnation,
        devices=config.devices_per_worker or 1,
        socket=str(run_dir / "socket"),
        reports=str(run_dir / "reports"),
        memory=str(memory.path) if memory is not None else "",
        memory_bytes=memory.limit if memory is not None else 0,
        writes=str(run_dir / "writes") if memory is not None else "",
        memory_server=str(run_dir / "memory") if memory_address else "",
        memory_address=memory_address,
        memory_replicas=min(config.memory_replicas, config.nodes.max - 1) if memory_address else 0,
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
    return (
        *torch_settings(machine.software, config.timeouts, place.member.slots, place.flight_records),
        *(network_variables(machine.network) if isinstance(machine.network, Network) else ()),
        *contract(place, config.max_restarts),
        *machine.placed[place.local_rank].variables,
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
        Variable(name, str(value), reason, yielding=False, by=source)
        for source, reason, group in (
            ("torchrun", "its contract: where a worker stands and whom it meets", torchrun),
            ("elastic-agent", "for the worker library", ours),
        )
        for name, value in group.items()
    )


ALWAYS = (
    Variable("OMP_NUM_THREADS", "{threads}", "a thread per core in each of several workers is too many"),
    Variable("PYTHONUNBUFFERED", "1", "a killed worker's last words are not lost in a buffer"),
    Variable("PYTHONFAULTHANDLER", "1", "a worker that dies by a signal says where it was"),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "3",
        "a failed collective ends its process; torchrun's 1 also tries to abort the communicator, which can hang",
        aliases=("NCCL_ASYNC_ERROR_HANDLING",),
    ),
    Variable(
        PROCESS_GROUP_TIMEOUT,
        "{process_group_timeout}",
        "applied by elastic_agent.worker.init_process_group",
        yielding=False,
    ),
)
OF_NCCL = (
    Variable("NCCL_DEBUG", "WARN", "NCCL says which call failed, and nothing else"),
    Variable(
        "TORCH_FR_BUFFER_SIZE",
        "2000",
        "the flight recorder keeps the last collectives of each rank",
        aliases=("TORCH_NCCL_TRACE_BUFFER_SIZE",),
    ),
    Variable(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "1",
        "the flight recorder writes that down when a collective does not end",
    ),
    Variable(
        "TORCH_FR_DUMP_TEMP_FILE",
        "{flight_records}/rank_",
        "below --log-dir, a folder for each generation; without --log-dir torch's own place is kept",
        aliases=("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
    ),
    Variable(
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
        "{flight_records}/pipe_",
        "through it the agent asks for the flight recorder's dump when workers seem to hang",
    ),
    Variable(
        "TORCH_INCLUDE_STACK_TRACE",
        "0",
        "to collect stacks a dump waits for Python's lock, which a hung process may never release",
    ),
    Variable(
        HEARTBEAT_VARIABLE,
        "{heartbeat}",
        "1.5 times the process-group timeout, so that it does not end a process before that has named the collective",
    ),
)
"""They are nothing to a build of torch for CPUs."""


def torch_settings(
    software: Software, timeouts: TimeoutConfig, workers: int = 1, flight_records: Path | None = None
) -> tuple[Variable, ...]:
    """The rows that hold. `flight_records`: where the dumps of this generation belong; None: nowhere that they would be
    found."""
    group_s = timeouts.process_group_s
    facts = {
        "threads": "1" if workers > 1 else "",
        "flight_records": str(flight_records or ""),
        "process_group_timeout": f"{group_s:g}" if group_s is not None else "",
        "heartbeat": str(watchdog_s(group_s)) if group_s is not None else "",
    }
    known = {name: value for name, value in facts.items() if value}
    return tuple(
        replace(row, value=row.value.format(**known), by="default")
        for row in (*ALWAYS, *(OF_NCCL if software.has_nccl else ()))
        if all(name in known for _, name, _, _ in Formatter().parse(row.value) if name is not None)
    )


@dataclass(frozen=True, slots=True)
class Node:
    """This node as found at the start: it does not change while the agent lives."""

    name: str
    incarnation: str
    machine: Machine
    run_dir: Path
    env: WorkerEnv
    """What every worker here is given."""
    environment: Mapping[str, str]
    """What the workers inherit: the agent's own, as it was before the agent changed anything for itself."""
    hostname: str = field(default_factory=socket.gethostname)


def worker_spec(config: Config, node: Node, place: WorkerPlace) -> WorkerSpec:
    """The worker at this place, which is on this node."""
    member, local_rank = place.member, place.local_rank
    chosen = chosen_variables(config, node.machine, place)
    words = {
        "role_name": member.role,
        "rank": place.rank,
        "local_rank": local_rank,
        "hostname": node.hostname,
        "node": node.name,
        "generation": place.world.generation,
    }
    return WorkerSpec(
        place.rank,
        local_rank,
        compose(node.environment, chosen),
        node.machine.placed[local_rank].cpus,
        output_routes(config.logs, local_rank, words),
    )


def output_routes(
    logs: LogConfig, local_rank: int, words: Mapping[str, object]
) -> tuple[OutputRoute, OutputRoute]:
    """Of stdout and stderr, by torchrun's rules for `--redirects`, `--tee` and `--local-ranks-filter`.

    A stream that neither of the first two names is on the console alone, as soon as one of them is given. What goes to
    a file and to the console is *tee'd*: of such lines `--duplicate-stdout-filters` makes copies. `words` are those
    that the template of the prefix may have.
    """
    prefix = Template(logs.prefix_template).safe_substitute(words)
    redirects = logs.redirects.of(local_rank) if logs.redirects is not None else 0
    tee = logs.tee.of(local_rank) if logs.tee is not None else 0
    chosen = logs.redirects is not None or logs.tee is not None
    files = logs.directory is not None
    seen = logs.local_ranks is None or local_rank in logs.local_ranks

    def route(stream: int, filters: tuple[str, ...]) -> OutputRoute:
        file = files and (not chosen or bool((redirects | tee) & stream))
        console = seen and (not files or bool(tee & stream) or not redirects & stream)
        return OutputRoute(prefix, file, console, filters if file and console else ())

    return route(1, logs.stdout_filters), route(2, logs.stderr_filters)


def make_directory(node: Node, generation: int) -> None:
    """For files of the workers of one generation, in place of that of the one before. Raises OSError; also where the
    agent's own folder is gone: in a new one, workers could neither ask whether to commit a save nor report."""
    if not os.path.exists(node.env.socket):
        raise NoTemporaryDirectory(
            f"the agent's folder {node.run_dir} was removed, or the sockets in it, at which workers reach this agent: "
            "start it again, and let nothing clean that folder, or name another one in TMPDIR"
        )
    for folder in node.run_dir.glob("gen*"):
        shutil.rmtree(folder, ignore_errors=True)
    (node.run_dir / f"gen{generation}").mkdir()


def error_file(node: Node, generation: int, local_rank: int) -> Path:
    """Where torch writes why the worker failed, in the form that torchrun reads."""
    return node.run_dir / f"gen{generation}" / f"error-{local_rank}.json"
