"""Where the nodes of one job meet: the kinds of stores, and the options of the rendezvous and of its stores.

A new kind of store is a folder in `rendezvous`, and a name in `STORES`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from ...rendezvous.c10d import C10D
from ...rendezvous.etcd import ETCD, PREFIX
from ...rendezvous.local import LOCAL
from ...rendezvous.records import Endpoint
from ...rendezvous.store.memory import MEMORY
from ...rendezvous.store.store_kind import StoreKind
from .parse import (
    IDENTIFIER,
    MOST_NODES,
    PATH,
    USER,
    Option,
    OptionGroup,
    Parser,
    duration,
    host_and_port,
    in_words,
    read_host,
    whole_number,
)

STORES = {kind.name: kind for kind in (C10D, ETCD, LOCAL, MEMORY)}

ALONE = MEMORY
"""Of a node that no other one can join, where none is chosen."""

DEFAULT = C10D
"""Where others can join."""

SHARED = tuple(kind for kind in STORES.values() if kind.port is not None)
"""Nodes of several machines can meet there."""

CLUSTERS = tuple(kind for kind in STORES.values() if kind.cluster)


def read_backend(text: str) -> str:
    for kind in STORES.values():
        if text in (kind.name, *kind.aliases):
            return kind.name
    if text == "etcd-v2":
        raise ValueError("etcd 3.6 has removed that interface; use etcd, which speaks version 3")
    raise ValueError


def read_job_id(text: str) -> str | None:
    # "none" is torchrun's default, found in scripts that never chose an id: jobs would meet by accident.
    return None if text == "none" else IDENTIFIER.parse(text)


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The value of --rdzv-endpoint: hosts with a port where one was written; the URL form names the backend, too."""

    hosts: tuple[tuple[str, int | None], ...]
    backend: str | None = None
    prefix: str | None = None
    folder: Path | None = None
    """On this machine, in place of hosts."""

    def with_ports(self, default: int) -> StoreAddress:
        return replace(
            self, hosts=tuple((host, default if port is None else port) for host, port in self.hosts)
        )

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Once every host has its port."""
        return tuple(Endpoint(host, port) for host, port in self.hosts if port is not None)

    def __str__(self) -> str:
        scheme = f"{self.backend}://" if self.backend else ""
        if self.folder is not None:
            return f"{scheme}{self.folder}"
        return f"{scheme}{','.join(map(str, self.endpoints))}{self.prefix or ''}"


def _read_store_address(text: str) -> StoreAddress:
    before, url, after = text.partition("://")
    if url and before in STORES and STORES[before].of_one_machine:
        if not os.path.isabs(after):
            raise ValueError(f"write the whole path of a folder, from / on: {before}:///FOLDER")
        return StoreAddress((), before, folder=Path(os.path.normpath(after)))
    if "@" in text:
        raise ValueError(
            "a user and a password do not belong here: use --etcd-user NAME and --etcd-password-file FILE"
        )
    if url and (before not in STORES or not STORES[before].cluster):
        raise ValueError(
            "write HOST:PORT,... or etcd://HOST:PORT,...; TLS is used when --etcd-ca FILE is given"
        )
    hosts, slash, path = (after if url else text).partition("/")
    if (slash and not url) or (path and not re.fullmatch(_PREFIX, path)):
        names = f"up to 8 names between slashes, each of {IDENTIFIER.expects}"
        raise ValueError(f"only etcd://HOST:PORT,.../PREFIX has a prefix of its keys, of {names}")
    places = tuple(host_and_port(host) for host in hosts.split(","))
    return StoreAddress(places, before if url else None, f"/{path.rstrip('/')}" if path else None)


_PREFIX = r"[A-Za-z0-9._-]{1,64}(/[A-Za-z0-9._-]{1,64}){0,7}/?"


def _without_credentials(text: str) -> str:
    """Leaves out all of a URL that may hold a password, before an @ or in a query: no rule finds just the password."""
    return "***" if re.search(r"[@?#]", text) else text


STORE_ADDRESS = Parser(
    "HOST[:PORT], etcd://HOST:PORT,.../PREFIX or local:///FOLDER",
    _read_store_address,
    _without_credentials,
    "HOST[:PORT],...",
)

DEFAULT_POOL = "pool"
LOCAL_POOL = ("127.0.0.1", 29401)
"""Where a c10d store of a pool is that has no endpoint: on this machine, hosted by its first daemon."""
STATIC_HOST, STATIC_PORT = "127.0.0.1", 29500
"""torchrun's defaults for a static rendezvous."""

MEETING = OptionGroup("Rendezvous")
BACKEND: Option[str | None] = MEETING.option(
    "rdzv-backend",
    Parser(in_words(STORES), read_backend, metavar="STORE"),
    f"{'; '.join(kind.described for kind in STORES.values())} (default: what the endpoint's URL says; {ALONE} with one"
    f" node and no endpoint; else {DEFAULT})",
)
ENDPOINT: Option[StoreAddress | None] = MEETING.option(
    "rdzv-endpoint",
    STORE_ADDRESS,
    f"the store, the same on all nodes. {'. '.join(f'{kind}: {kind.place}' for kind in STORES.values() if kind.place)}",
)
MASTER_ADDR: Option[str | None] = MEETING.option(
    "master-addr",
    Parser("a host name or an IP address, without port", read_host, metavar="HOST"),
    "torchrun's static rendezvous: without --rdzv-endpoint the c10d store of several nodes is at this host (default"
    " there: 127.0.0.1). MASTER_ADDR of the workers is chosen anew in every generation",
)
MASTER_PORT: Option[int | None] = MEETING.option(
    "master-port",
    whole_number(1, 65535),
    f"the port of the store at --master-addr (default there: {STATIC_PORT})",
)
NODE_RANK: Option[int | None] = MEETING.option(
    "node-rank",
    whole_number(0, MOST_NODES - 1),
    "of nodes that join together, those with lower numbers get the lower ranks",
)
JOB_ID: Option[str | None] = MEETING.option(
    "rdzv-id",
    Parser(f"{IDENTIFIER.expects}, or none", read_job_id, metavar="ID"),
    "the job's name, the same on all nodes; required with etcd (default, also none: 'default' with a c10d endpoint,"
    " which belongs to one job; a new one if this agent starts the store)",
)
STANDALONE = MEETING.flag(
    "standalone",
    "one node and a memory store, whatever else is said of nodes and rendezvous",
)
SLURM = MEETING.flag(
    "slurm",
    "srun has started one agent on each node: endpoint, job id, nodes, workers and --stop-grace follow from Slurm's"
    " environment where they are not given; the node leaves before the job's end, and ends with 80 after SIGUSR1 or"
    " SIGUSR2",
)
POOL: Option[str | None] = MEETING.option(
    "pool",
    IDENTIFIER,
    "with nothing to run: the pool of this node (default: pool); else the job meets in the store of this pool",
)
JOIN_TIMEOUT: Option[float] = MEETING.option(
    "join-timeout",
    duration(1.0),
    "give up when --min-nodes nodes have not met within this time",
    default="600s",
    conf=("join_timeout",),
)
LAST_CALL: Option[float] = MEETING.option(
    "last-call",
    duration(0.0),
    "first start only: once --min-nodes nodes are there, wait this long for more",
    default="1s",
    conf=("last_call_timeout",),
)
LEASE_TTL: Option[float] = MEETING.option(
    "lease-ttl",
    duration(1.0),
    "a node whose lease was not renewed for that long is lost; the same on all nodes, else exit code 65",
    default="5s",
    conf=("lease_ttl",),
)

ETCD_OPTIONS = OptionGroup("Rendezvous through etcd")
ETCD_CA: Option[Path | None] = ETCD_OPTIONS.option(
    "etcd-ca",
    PATH,
    "speak TLS, with a server whose certificate an authority in this PEM file has signed",
    conf=("ca", "cacert", "ca_cert"),
)
ETCD_CERT: Option[Path | None] = ETCD_OPTIONS.option(
    "etcd-cert", PATH, "mutual TLS: this node's certificate (PEM)", conf=("cert", "ssl_cert")
)
ETCD_KEY: Option[Path | None] = ETCD_OPTIONS.option(
    "etcd-key",
    PATH,
    "mutual TLS: this node's key (PEM), of mode 600; a file of root's may be lent to a group",
    conf=("key", "ssl_cert_key"),
)
ETCD_USER: Option[str | None] = ETCD_OPTIONS.option(
    "etcd-user",
    USER,
    "etcd's name for this job; its role needs read and write on PREFIX/JOB/ alone",
    conf=("user",),
)
ETCD_PASSWORD_FILE: Option[Path | None] = ETCD_OPTIONS.option(
    "etcd-password-file",
    PATH,
    "holds the password, as private as the key; read anew at every authentication",
    conf=("password_file",),
)
ETCD_INSECURE = ETCD_OPTIONS.flag(
    "etcd-insecure",
    "allow plain text to a store that is not on this machine's loopback, of a pool also to a c10d store",
    conf=("insecure",),
)
STORE_OUTAGE_GRACE: Option[float] = ETCD_OPTIONS.option(
    "store-outage-grace",
    duration(0.0),
    "so long a job goes on after its leases can no longer be proved, while all its nodes reach each other by HTTP;"
    " 0 is off; the same on all nodes, else exit code 65",
    default="60s",
)


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """How to speak to etcd. The keys of a job are `<prefix>/<job>/...`."""

    prefix: str = PREFIX
    ca: Path | None = ETCD_CA.field()  # None: plain text
    cert: Path | None = ETCD_CERT.field()  # with `key`, for a server that asks who we are
    key: Path | None = ETCD_KEY.field()
    user: str | None = ETCD_USER.field()
    """None: no authentication by password; else the next one is given."""
    password_file: Path | None = ETCD_PASSWORD_FILE.field()  # to be read anew at every authentication


@dataclass(frozen=True, slots=True)
class RendezvousConfig:
    """Where the nodes of one job meet, and how long they wait for each other."""

    backend: str = ALONE.name
    endpoints: tuple[Endpoint, ...] = ()
    """etcd: one or more; c10d: one, or none and this agent hosts the store."""
    etcd: EtcdConfig | None = None  # with etcd only
    job_id: str = "default"
    join_timeout_s: float = JOIN_TIMEOUT.field()
    last_call_s: float = LAST_CALL.field()
    lease_ttl_s: float = LEASE_TTL.field()
    store_outage_grace_s: float = STORE_OUTAGE_GRACE.field()
    """etcd only; 0: workers stop when the lease can no longer be proved."""
    pool: str | None = POOL.field()
    """In whose store the job is, which a daemon of the pool may host; None: in one of its own."""
    node_rank: int | None = NODE_RANK.field()
    """Orders nodes that join together; None: after those that have one, in the order of their arrival."""
    folder: Path | None = None  # with local only
    cool_down_s: float = 60.0
    """How long this node stays out when the job excludes it; twice as long each further time."""

    @property
    def kind(self) -> StoreKind:
        return STORES[self.backend]

    @property
    def may_host(self) -> bool:
        """An agent of the job may host its store."""
        return self.kind.host is not None and self.pool is None

    @property
    def store_outlives_job(self) -> bool:
        """No agent of the job takes it along."""
        return self.kind.outlives_job or self.pool is not None
