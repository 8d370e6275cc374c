"""Which address of an etcd cluster to talk to: one at a time, the next one when it gives trouble.

Names are resolved in a thread of their own, because a dead name server blocks for longer than a lease lives. The
last good answer stays in use until a better one comes.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...threads import Thread

RESOLVE_PAUSE_S = 1.0
"""Trouble comes in bursts; names are not asked more often than this."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    """As it was given to us: what the member's certificate must hold."""
    ip: str
    port: int

    @property
    def target(self) -> str:
        """In gRPC's words."""
        return f"ipv6:[{self.ip}]:{self.port}" if ":" in self.ip else f"ipv4:{self.ip}:{self.port}"

    def __str__(self) -> str:
        if self.ip != self.host:
            return f"{self.host}:{self.port} ({self.ip})"
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def following(current: Address | None, ring: Sequence[Address]) -> Address:
    """The one after `current`; the first if it is no longer there."""
    if current not in ring:
        return ring[0]
    return ring[(ring.index(current) + 1) % len(ring)]


def is_ip(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return True
    return False


def resolve(host: str, port: int) -> tuple[str, ...]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[4][0]) for address in found))


class Addresses:
    """The addresses of the members, and names looked up in a thread of their own."""

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        resolve: Callable[[str, int], tuple[str, ...]] = resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._resolve = resolve
        self._clock = clock
        self._ips: dict[tuple[str, int], tuple[str, ...]] = {
            endpoint: (endpoint[0],) for endpoint in self._endpoints if is_ip(endpoint[0])
        }
        self._names = tuple(endpoint for endpoint in self._endpoints if not is_ip(endpoint[0]))
        self._asking: Thread | None = None
        self._ask_again_at = clock()
        self._lock = threading.Lock()
        self.problem = ""
        """Why a name could not be resolved, the last time that we asked."""

    @property
    def ring(self) -> tuple[Address, ...]:
        """Every address known now, in the order of the endpoints."""
        with self._lock:
            return tuple(
                dict.fromkeys(
                    Address(host, ip, port)
                    for host, port in self._endpoints
                    for ip in self._ips.get((host, port), ())
                )
            )

    def refresh(self, wait_s: float = 0.0) -> None:
        """Ask for the names again, without waiting for the answer longer than this."""
        with self._lock:
            if self._names and self._asking is None and self._clock() >= self._ask_again_at:
                self._ask_again_at = self._clock() + RESOLVE_PAUSE_S
                self._asking = Thread(self._ask, "etcd-names", self._asked)
                self._asking.start()
            asking = self._asking
        if asking is not None:
            asking.join(wait_s)

    def _ask(self) -> None:
        problem = ""
        for endpoint in self._names:
            try:
                ips = self._resolve(*endpoint)
            except OSError as error:
                problem = f"cannot resolve {endpoint[0]!r}: {error}"
                continue
            with self._lock:
                self._ips[endpoint] = ips
        if problem and problem != self.problem:
            log.warning("%s; known addresses stay in use", problem)
        with self._lock:
            self.problem = problem
            self._asked()

    def _asked(self) -> None:
        self._asking = None
