"""Every setting of the agent, declared once: its name, what may be written, its default, what it is for.

The command line, the environment, the TOML file, `--help`, `--check-config` and the table in
`docs/configuration.md` all follow `OPTIONS`. An option `min-nodes` is written `--min-nodes` or `--min_nodes`,
`ELASTIC_AGENT_MIN_NODES`, and `min-nodes = 1` or `min_nodes = 1`.

Words: a *kind* turns a text into a value (`kinds`). A *shorthand* has no setting of its own, it stands for others
(`--nnodes 1:4`). An option with a *torchrun* name is also read under that name, and from torchrun's own variable
(`PET_NNODES`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar

from ..ports import PortRange
from .config import (
    Affinity,
    Backend,
    DevicePinning,
    Endpoint,
    NetworkProfile,
    NodeCounts,
    Preload,
    Secret,
    WorkerCount,
)
from .kinds import (
    C10D_PORT,
    ETCD_PORT,
    IDENTIFIER,
    INTERFACE,
    MOST_NODES,
    MOST_WORKERS,
    PATH,
    SECRET,
    SIZE,
    STORE_ADDRESS,
    TEXT,
    USER,
    YES_OR_NO,
    Kind,
    StoreAddress,
    duration,
    ip_endpoint,
    read_affinity,
    read_arguments,
    read_backend,
    read_conf,
    read_device_pinning,
    read_host,
    read_job_id,
    read_network_profile,
    read_node_counts,
    read_port_range,
    read_preload,
    read_restarts,
    read_worker_count,
    time_limit,
    whole_number,
)

T_co = TypeVar("T_co", covariant=True)


class Source(Flag):
    """Where an option may be written."""

    CLI = 1
    ENV = 2
    FILE = 4
    ALL = 7


@dataclass(frozen=True, slots=True)
class Option(Generic[T_co]):
    """One row of the table. `default` is a text for `kind` like any other; `help` says what None means."""

    name: str
    kind: Kind[T_co]
    help: str
    metavar: str = ""
    default: str | None = None
    short: str = ""  # "-m"
    torchrun: str = ""  # torchrun's name for the same thing
    flag: bool = False  # on the command line it stands alone and means true
    shorthand: bool = False
    sources: Source = Source.ALL

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.torchrun in ("", self.name) else (self.name, self.torchrun)

    @property
    def default_value(self) -> T_co | None:
        return None if self.default is None else self.kind.parse(self.default)


SCRIPT: Option[str | None] = Option(
    "script",
    TEXT,
    "Python script every worker runs; on the command line the first word that is no option, all words"
    " after it are the script's own",
    metavar="PATH",
    sources=Source.ENV | Source.FILE,
)
MODULE: Option[str | None] = Option(
    "module",
    TEXT,
    "run a module, as python -m does; all words after it are the module's own",
    metavar="NAME",
    short="-m",
)
NO_PYTHON: Option[str | None] = Option(
    "no-python",
    TEXT,
    "run a program without Python; all words after it are the program's own",
    metavar="PROGRAM",
)
ALLOW_OTHER_SCRIPT: Option[bool] = Option(
    "allow-other-script",
    YES_OR_NO,
    "let this node join though its script is not, byte for byte, that of the job's other nodes; without, it says which"
    " differ and leaves with exit code 65. Only the script's own file is compared, not what it imports; of -m and"
    " --no-python only the name",
    default="false",
    flag=True,
)
ARGS: Option[tuple[str, ...]] = Option(
    "args",
    Kind("words as a shell would split them", read_arguments),
    "arguments of the script, module or program; in the file a list of texts",
    metavar="WORDS",
    default="",
    sources=Source.ENV | Source.FILE,
)

MIN_NODES: Option[int] = Option(
    "min-nodes",
    whole_number(1, MOST_NODES, "nodes"),
    "training runs only while at least N nodes are there",
    metavar="N",
    default="1",
)
MAX_NODES: Option[int | None] = Option(
    "max-nodes",
    whole_number(1, MOST_NODES, "nodes"),
    "at most N nodes train together (default: --min-nodes)",
    metavar="N",
)
NNODES: Option[NodeCounts] = Option(
    "nnodes",
    Kind(f"N or MIN:MAX, nodes from 1 to {MOST_NODES}", read_node_counts),
    "short for --min-nodes MIN --max-nodes MAX; one number is both",
    metavar="MIN:MAX",
    torchrun="nnodes",
    shorthand=True,
)
NPROC_PER_NODE: Option[WorkerCount] = Option(
    "nproc-per-node",
    Kind(f"a number of workers from 1 to {MOST_WORKERS}, or auto, gpu, cpu", read_worker_count),
    "workers on this node: a number, gpu (one per GPU), cpu (one per CPU core), auto (gpu if there is"
    " one, else cpu)",
    metavar="N",
    default="1",
    torchrun="nproc-per-node",
)
DEVICE_PINNING: Option[DevicePinning] = Option(
    "device-pinning",
    Kind("index, mask or none", read_device_pinning),
    "index: all devices visible, LOCAL_RANK selects; mask: each worker sees only its own device, with"
    " LOCAL_RANK 0; none: devices are left alone",
    metavar="HOW",
    default="index",
)
VIRTUAL_LOCAL_RANK: Option[bool] = Option(
    "virtual-local-rank",
    YES_OR_NO,
    "torchrun's name for --device-pinning mask",
    default="false",
    torchrun="virtual-local-rank",
    flag=True,
    shorthand=True,
)
AFFINITY: Option[Affinity] = Option(
    "affinity",
    Kind("none, numa or cores, or torchrun's node (numa) and exclusive (cores)", read_affinity),
    "numa: each worker keeps to the CPUs next to its device, without devices to those of a NUMA node; cores: workers"
    " divide these cores among them, whole ones; none: nothing is set. With the first two OMP_NUM_THREADS follows",
    metavar="HOW",
    default="none",
    torchrun="numa-binding",
)
GPU_MEMORY_WAIT: Option[float] = Option(
    "gpu-memory-wait",
    duration(0.0),
    "a restart waits at most so long until killed workers' GPU memory is free again, 0 is off; needs nvidia-ml-py",
    metavar="DURATION",
    default="30s",
)
PRELOAD: Option[Preload] = Option(
    "preload",
    Kind("names of modules with commas between, default or auto among them or alone, or none", read_preload),
    "a process imports these modules in advance, and workers are forked from it within milliseconds. default: torch,"
    " and what DistributedDataParallel imports when it is first used; auto: what a worker of the first generation"
    " imports from site-packages, alone with default; none: each worker imports all by itself, as under torchrun",
    metavar="NAMES",
    default="default",
)
NO_PRELOAD: Option[bool] = Option(
    "no-preload",
    YES_OR_NO,
    "short for --preload none",
    default="false",
    flag=True,
    shorthand=True,
)
NODE_ID: Option[str | None] = Option(
    "node-id",
    IDENTIFIER,
    "this node's name in logs and metrics; two agents of one job may not share it (default: a new,"
    " unique one)",
    metavar="NAME",
)

BACKEND: Option[Backend | None] = Option(
    "rdzv-backend",
    Kind("c10d, etcd or memory", read_backend),
    "c10d: a TCPStore hosted by one of the agents; etcd (also etcd-v3): an etcd 3 cluster, no node is special;"
    " memory: no other node can ever join (default: what the endpoint's URL says; memory with one node and no"
    " endpoint; else c10d)",
    metavar="STORE",
    torchrun="rdzv-backend",
)
ENDPOINT: Option[StoreAddress | None] = Option(
    "rdzv-endpoint",
    STORE_ADDRESS,
    f"the store, the same on all nodes. c10d: one host, port {C10D_PORT} if none is given (default, also"
    " localhost:0: this agent hosts the store on a free port and prints the command for the other nodes)."
    f" etcd: any members of the cluster, port {ETCD_PORT} if none is given; the URL form stands for"
    " --rdzv-backend etcd, its PREFIX begins the job's keys, PREFIX/JOB/... (default: /elastic-agent)",
    metavar="HOST[:PORT],...",
    torchrun="rdzv-endpoint",
)
JOB_ID: Option[str | None] = Option(
    "rdzv-id",
    Kind(f"{IDENTIFIER.expects}, or none", read_job_id),
    "the job's name, the same on all nodes; required with etcd, which serves many jobs (default, also none:"
    " 'default' with a c10d endpoint, which belongs to one job; a new, unique one if this agent starts the store)",
    metavar="ID",
    torchrun="rdzv-id",
)
RDZV_CONF: Option[tuple[tuple[str, str], ...]] = Option(
    "rdzv-conf",
    Kind("KEY=VALUE,KEY=VALUE", read_conf),
    "torchrun's spelling of --join-timeout (join_timeout), --last-call (last_call_timeout), --lease-ttl"
    " (lease_ttl), --network-interface (network_interface), --network-wait (network_wait), and without etcd- of"
    " --etcd-ca (also cacert, ca_cert), --etcd-cert (ssl_cert), --etcd-key (ssl_cert_key),"
    " --etcd-user, --etcd-password-file and --etcd-insecure; may be repeated, torchrun's other keys"
    " are ignored with a warning",
    metavar="K=V,...",
    torchrun="rdzv-conf",
    shorthand=True,
)
STANDALONE: Option[bool] = Option(
    "standalone",
    YES_OR_NO,
    "this node alone, whatever is said of nodes and rendezvous: one node, memory store",
    default="false",
    torchrun="standalone",
    flag=True,
)
JOIN_TIMEOUT: Option[float] = Option(
    "join-timeout",
    duration(1.0),
    "give up when --min-nodes nodes have not met for so long",
    metavar="DURATION",
    default="600s",
)
LAST_CALL: Option[float] = Option(
    "last-call",
    duration(0.0),
    "first start only: once --min-nodes nodes are there, wait so long for more",
    metavar="DURATION",
    default="1s",
)
LEASE_TTL: Option[float] = Option(
    "lease-ttl",
    duration(1.0),
    "a node that has not been heard of for so long is lost; the same on all nodes, else exit code 65",
    metavar="DURATION",
    default="5s",
)

ETCD_CA: Option[Path | None] = Option(
    "etcd-ca",
    PATH,
    "speak TLS, with a server whose certificate one of the authorities in this PEM file has signed",
    metavar="FILE",
)
ETCD_CERT: Option[Path | None] = Option(
    "etcd-cert",
    PATH,
    "mutual TLS: this node's certificate (PEM)",
    metavar="FILE",
)
ETCD_KEY: Option[Path | None] = Option(
    "etcd-key",
    PATH,
    "mutual TLS: this node's key (PEM), which neither group nor others may read; a file of root's may"
    " be lent to a group",
    metavar="FILE",
)
ETCD_USER: Option[str | None] = Option(
    "etcd-user",
    USER,
    "etcd's name for this job, with a password; its role needs read and write on PREFIX/JOB/ alone",
    metavar="NAME",
)
ETCD_PASSWORD_FILE: Option[Path | None] = Option(
    "etcd-password-file",
    PATH,
    "holds the password, as private as the key; read anew at every authentication, one newline at its end"
    " does not count. Or set the variable ELASTIC_AGENT_ETCD_PASSWORD",
    metavar="FILE",
)
ETCD_PASSWORD: Option[Secret | None] = Option(
    "etcd-password",
    SECRET,
    "the password itself, in the variable ELASTIC_AGENT_ETCD_PASSWORD; the workers do not inherit it",
    sources=Source.ENV,
)
ETCD_INSECURE: Option[bool] = Option(
    "etcd-insecure",
    YES_OR_NO,
    "allow plain text, passwords included, to a store that is not on this machine's loopback",
    default="false",
    flag=True,
)
STORE_OUTAGE_GRACE: Option[float] = Option(
    "store-outage-grace",
    duration(0.0),
    "how long a job may go on without the store after its leases can no longer be proved, while all its nodes"
    " still reach each other by HTTP; 0 is off; the same on all nodes, else exit code 65",
    metavar="DURATION",
    default="60s",
)

RUN_AGAIN: Option[bool] = Option(
    "run-again",
    YES_OR_NO,
    "begin the job anew where etcd says that it has ended with success; else an agent that comes after that end leaves"
    " with exit code 0",
    default="false",
    flag=True,
)
MAX_RESTARTS: Option[int | None] = Option(
    "max-restarts",
    Kind("a whole number of restarts from 0 to 1000000, or auto", read_restarts),
    "restarts after worker failures, counted over all nodes; planned changes are free (auto: no limit"
    " while generations make progress, 3 in a row without)",
    metavar="N",
    default="auto",
    torchrun="max-restarts",
)
STOP_GRACE: Option[float] = Option(
    "stop-grace",
    duration(0.0),
    "planned stop: from its beginning to SIGKILL; workers that do not end by themselves within --drain-timeout get"
    " SIGTERM and the rest of it",
    metavar="DURATION",
    default="30s",
    torchrun="shutdown-timeout",
)
DRAIN_TIMEOUT: Option[float | None] = Option(
    "drain-timeout",
    duration(0.0),
    "planned change: how long workers that call elastic_agent.worker.step may take to come to a common last step, keep"
    " it and end by themselves; longer than the longest step, 0 signals them at once (default: two thirds of"
    " --stop-grace)",
    metavar="DURATION",
)
FAILURE_GRACE: Option[float] = Option(
    "failure-grace",
    duration(0.0),
    "another worker failed: from SIGTERM to SIGKILL, 0 kills at once",
    metavar="DURATION",
    default="1s",
)
KILL_TIMEOUT: Option[float] = Option(
    "kill-timeout",
    duration(1.0),
    "how long processes may take to end after SIGKILL; then this node gives up its place, with exit code 74, so that"
    " the others go on. A later agent of the job here waits as long for what is left, and ends so, too. A process that"
    " waits for a dead disk or device never ends; one that gives back much memory may take many seconds",
    metavar="DURATION",
    default="60s",
)
JUST_IN_TIME_GRACE: Option[float] = Option(
    "just-in-time-grace",
    duration(0.0),
    "another worker failed: how long workers that guard their last step (Checkpointer.just_in_time) may take to"
    " keep it before --failure-grace begins; 0 keeps nothing",
    metavar="DURATION",
    default="2s",
)
MEMORY_CHECKPOINTS: Option[int | None] = Option(
    "memory-checkpoints",
    SIZE,
    "memory in /dev/shm for the newest states of all Checkpointers here, two copies of each; off: checkpoints are only"
    " on disk, and training waits for it (default: half of /dev/shm)",
    metavar="SIZE",
)
SERVICE_STOP_LIMIT: Option[float | None] = Option(
    "service-stop-limit",
    duration(1.0),
    "how long the service manager waits after SIGTERM before it kills everything (systemd: TimeoutStopSec,"
    " Kubernetes: terminationGracePeriodSeconds); a stop must fit: --stop-grace, as long again (at least 10 s) to"
    " bring to disk what only this node has, and 5 s to leave (default: no limit)",
    metavar="DURATION",
)
HANG_TIMEOUT: Option[float | None] = Option(
    "hang-timeout",
    duration(1.0),
    "workers here that have reported steps (elastic_agent.worker.step) and then report neither a step nor a checkpoint"
    " for so long have failed; must be longer than the longest step, evaluation or save (default: off)",
    metavar="DURATION",
)
EXIT_TIMEOUT: Option[float] = Option(
    "exit-timeout",
    time_limit(1.0),
    "when some ranks have ended with success, others that report neither a step nor a checkpoint for so long (or that"
    " never reported a step, and hardly use the processor) hang at their end, and have failed; must be longer than"
    " what one rank does alone at the end, such as writing the final model; 0 or none: only say so",
    metavar="DURATION",
    default="5m",
)
PROCESS_GROUP_TIMEOUT: Option[float | None] = Option(
    "process-group-timeout",
    duration(1.0),
    "a collective that has not ended for so long ends its process; applied by"
    " elastic_agent.worker.init_process_group (default: twice --hang-timeout, without it torch's own)",
    metavar="DURATION",
)

LOCAL_ADDR: Option[str | None] = Option(
    "local-addr",
    Kind("a host name or an IP address, without port", read_host),
    "address at which other nodes reach this one (default: found out)",
    metavar="HOST",
    torchrun="local-addr",
)
NETWORK_PROFILE: Option[NetworkProfile] = Option(
    "network-profile",
    Kind("auto, ethernet, infiniband, roce, efa or debug", read_network_profile),
    "what NCCL is told about the network, where your environment says nothing: auto looks for active RDMA ports,"
    " ethernet is TCP even where there are some, debug is auto with NCCL's and torch's own reports",
    metavar="NAME",
    default="auto",
)
NETWORK_INTERFACE: Option[str | None] = Option(
    "network-interface",
    INTERFACE,
    "interface over which the nodes reach each other, for the store, the workers, NCCL and gloo; may differ from node"
    " to node (default: the one that leads to the rendezvous, never a container bridge)",
    metavar="NAME",
)
NETWORK_WAIT: Option[float] = Option(
    "network-wait",
    duration(0.0),
    "at the start, wait so long for an interface, a route or a host name that is not there yet; 0 does not wait",
    metavar="DURATION",
    default="30s",
)
PORT_RANGE: Option[PortRange | None] = Option(
    "port-range",
    Kind("FIRST-LAST with ports from 1 to 65535, or one port", read_port_range),
    "ports this agent may listen on for its workers, for other nodes' probes (unless --http-address names"
    " a port) and, without an endpoint, for the store (default: any free port)",
    metavar="FIRST-LAST",
)
HTTP_ADDRESS: Option[Endpoint | None] = Option(
    "http-address",
    ip_endpoint(0),
    "metrics and health probes; port 0 is any free port, the log says which (default: a free port at"
    " 127.0.0.1, or at this node's own address when other nodes can join: they probe it after failures)",
    metavar="ADDRESS[:PORT]",
)
LOG_DIR: Option[Path | None] = Option(
    "log-dir",
    PATH,
    "also write each worker's output into files below DIR (default: console only)",
    metavar="DIR",
    torchrun="log-dir",
)

CONFIG_FILE: Option[str | None] = Option(
    "config",
    TEXT,
    "read settings from FILE.toml first",
    metavar="FILE.toml",
    sources=Source.CLI | Source.ENV,
)
CHECK_CONFIG: Option[bool] = Option(
    "check-config",
    YES_OR_NO,
    "print every setting with its source and what follows from them on this machine, start nothing",
    default="false",
    flag=True,
    sources=Source.CLI,
)
VERSION: Option[bool] = Option(
    "version",
    YES_OR_NO,
    "print the version",
    default="false",
    flag=True,
    sources=Source.CLI,
)
HELP: Option[bool] = Option(
    "help",
    YES_OR_NO,
    "print this text",
    default="false",
    short="-h",
    flag=True,
    sources=Source.CLI,
)

COMMAND_NAMES = ("explain-env", "status", "drain", "forget")
"""First words that are no script."""

# In the order of `--help`.
GROUPS: dict[str, tuple[Option[object], ...]] = {
    "What to run": (SCRIPT, MODULE, NO_PYTHON, ARGS, ALLOW_OTHER_SCRIPT),
    "Nodes and workers": (
        MIN_NODES,
        MAX_NODES,
        NNODES,
        NPROC_PER_NODE,
        DEVICE_PINNING,
        VIRTUAL_LOCAL_RANK,
        AFFINITY,
        GPU_MEMORY_WAIT,
        PRELOAD,
        NO_PRELOAD,
        NODE_ID,
    ),
    "Rendezvous": (BACKEND, ENDPOINT, JOB_ID, STANDALONE, JOIN_TIMEOUT, LAST_CALL, LEASE_TTL, RDZV_CONF),
    "Rendezvous through etcd": (
        ETCD_CA,
        ETCD_CERT,
        ETCD_KEY,
        ETCD_USER,
        ETCD_PASSWORD_FILE,
        ETCD_PASSWORD,
        ETCD_INSECURE,
        STORE_OUTAGE_GRACE,
    ),
    "Restarts and stopping": (
        MAX_RESTARTS,
        RUN_AGAIN,
        STOP_GRACE,
        DRAIN_TIMEOUT,
        FAILURE_GRACE,
        KILL_TIMEOUT,
        JUST_IN_TIME_GRACE,
        MEMORY_CHECKPOINTS,
        SERVICE_STOP_LIMIT,
    ),
    "Timeouts of training": (HANG_TIMEOUT, EXIT_TIMEOUT, PROCESS_GROUP_TIMEOUT),
    "Network and logs": (
        LOCAL_ADDR,
        NETWORK_INTERFACE,
        NETWORK_WAIT,
        NETWORK_PROFILE,
        PORT_RANGE,
        HTTP_ADDRESS,
        LOG_DIR,
    ),
    "Configuration": (CONFIG_FILE, CHECK_CONFIG, VERSION, HELP),
}
OPTIONS = tuple(chain.from_iterable(GROUPS.values()))

ETCD_OPTIONS = GROUPS["Rendezvous through etcd"]

TARGETS = (SCRIPT, MODULE, NO_PYTHON)  # each says what to run; one source may give only one of them


# Variables that no process which the agent starts may inherit.
SECRET_VARIABLES = frozenset({"ELASTIC_AGENT_ETCD_PASSWORD"})

# Variables that an agent gives its workers. An agent started inside a worker inherits them.
WORKER_VARIABLES = frozenset(
    {
        "ELASTIC_AGENT_BAD_STATE",
        "ELASTIC_AGENT_GENERATION",
        "ELASTIC_AGENT_RUN",
        "ELASTIC_AGENT_REPORTS",
        "ELASTIC_AGENT_COMMITS",
        "ELASTIC_AGENT_SALVAGE",
        "ELASTIC_AGENT_DRAIN",
        "ELASTIC_AGENT_PAGE",
        "ELASTIC_AGENT_MEMORY",
        "ELASTIC_AGENT_MEMORY_BYTES",
        "ELASTIC_AGENT_WRITES",
        "ELASTIC_AGENT_LOCAL_RANK",
        "ELASTIC_AGENT_INCARNATION",
        "ELASTIC_AGENT_NODE",
        "ELASTIC_AGENT_PROCESS_GROUP_TIMEOUT_S",
    }
)
