"""What the agent was told to do: one frozen `Config`, complete and checked before anything starts.

This file is only the data. `options` says what may be written, `kinds` how each text becomes a value, `layers` reads
the file, the environment and the command line, and `resolve` decides who wins and checks the whole. Whoever holds a
`Config` that came from there may rely on it: every number is in range, and their relations hold. Durations are
seconds; `None` has the meaning written beside the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..exits import ExitCode
from ..ports import PortRange

Affinity = Literal["none", "numa", "cores"]
Backend = Literal["c10d", "etcd", "memory"]
CommandKind = Literal["script", "module", "binary"]
DevicePinning = Literal["index", "mask", "none"]
NetworkProfile = Literal["auto", "ethernet", "infiniband", "roce", "efa", "debug"]
WorkerCount = int | Literal["auto", "gpu", "cpu"]

MASK = "***"
"""What is shown in place of a secret."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a TCP port, where port 0 asks for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """A world has at least `min` and at most `max` nodes, 1 <= min <= max."""

    min: int = 1
    max: int = 1


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A text that no log, message or dump may show. Who uses it takes `text`, as late as possible."""

    text: str

    def __repr__(self) -> str:
        return MASK


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """How to speak to etcd. The keys of a job are `<prefix>/<job>/...`."""

    prefix: str = "/elastic-agent"
    ca: Path | None = None  # None: plain text
    cert: Path | None = None  # with `key`, for a server that asks who we are
    key: Path | None = None
    user: str | None = None  # None: no authentication by password; else one of the following two is given
    password: Secret | None = None
    password_file: Path | None = None  # to be read anew at every authentication


@dataclass(frozen=True, slots=True)
class RendezvousConfig:
    """Where the nodes of one job meet, and how long they wait for each other."""

    backend: Backend = "memory"
    endpoints: tuple[
        Endpoint, ...
    ] = ()  # etcd: one or more; c10d: one, or none and this agent hosts the store
    etcd: EtcdConfig | None = None  # with etcd only
    job_id: str = "default"
    join_timeout_s: float = 600.0
    last_call_s: float = 1.0
    lease_ttl_s: float = 5.0
    store_outage_grace_s: float = 60.0  # etcd only; 0: workers stop when the lease can no longer be proved


@dataclass(frozen=True, slots=True)
class StopConfig:
    """Seconds until SIGKILL: from the beginning of a planned stop, and from SIGTERM after another worker failed."""

    grace_s: float = 30.0
    failure_grace_s: float = 1.0
    kill_timeout_s: float = 60.0  # from SIGKILL until what does not end costs this node its place
    just_in_time_grace_s: float = 2.0  # before that, for workers that guard their last step
    drain_timeout_s: float | None = None  # of `grace_s`: workers end by themselves; None: `timeouts` knows
    service_limit_s: float | None = None  # from SIGTERM to the agent until all is killed; None: never


@dataclass(frozen=True, slots=True)
class TimeoutConfig:
    """When a collective that does not end is given up; `timeouts` has the whole ladder."""

    hang_s: float | None = None  # without a step for so long; None: never
    process_group_s: float | None = None  # None: follows from hang_s, else what torch and the script say
    exit_s: float | None = (
        300.0  # without a step for so long after other ranks have ended with success; None: never
    )


@dataclass(frozen=True, slots=True)
class Preload:
    """What the preloaded process imports, which workers are forked from; without any word there is none."""

    words: tuple[str, ...] = ("default",)
    """Names of modules; default: torch, and what DDP imports at its first use; auto: what workers import."""

    def __str__(self) -> str:
        return ",".join(self.words) or "none"

    def __bool__(self) -> bool:
        return bool(self.words)


@dataclass(frozen=True, slots=True)
class Command:
    """What every worker runs. `target` is a path, a module name or a program, as `kind` says."""

    kind: CommandKind
    target: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Config:
    """Everything an agent needs to know to run one job on one node."""

    command: Command
    nodes: NodeCounts = NodeCounts()
    nproc_per_node: WorkerCount = 1
    device_pinning: DevicePinning = "index"
    affinity: Affinity = "none"
    gpu_memory_wait_s: float = 30.0  # 0: a restart does not wait for it
    preload: Preload = Preload()
    rendezvous: RendezvousConfig = RendezvousConfig()
    node_id: str | None = None  # None: the agent makes one that no other agent has
    local_addr: str | None = None  # None: the address that other nodes reach is found out
    network_interface: str | None = None  # None: the one that leads to the other nodes
    network_wait_s: float = 30.0  # for an interface, a route or a name that is not there yet
    port_range: PortRange | None = None  # None: any free port
    allow_other_script: bool = False  # than the job's other nodes
    run_again: bool = False
    max_restarts: int | None = None  # None: no limit while generations progress, 3 in a row without
    stop: StopConfig = StopConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    network_profile: NetworkProfile = "auto"
    memory_checkpoints: int | None = None  # bytes; 0: on disk only; None: a share of the shared memory
    log_dir: Path | None = None  # None: workers' output goes to the console only
    http_address: Endpoint | None = (
        None  # None: where other nodes reach this one (memory: loopback), any free port
    )

    @property
    def solitary(self) -> bool:
        """No other node can ever join, because none is told where."""
        rendezvous = self.rendezvous
        hosted_for_one = rendezvous.backend == "c10d" and not rendezvous.endpoints and self.nodes.max == 1
        return rendezvous.backend == "memory" or hosted_for_one


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in the configuration, in the words an operator needs to put it right."""

    origin: str  # "--min-nodes", "ELASTIC_AGENT_MIN_NODES" or "FILE: min-nodes"
    value: str | None
    expected: str
    advice: str
    here: bool = False
    """Another machine might do as it says, or this one later."""

    def __str__(self) -> str:
        written = "" if self.value is None else f" {_shortened(self.value)!r}"
        return f"{self.origin}{written}: expected {self.expected}; {self.advice}"


class ConfigError(ValueError):
    """The configuration cannot work. Carries every problem found, not the first; nothing was started.

    `config` is what could be understood all the same, so that the machine can be asked about it, too.
    """

    def __init__(self, problems: Sequence[Problem], config: Config | None = None) -> None:
        self.problems = tuple(problems)
        self.config = config
        only_here = all(problem.here for problem in self.problems)
        self.code = ExitCode.NOT_HERE if only_here else ExitCode.BAD_CONFIG
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [f"{count} in the configuration; nothing was started"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        super().__init__("\n".join(lines))


def _shortened(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[:most] + "..."
