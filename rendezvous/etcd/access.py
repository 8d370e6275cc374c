"""How to reach an etcd cluster, and where in it a job lives: plain data, cheap to import.

Every key of a job is under `<prefix>/<job>/`. The closing slash keeps `job1` out of `job10`, and a job's name
is one part of the path, whatever characters it has, so that one role of etcd can be granted one job.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from ..store.store_kind import Login, Tls

PREFIX = "/elastic-agent"


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    endpoints: tuple[tuple[str, int], ...]
    """Hosts, names or IP addresses, with their ports."""
    prefix: str = PREFIX
    tls: Tls | None = None
    login: Login | None = None

    def root(self, job: str) -> str:
        """What every key of the job begins with."""
        return f"{self.prefix.rstrip('/')}/{quote(job, safe='')}/"

    def __str__(self) -> str:
        return ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.endpoints
        )
