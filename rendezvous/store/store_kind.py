"""What the rest of the program needs to know of one kind of store before a store of that kind is opened.

Plain data, cheap to import: torch and gRPC take seconds and tens of megabytes, so a kind imports its store when one is
opened, and not earlier. And `retry_connect`, since the store may not be there yet: other nodes, or people, may only be
about to start it.
"""

from __future__ import annotations

import logging
import math
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..errors import StoreRefused, StoreUnavailable
from ..records import Endpoint, World
from .interface import Store

KEEP_ALIVES_PER_TTL = 5
"""Several may be lost before the lease counts as bad at 0.6 of its time to live. A store answers within the time
between two of them, or not at all."""
LEAST_ANSWER_TIMEOUT_S = 0.5
"""With a store that does not answer. A connection that was reset is found out only by asking again, and there must be
time for that before the lease is no proof any more."""


@dataclass(frozen=True, slots=True)
class Tls:
    """The servers are verified against `ca`, each by the host that its endpoint names: the certificate of an
    endpoint given as a name must hold this name, and that of one given as an IP address must hold this address.
    With `cert` and `key` we prove who we are; etcd takes the certificate's CN for the user where it has no token.

    The files are read again for each connection, so that renewed certificates come into use by themselves.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class Login:
    """`password` is called at each authentication, so that a changed password file is picked up."""

    user: str
    password: Callable[[], str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach the store of one job."""

    endpoints: tuple[Endpoint, ...]
    job: str
    timeout_s: float
    """For how long to try until the store answers."""
    lease_ttl_s: float | None
    """None: no lease is taken and nothing is written, because this process only looks."""
    folder: Path | None = None
    """Where the store is, for a kind that has a folder in place of endpoints."""
    prefix: str = ""
    tls: Tls | None = None
    login: Login | None = None

    @property
    def answer_timeout_s(self) -> float:
        """For how long to wait for one answer."""
        if self.lease_ttl_s is None:
            return self.timeout_s
        return max(LEAST_ANSWER_TIMEOUT_S, self.lease_ttl_s / KEEP_ALIVES_PER_TTL)

    @property
    def where(self) -> str:
        return ",".join(map(str, self.endpoints))


def check_of(job: str) -> str:
    """The job that checks the nodes of this one. Where it hosts the store, the store ends with the check, so the agents
    of the job wait for its end."""
    return f"{job[:120]}.check"


@dataclass(frozen=True, slots=True)
class StoreKind:
    name: str
    help: str
    """What it is, for the option that chooses it."""
    connect: Callable[[Access], Store]
    """Raises StoreError."""
    load: Callable[[], object] = lambda: None
    """Imports what `connect` needs, for a process that has the time now: torch or gRPC take seconds."""
    port: int | None = None
    """Where an endpoint names none. None: this kind has no endpoints."""
    offer: Callable[[Access], Store] | None = None
    """For a kind with a folder of one machine in place of endpoints, which only pools use: makes the store there, if
    there is none, and connects to it. Raises StoreError."""
    cluster: bool = False
    """Several endpoints may be given, of the members of one cluster; or a URL, whose scheme is the name."""
    host: Callable[[socket.socket, str, World | None, Callable[[str], None]], Store] | None = None
    """For a kind that one of the job's agents hosts. Called with a socket that listens, the job, the newest world of an
    earlier host, and what is to be called with each new one before it is seen by all."""
    place: str = ""
    """What an endpoint of it is, for the option that gives one."""
    aliases: tuple[str, ...] = ()

    @property
    def of_one_machine(self) -> bool:
        return self.offer is not None

    @property
    def shared(self) -> bool:
        """A second node can join."""
        return self.port is not None or self.of_one_machine

    def life_s(self, lease_ttl_s: float) -> float:
        """Of a lease that is not confirmed. Without end where no other node can be given its place: there an agent that
        stood still, for however long, has lost nothing, and the process takes store and lease with it."""
        return lease_ttl_s if self.shared else math.inf

    @property
    def forgets_leases(self) -> bool:
        """They end with the agent that hosts the store, while the store may come back."""
        return self.host is not None

    @property
    def outlives_job(self) -> bool:
        """It serves many jobs, and no agent of one takes it along."""
        return self.cluster

    @property
    def described(self) -> str:
        """Its names and what it is."""
        also = f" (also {', '.join(self.aliases)})" if self.aliases else ""
        return f"{self.name}{also}: {self.help}"

    def __str__(self) -> str:
        return self.name


R = TypeVar("R")

PAUSE_S = 0.25
"""Between two tries, drawn from zero to this: all nodes of a job start together."""

log = logging.getLogger(__name__)


def retry_connect(try_once: Callable[[], R], deadline: float, rng: random.Random) -> R:
    """Returns as soon as `try_once` does. Raises its StoreUnavailable at the deadline, and other errors at once."""
    logged = ""
    while True:
        try:
            return try_once()
        except StoreRefused:
            raise
        except StoreUnavailable as error:
            if str(error) != logged:
                logged = str(error)
                log.info("no rendezvous store yet: %s", logged)
            pause_s = rng.uniform(0.0, PAUSE_S)
            if time.monotonic() + pause_s >= deadline:
                raise
            time.sleep(pause_s)
