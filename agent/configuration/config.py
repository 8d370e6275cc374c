"""The configuration: one frozen `Config`, complete and checked before anything starts.

Each option stands here, or in `stopping` or `rendezvous`, beside the part of `Config` that it fills. `parse` defines a
row and reads the values; `load` reads file, environment and command line; `derive` merges them and `check` checks them:
every number of the `Config` is in range, and their relations hold.
Durations are seconds; `None` has the meaning written beside the field.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from ...rendezvous.records import Endpoint
from ..common.exits import ExitCode
from ..common.ports import PortRange
from .parse import (
    IDENTIFIER,
    LISTEN_ADDRESS,
    MOST_NODES,
    MOST_WORKERS,
    PATH,
    ROLE_NAME,
    TEXT,
    Affinity,
    NodeCounts,
    Option,
    OptionGroup,
    OptionSource,
    Parser,
    Streams,
    WorkerCount,
    one_of,
    read_affinity,
    read_conf,
    read_host,
    read_local_ranks,
    read_log_level,
    read_node_counts,
    read_port_range,
    read_preload,
    read_streams,
    read_texts,
    read_worker_count,
    whole_number,
)
from .rendezvous import ETCD_OPTIONS, MEETING, RendezvousConfig
from .stopping import (
    MAX_RESTARTS,
    MEMORY_CHECKPOINTS,
    MEMORY_REPLICAS,
    STOPPING,
    TIMEOUTS,
    StopConfig,
    TimeoutConfig,
)

CheckMode = Literal["fail", "warn", "off"]
"""What the checks before a join are for: fail keeps this node out, warn writes into the log."""
CommandKind = Literal["script", "run-path", "module", "binary"]
"""run-path: a script that `launcher` runs."""
DevicePinning = Literal["index", "mask", "none"]
LogFormat = Literal["text", "json"]
Shell = Literal["bash"]

LOGS = OptionGroup("Logs")
NO_FILES = Path(os.devnull)
LOG_DIR: Option[Path | None] = LOGS.option(
    "log-dir",
    PATH,
    "also write workers' output into files below DIR; /dev/null: no files (default: console only)",
)
_STREAMS = Parser(
    "0 (none), 1 (stdout), 2 (stderr) or 3 (both), or that by local rank, like 0:3,1:2",
    read_streams,
    metavar="STREAMS",
)
REDIRECTS: Option[Streams | None] = LOGS.option(
    "redirects",
    _STREAMS,
    "streams of workers that go to files and not to the console, without --log-dir in the temporary directory"
    " (default: all go to the console, and to the files of --log-dir)",
    short="-r",
)
TEE: Option[Streams | None] = LOGS.option(
    "tee",
    _STREAMS,
    "streams that go to files and to the console, whatever --redirects says of them",
    short="-t",
)
LOCAL_RANKS_FILTER: Option[tuple[int, ...] | None] = LOGS.option(
    "local-ranks-filter",
    Parser("local ranks with commas between, like 0,2", read_local_ranks, metavar="RANKS"),
    "only these workers of the node are on the console (default: all)",
)
_TEXTS = Parser("texts with commas between; two commas stand for one in a text", read_texts, metavar="TEXTS")
STDOUT_FILTERS: Option[tuple[str, ...]] = LOGS.option(
    "duplicate-stdout-filters",
    _TEXTS,
    "lines of stdout with one of these texts are also copied to filtered_stdout.log, one for all workers of the node",
    default="",
)
STDERR_FILTERS: Option[tuple[str, ...]] = LOGS.option(
    "duplicate-stderr-filters",
    _TEXTS,
    "the same for stderr and filtered_stderr.log",
    default="",
)
PREFIX_TEMPLATE: Option[str] = LOGS.option(
    "log-line-prefix-template",
    Parser("a text", str, metavar="TEXT"),
    "how each line on the console begins; ${role_name}, ${rank}, ${local_rank}, ${hostname} and ${generation}, too",
    default="[${node}/${rank}] ",
)
LOG_LEVEL: Option[int] = LOGS.option(
    "log-level",
    Parser(
        "debug, info, warning, error or critical, in any case, or a number", read_log_level, metavar="LEVEL"
    ),
    "which lines of the agent's own are on stderr; also as LOGLEVEL, torchrun's variable",
    default="info",
)
LOG_FORMAT: Option[LogFormat] = LOGS.option(
    "log-format",
    one_of(LogFormat),
    "the agent's own lines: text, or each as one JSON object",
    default="text",
)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Where workers' output goes, and the form of the agent's own log."""

    directory: Path | None = LOG_DIR.field()
    """Below it are the files of workers; None: in the temporary directory, if `wants_files`, else there are none;
    NO_FILES: there are none."""
    redirects: Streams | None = REDIRECTS.field()
    tee: Streams | None = TEE.field()
    """Both None: all streams go to the console and, with a directory, to files."""
    local_ranks: tuple[int, ...] | None = LOCAL_RANKS_FILTER.field()
    """None: all."""
    stdout_filters: tuple[str, ...] = STDOUT_FILTERS.field()
    stderr_filters: tuple[str, ...] = STDERR_FILTERS.field()
    prefix_template: str = PREFIX_TEMPLATE.field()
    level: int = LOG_LEVEL.field()
    """Of Python's logging."""
    format: LogFormat = LOG_FORMAT.field()

    @property
    def given_directory(self) -> Path | None:
        """None also where there are to be no files."""
        return self.directory if self.directory != NO_FILES else None

    @property
    def wants_files(self) -> bool:
        """Also without a directory."""
        asked = any(streams is not None and streams.of_any(3) for streams in (self.redirects, self.tee))
        return asked or bool(self.stdout_filters or self.stderr_filters)


RUNNING = OptionGroup("What to run")
SCRIPT: Option[str | None] = RUNNING.option(
    "script",
    TEXT,
    "Python script every worker runs: on the command line the first word that is no option; all after it is its own",
    sources=OptionSource.ENV | OptionSource.FILE,
)
MODULE: Option[str | None] = RUNNING.option(
    "module", TEXT, "run a module, as python -m does; all after it is its own", short="-m"
)
NO_PYTHON: Option[str | None] = RUNNING.option(
    "no-python", TEXT, "run a program without Python; all after it is its own"
)
ARGS: Option[tuple[str, ...]] = RUNNING.option(
    "args",
    Parser("words as a shell would split them", lambda text: tuple(shlex.split(text))),
    "arguments of the script, module or program; in the file a list of texts",
    default="",
    sources=OptionSource.ENV | OptionSource.FILE,
)
RUN_PATH = RUNNING.flag(
    "run-path",
    "run the script by runpy.run_path, with torchrun's record: Python looks first in the current folder, not in the"
    " script's",
)

NODES = OptionGroup("Nodes and workers")
MIN_NODES: Option[int] = NODES.option(
    "min-nodes",
    whole_number(1, MOST_NODES, "nodes"),
    "training runs only while at least N nodes are there",
    default="1",
)
MAX_NODES: Option[int | None] = NODES.option(
    "max-nodes", whole_number(1, MOST_NODES, "nodes"), "at most N nodes train together (default: --min-nodes)"
)
NODES_MULTIPLE_OF: Option[int] = NODES.option(
    "nodes-multiple-of",
    whole_number(1, MOST_NODES, "nodes"),
    "only a multiple of N nodes trains, as a device mesh needs it; others stand by. Also the default of --min-nodes",
    default="1",
    conf=("nodes_multiple_of",),
)
NNODES: Option[NodeCounts] = NODES.option(
    "nnodes",
    Parser(f"N or MIN:MAX, nodes from 1 to {MOST_NODES}", read_node_counts, metavar="MIN:MAX"),
    "short for --min-nodes MIN --max-nodes MAX; one number is both",
    shorthand=True,
)
NPROC_PER_NODE: Option[WorkerCount] = NODES.option(
    "nproc-per-node",
    Parser(
        f"a number of workers from 1 to {MOST_WORKERS}, or auto, gpu, cpu", read_worker_count, metavar="N"
    ),
    "workers on this node: a number, gpu (one per GPU), cpu (one per core), auto (gpu if there is one, else cpu)",
    default="1",
)
VIRTUAL_LOCAL_RANK = NODES.flag(
    "virtual-local-rank",
    "each worker sees only its own devices, with LOCAL_RANK 0; else all, and LOCAL_RANK selects",
)
DEVICES_PER_WORKER: Option[int] = NODES.option(
    "devices-per-worker",
    whole_number(0, MOST_WORKERS, "devices"),
    "each worker has N devices, from cuda:(LOCAL_RANK * N) on; 0: devices are left alone, for workers that share them",
    default="1",
)
ROLE: Option[str] = NODES.option(
    "role",
    ROLE_NAME,
    "ROLE_NAME of this node's workers; ROLE_RANK and ROLE_WORLD_SIZE count those of the same name",
    default="default",
)
AFFINITY: Option[Affinity] = NODES.option(
    "affinity",
    Parser(
        "none, numa or cores, or torchrun's node (numa) and exclusive (cores)", read_affinity, metavar="HOW"
    ),
    "pin workers, and set OMP_NUM_THREADS: numa to the CPUs next to their device, cores to whole cores of these each",
    default="none",
    torchrun="numa-binding",
)
PRELOAD: Option[tuple[str, ...]] = NODES.option(
    "preload",
    Parser(
        "names of modules with commas between, default among them or alone, or none",
        read_preload,
        metavar="NAMES",
    ),
    "a process imports these in advance, and workers are forked from it in milliseconds; default: torch and what DDP"
    " imports; none: each worker imports for itself, as under torchrun",
    default="default",
)
NODE_ID: Option[str | None] = NODES.option(
    "node-id", IDENTIFIER, "this node's name, its own in the job (default: a new, unique one)"
)

CHECK: Option[CheckMode] = NODES.option(
    "check",
    one_of(CheckMode),
    "checks of this node before it joins: warn says what is wrong; fail does not join meanwhile, and checks again until"
    " --join-timeout is over",
    default="warn",
)

NETWORK = OptionGroup("Network")
LOCAL_ADDR: Option[str | None] = NETWORK.option(
    "local-addr",
    Parser("an IP address, or the name of an interface or host", read_host, metavar="HOST"),
    "where other nodes reach this one, for the store, NCCL and gloo (default: the interface that leads to the"
    " rendezvous, never a container's bridge)",
)
PORT_RANGE: Option[PortRange | None] = NETWORK.option(
    "port-range",
    Parser("FIRST-LAST with ports from 1 to 65535, or one port", read_port_range, metavar="FIRST-LAST"),
    "ports on which agent and workers may listen, where no other option names one (default: any free port)",
)
HTTP_ADDRESS: Option[Endpoint | None] = NETWORK.option(
    "http-address",
    LISTEN_ADDRESS,
    "metrics and health probes (default: a free port at this node's address, which other nodes probe; at 127.0.0.1"
    " where none can join; the log says which)",
)

ITSELF = OptionGroup("Configuration")
CONFIG_FILE: Option[str | None] = ITSELF.option(
    "config", TEXT, "read settings from FILE.toml first", sources=OptionSource.CLI | OptionSource.ENV
)
CHECK_CONFIG = ITSELF.flag(
    "check-config",
    "print every setting with its source and what follows from them on this machine, start nothing",
    sources=OptionSource.CLI,
)
PRINT_COMPLETION: Option[str | None] = ITSELF.option(
    "print-completion",
    one_of(Shell),
    "print what this shell needs to complete the command's options",
    sources=OptionSource.CLI,
)
VERSION = ITSELF.flag("version", "print the version", sources=OptionSource.CLI)
HELP = ITSELF.flag(
    "help", "print every option; -h only those that most people need", short="-h", sources=OptionSource.CLI
)


GROUPS = (RUNNING, NODES, MEETING, ETCD_OPTIONS, STOPPING, TIMEOUTS, NETWORK, LOGS, ITSELF)
"""In the order of `--help`."""

_SPELT = ", ".join(
    f"--{each.name} ({', '.join(each.conf)})" for group in GROUPS for each in group if each.conf
)
RDZV_CONF: Option[tuple[tuple[str, str], ...]] = MEETING.option(
    "rdzv-conf",
    Parser("KEY=VALUE,KEY=VALUE", read_conf, metavar="K=V,..."),
    f"torchrun's spelling of {_SPELT}; may be repeated, torchrun's other keys are ignored with a warning",
    shorthand=True,
)
"""Here, because it stands for options of several groups."""

OPTIONS = tuple(chain.from_iterable(GROUPS))

TARGETS = (SCRIPT, MODULE, NO_PYTHON)  # what to run; one source may give only one of them


@dataclass(frozen=True, slots=True)
class Command:
    """What every worker runs. `target` is a path, a module name or a program, by `kind`."""

    kind: CommandKind
    target: str
    args: tuple[str, ...] = ()

    @property
    def started(self) -> Command:
        """What Python is started with, if it is Python."""
        return (
            Command("module", "elastic_agent.launcher", ("--run-path", self.target, *self.args))
            if self.kind == "run-path"
            else self
        )


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of an agent that runs one job on one node."""

    command: Command
    nodes: NodeCounts = read_node_counts(str(MIN_NODES.default))
    nodes_multiple_of: int = NODES_MULTIPLE_OF.field()
    nproc_per_node: WorkerCount = NPROC_PER_NODE.field()
    devices_per_worker: int = DEVICES_PER_WORKER.field()
    virtual_local_rank: bool = VIRTUAL_LOCAL_RANK.field()
    affinity: Affinity = AFFINITY.field()
    gpu_memory_wait_s: float = 30.0
    """A restart waits so long until the memory of killed workers is free."""
    preload: tuple[str, ...] = PRELOAD.field()
    """What the fork server imports, see `--preload`; none: there is no such process."""
    role: str = ROLE.field()
    rendezvous: RendezvousConfig = RendezvousConfig()
    node_id: str | None = NODE_ID.field()  # None: the agent makes one that no other agent has
    check: CheckMode = CHECK.field()
    local_addr: str | None = LOCAL_ADDR.field()
    """An address, a host, or an interface of this node; None: the interface that leads to the other nodes."""
    port_range: PortRange | None = PORT_RANGE.field()  # None: any free port
    max_restarts: int | None = MAX_RESTARTS.field()
    """None: no limit while generations make progress, 3 in a row without."""
    stop: StopConfig = StopConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    memory_checkpoints: int | None = MEMORY_CHECKPOINTS.field()
    """Bytes; 0: on disk only; None: a share of the shared memory."""
    memory_replicas: int = MEMORY_REPLICAS.field()
    logs: LogConfig = LogConfig()
    http_address: Endpoint | None = HTTP_ADDRESS.field()
    """None: where other nodes reach this one (memory: loopback), any free port."""

    @property
    def device_pinning(self) -> DevicePinning:
        """Which devices a worker sees."""
        return "none" if not self.devices_per_worker else "mask" if self.virtual_local_rank else "index"

    @property
    def solitary(self) -> bool:
        """No node of another machine can ever join."""
        rendezvous = self.rendezvous
        hosted_for_one = rendezvous.kind.host is not None and not rendezvous.endpoints and self.nodes.max == 1
        return rendezvous.kind.port is None or hosted_for_one


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in the configuration: where, what was expected, and how to correct it."""

    origin: str  # "--min-nodes", "ELASTIC_AGENT_MIN_NODES" or "FILE: min-nodes"
    value: str | None
    expected: str
    advice: str
    here: bool = False
    """On another machine, or on this one later, there may be no problem."""

    def __str__(self) -> str:
        written = "" if self.value is None else f" {_shortened(self.value)!r}"
        return f"{self.origin}{written}: expected {self.expected}; {self.advice}"


class ConfigError(ValueError):
    """The configuration cannot work. Carries every problem found, not the first; nothing was done."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        only_here = all(problem.here for problem in self.problems)
        self.code = ExitCode.NOT_HERE if only_here else ExitCode.BAD_CONFIG
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [f"{count}; nothing was done"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        super().__init__("\n".join(lines))


def _shortened(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[:most] + "..."
