"""Every setting of the agent, declared once: its name, what may be written, its default, what it is for.

The command line, the environment, the TOML file, `--help`, `--check-config` and the table in
`docs/configuration.md` all follow `OPTIONS`. An option `min-nodes` is written `--min-nodes` or `--min_nodes`,
`ELASTIC_AGENT_MIN_NODES`, and `min-nodes = 1` or `min_nodes = 1`.

Words: a *kind* turns a text into a value and says what it expects. All sources hand over text, so one kind
checks them all. A *shorthand* has no setting of its own, it stands for others (`--nnodes 1:4`). An option
with a *torchrun* name is also read under that name, and from torchrun's own variable (`PET_NNODES`).
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar, cast, get_args

from .config import Backend, DevicePinning, Endpoint, NodeCounts, WorkerCount
from .ports import PortConfigError, PortRange

T_co = TypeVar("T_co", covariant=True)

MOST_NODES = 100_000
MOST_WORKERS = 4096
WEEK_S = 7 * 86_400.0
C10D_PORT = 29400  # torchrun's default for c10d, so that a host name alone means the same to both


# --- Kinds: text to value ---


@dataclass(frozen=True, slots=True)
class Kind(Generic[T_co]):
    """`parse` raises `ValueError` for a text it refuses; the error's own text is advice, or empty."""

    expects: str
    parse: Callable[[str], T_co]


def whole_number(least: int, most: int, unit: str) -> Kind[int]:
    def parse(text: str) -> int:
        # Nine digits are more than any limit here, and keep `int` cheap whatever the text.
        if re.fullmatch(r"[0-9]{1,9}", text) is None or not least <= int(text) <= most:
            raise ValueError
        return int(text)

    return Kind(f"a whole number of {unit} from {least} to {most}", parse)


_UNIT_S = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(least_s: float) -> Kind[float]:
    def parse(text: str) -> float:
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9}) ?(ms|s|m|h)?", text)
        if match is None:
            raise ValueError
        value_s = float(match[1]) * _UNIT_S[match[2] or ""]
        if not least_s <= value_s <= WEEK_S:
            raise ValueError
        return value_s

    return Kind(f"a duration from {least_s:g} s to 168 h, in seconds or like 500ms, 30s, 5m", parse)


def _text(text: str) -> str:
    # A NUL byte cannot be passed to the system in any path, name or argument.
    if not text or "\0" in text:
        raise ValueError
    return text


def _identifier(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) is None:
        raise ValueError
    return text


def _job_id(text: str) -> str | None:
    # "none" is torchrun's default, found in scripts that never chose an id: jobs would meet by accident.
    return None if text == "none" else _identifier(text)


def _yes_or_no(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise ValueError
    return words[text.lower()]


def _node_counts(text: str) -> NodeCounts:
    least, colon, most = text.partition(":")
    parse = whole_number(1, MOST_NODES, "nodes").parse
    return NodeCounts(parse(least), parse(most if colon else least))


def _worker_count(text: str) -> WorkerCount:
    if text in ("auto", "gpu", "cpu"):
        return cast(WorkerCount, text)
    return whole_number(1, MOST_WORKERS, "workers").parse(text)


def _device_pinning(text: str) -> DevicePinning:
    if text not in get_args(DevicePinning):
        raise ValueError
    return cast(DevicePinning, text)


def _backend(text: str) -> Backend:
    if text in get_args(Backend):
        return cast(Backend, text)
    if text.startswith("etcd"):
        raise ValueError("this version meets through c10d, or in memory on one node; use c10d")
    if text == "static":
        raise ValueError("static rendezvous cannot change the world; use c10d with --rdzv-endpoint")
    raise ValueError


def _host(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text) else _ipv6(text)


def _ipv6(text: str) -> str:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        raise ValueError("check the spelling of the host name or address") from None
    return text


def endpoint(default_port: int) -> Kind[Endpoint]:
    def parse(text: str) -> Endpoint:
        match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::([0-9]{1,5}))?", text)
        if match is None:
            raise ValueError("write an IPv6 address in brackets: [::1]:29400")
        port = default_port if match[3] is None else int(match[3])
        if port > 65535:
            raise ValueError
        return Endpoint(_ipv6(match[1]) if match[1] else _host(match[2]), port)

    return Kind(f"host or host:port, port 0 to 65535 (default {default_port})", parse)


def _port_range(text: str) -> PortRange:
    try:
        return PortRange.parse(text)
    except PortConfigError as error:
        raise ValueError(str(error)) from error


def _arguments(text: str) -> tuple[str, ...]:
    if "\0" in text:
        raise ValueError
    return tuple(shlex.split(text))


def _restarts(text: str) -> int | None:
    return None if text == "auto" else whole_number(0, 1_000_000, "restarts").parse(text)


def _conf(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if not all(key and equals for key, equals, _ in pairs):
        raise ValueError
    return tuple((key.strip().replace("-", "_"), value.strip()) for key, _, value in pairs)


TEXT = Kind("a text that is not empty and holds no NUL byte", _text)
IDENTIFIER = Kind("1 to 64 characters of A-Z a-z 0-9 . _ -", _identifier)
YES_OR_NO = Kind("true or false", _yes_or_no)


# --- The table ---


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
ARGS: Option[tuple[str, ...]] = Option(
    "args",
    Kind("words as a shell would split them", _arguments),
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
    Kind(f"N or MIN:MAX, nodes from 1 to {MOST_NODES}", _node_counts),
    "short for --min-nodes MIN --max-nodes MAX; one number is both",
    metavar="MIN:MAX",
    torchrun="nnodes",
    shorthand=True,
)
NPROC_PER_NODE: Option[WorkerCount] = Option(
    "nproc-per-node",
    Kind(f"a number of workers from 1 to {MOST_WORKERS}, or auto, gpu, cpu", _worker_count),
    "workers on this node: a number, gpu (one per GPU), cpu (one per CPU core), auto (gpu if there is"
    " one, else cpu)",
    metavar="N",
    default="1",
    torchrun="nproc-per-node",
)
DEVICE_PINNING: Option[DevicePinning] = Option(
    "device-pinning",
    Kind("index, mask or none", _device_pinning),
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
NODE_ID: Option[str | None] = Option(
    "node-id",
    IDENTIFIER,
    "this node's name in logs and metrics; two agents of one job may not share it (default: a new,"
    " unique one)",
    metavar="NAME",
)

BACKEND: Option[Backend | None] = Option(
    "rdzv-backend",
    Kind("c10d or memory", _backend),
    "c10d: a TCPStore hosted by one of the agents; memory: no other node can ever join (default: memory"
    " with one node and no endpoint, else c10d)",
    metavar="STORE",
    torchrun="rdzv-backend",
)
ENDPOINT: Option[Endpoint | None] = Option(
    "rdzv-endpoint",
    endpoint(C10D_PORT),
    f"the c10d store, the same on all nodes, port {C10D_PORT} if none is given (default, also"
    " localhost:0: this agent hosts the store on a free port and prints the command for the other nodes)",
    metavar="HOST[:PORT]",
    torchrun="rdzv-endpoint",
)
JOB_ID: Option[str | None] = Option(
    "rdzv-id",
    Kind(f"{IDENTIFIER.expects}, or none", _job_id),
    "the job's name, the same on all nodes (default, also none: 'default' with an endpoint, which"
    " belongs to one job; a new, unique one if this agent starts the store)",
    metavar="ID",
    torchrun="rdzv-id",
)
RDZV_CONF: Option[tuple[tuple[str, str], ...]] = Option(
    "rdzv-conf",
    Kind("KEY=VALUE,KEY=VALUE", _conf),
    "torchrun's spelling of --join-timeout (join_timeout), --last-call (last_call_timeout) and"
    " --lease-ttl (lease_ttl); may be repeated, torchrun's other keys are ignored with a warning",
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
    "a node that has not been heard of for so long is lost",
    metavar="DURATION",
    default="5s",
)

MAX_RESTARTS: Option[int | None] = Option(
    "max-restarts",
    Kind("a whole number of restarts from 0 to 1000000, or auto", _restarts),
    "restarts after worker failures, counted over all nodes; planned changes are free (auto: no limit"
    " while generations make progress, 3 in a row without)",
    metavar="N",
    default="auto",
    torchrun="max-restarts",
)
STOP_GRACE: Option[float] = Option(
    "stop-grace",
    duration(0.0),
    "planned stop: from SIGTERM to SIGKILL",
    metavar="DURATION",
    default="30s",
    torchrun="shutdown-timeout",
)
FAILURE_GRACE: Option[float] = Option(
    "failure-grace",
    duration(0.0),
    "another worker failed: from SIGTERM to SIGKILL, 0 kills at once",
    metavar="DURATION",
    default="1s",
)

LOCAL_ADDR: Option[str | None] = Option(
    "local-addr",
    Kind("a host name or an IP address, without port", _host),
    "address at which other nodes reach this one (default: found out)",
    metavar="HOST",
    torchrun="local-addr",
)
PORT_RANGE: Option[PortRange | None] = Option(
    "port-range",
    Kind("FIRST-LAST with ports from 1 to 65535, or one port", _port_range),
    "ports this agent may listen on for its workers and, without an endpoint, for the store (default:"
    " any free port)",
    metavar="FIRST-LAST",
)
HTTP_ADDRESS: Option[Endpoint] = Option(
    "http-address",
    endpoint(0),
    "metrics and health probes; port 0 is any free port, the log says which",
    metavar="HOST[:PORT]",
    default="127.0.0.1:0",
)
LOG_DIR: Option[Path | None] = Option(
    "log-dir",
    Kind(TEXT.expects, lambda text: Path(_text(text))),
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
    "print every setting and where it came from, start nothing",
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

# In the order of `--help`.
GROUPS: dict[str, tuple[Option[object], ...]] = {
    "What to run": (SCRIPT, MODULE, NO_PYTHON, ARGS),
    "Nodes and workers": (
        MIN_NODES,
        MAX_NODES,
        NNODES,
        NPROC_PER_NODE,
        DEVICE_PINNING,
        VIRTUAL_LOCAL_RANK,
        NODE_ID,
    ),
    "Rendezvous": (BACKEND, ENDPOINT, JOB_ID, STANDALONE, JOIN_TIMEOUT, LAST_CALL, LEASE_TTL, RDZV_CONF),
    "Restarts and stopping": (MAX_RESTARTS, STOP_GRACE, FAILURE_GRACE),
    "Network and logs": (LOCAL_ADDR, PORT_RANGE, HTTP_ADDRESS, LOG_DIR),
    "Configuration": (CONFIG_FILE, CHECK_CONFIG, VERSION, HELP),
}
OPTIONS = tuple(chain.from_iterable(GROUPS.values()))

TARGETS = (SCRIPT, MODULE, NO_PYTHON)  # each says what to run; one source may give only one of them


# --- What torchrun has and this agent does not need ---

RDZV_CONF_KEYS: dict[str, Option[float]] = {
    "join_timeout": JOIN_TIMEOUT,
    "last_call_timeout": LAST_CALL,
    "lease_ttl": LEASE_TTL,
}
IGNORED_RDZV_CONF_KEYS = frozenset(
    {
        "timeout",
        "close_timeout",
        "heartbeat_timeout",
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "read_timeout",
        "is_host",
        "store_type",
    }
)

# Option, each with one value, and why it can be ignored. Training runs the same without them.
IGNORED_TORCHRUN_OPTIONS = {
    "role": "all workers have one role",
    "redirects": "each worker's output goes to its own files with --log-dir",
    "tee": "the console always shows every worker's output",
    "local-ranks-filter": "the console always shows every worker's output",
    "monitor-interval": "a worker's end is noticed at once, nothing is polled",
    "start-method": "it only concerns functions as entry points",
    "event-log-handler": "events go to the agent's log",
    "signals-to-handle": "SIGTERM and SIGINT stop the agent in order",
    "node-rank": "ranks are agreed by the nodes",
    "master-addr": "the workers' master is chosen anew in every generation; nodes meet at --rdzv-endpoint",
    "master-port": "the workers' master is chosen anew in every generation; nodes meet at --rdzv-endpoint",
}
IGNORED_TORCHRUN_SHORTS = {"-r": "redirects", "-t": "tee"}

# Variables that an agent gives its workers. An agent started inside a worker inherits them.
WORKER_VARIABLES = frozenset(
    {
        "ELASTIC_AGENT_GENERATION",
        "ELASTIC_AGENT_REPORTS",
        "ELASTIC_AGENT_LOCAL_RANK",
        "ELASTIC_AGENT_INCARNATION",
        "ELASTIC_AGENT_NODE",
    }
)
