"""How to reach an etcd cluster, and where in it a job lives: plain data, cheap to import.

Every key of a job is under `<prefix>/<job>/`. The closing slash keeps `job1` out of `job10`, and a job's name
is one part of the path, whatever characters it has, so that one role of etcd can be granted one job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """The members are verified against `ca`, each by the host that its endpoint names: the certificate of an
    endpoint given as a name must hold this name, and that of one given as an IP address must hold this address.
    With `cert` and `key` we prove who we are; etcd takes the certificate's CN for the user where it has no token.

    The files are read again for each connection, so that renewed certificates come into use by themselves.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class EtcdLogin:
    """`password` is called at each authentication, so that a changed password file is picked up."""

    user: str
    password: Callable[[], str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    endpoints: tuple[tuple[str, int], ...]
    """Hosts, names or IP addresses, with their ports."""
    prefix: str = "/elastic-agent"
    tls: EtcdTls | None = None
    login: EtcdLogin | None = None

    def root(self, job: str) -> str:
        """What every key of the job begins with."""
        return f"{self.prefix.rstrip('/')}/{quote(job, safe='')}/"

    def __str__(self) -> str:
        return ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.endpoints
        )
