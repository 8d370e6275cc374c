"""Ports: bind, keep, hand over. Never find a free port, close it, and hope.

A port is ours from the moment `bind_listener` returns a socket that is bound *and listening*: clients that come
early queue in its backlog instead of being refused, and no other process can take the port between "found" and "used".
The socket is close-on-exec, and handed over explicitly: `socket.detach()` for `TCPStore(master_listen_fd=...)`, which
closes it at its end, `pass_fds` for a child.

A *round* tries every port of a `PortRange` once, from a random offset, so that agents that start at the same instant
spread over the range. Only when a whole round finds every port taken is there a wait, then the next round. A *taken*
port is EADDRINUSE, from bind or from listen; any other errno would be the same next time, and fails at once.

Invariant: no two listeners on one port. SO_REUSEADDR is set so that connections of a predecessor in TIME_WAIT do
not block us; with it, Linux lets two sockets bind one port as long as neither listens, and refuses the second
`listen`. That is why listening is part of taking the port.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import random
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

from tenacity import RetryCallState, Retrying, retry_if_result, stop_after_delay, wait_random_exponential

from .exits import REMEDIES

log = logging.getLogger(__name__)

# A thousand ranks connecting at once must not meet a full queue; the kernel caps it at net.core.somaxconn.
BACKLOG = 4096

# Stateless: agents started, or forked, alike still draw different offsets.
OS_RANDOM = random.SystemRandom()

_REMEDIES = REMEDIES | {
    errno.EADDRNOTAVAIL: "no interface of this machine has that address; choose one that `ip address` lists",
    errno.EACCES: "this user may not bind it; choose a port above 1023, or grant CAP_NET_BIND_SERVICE",
    errno.EAFNOSUPPORT: "this machine has no IPv6; choose an IPv4 address",
}


class PortError(Exception):
    """There is no such port here: the text says why, and what to do about it."""


class PortLacking(PortError):
    """This machine lacks descriptors or memory for it: one moment later it may not."""


@dataclass(frozen=True, slots=True)
class PortRange:
    """The ports `first` to `last`, both included. 0 alone is any free port: the kernel chooses."""

    first: int
    last: int

    def __post_init__(self) -> None:
        for port in (self.first, self.last):
            if not 1 <= port <= 65535 and not self.any_free:
                raise PortError(f"port {port} of {self} is not between 1 and 65535")
        if self.first > self.last:
            raise PortError(f"port range {self} is empty: write the smaller port first")

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """`"29500-29600"` or `"29500"`: ports that the user named, so never 0."""
        match = re.fullmatch(r"([1-9][0-9]{0,4})(?:-([1-9][0-9]{0,4}))?", text)
        if match is None:
            raise PortError(f"{text!r} is not a port or a range of ports: write 29500 or 29500-29600")
        return cls(int(match[1]), int(match[2] or match[1]))

    @property
    def any_free(self) -> bool:
        return self.first == self.last == 0

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def one_round(self, rng: random.Random) -> list[int]:
        """Every port once, in order, from a random offset."""
        offset = rng.randrange(len(self))
        return [self.first + (offset + i) % len(self) for i in range(len(self))]


TRIES_FOR_S = 10.0
"""An owner that was killed a moment ago frees a port within milliseconds; one that is drained takes seconds."""


def bind_listener(
    address: str,
    ports: PortRange | int,
    purpose: str,
    *,
    tries_for_s: float = TRIES_FOR_S,
    rng: random.Random = OS_RANDOM,
) -> socket.socket:
    """Return a listening TCP socket on `address` and one of `ports` (an int is one port, 0 any free one).

    `address` is an IPv4 or IPv6 address of this machine, not a name. `purpose` says in errors what the port is for.
    Raises PortError, for taken ports after `tries_for_s`.
    """
    if isinstance(ports, int):
        ports = PortRange(ports, ports)

    def one_round() -> socket.socket | None:
        found = (_listen(address, port, purpose) for port in ports.one_round(rng))
        return next(filter(None, found), None)

    def before_sleep(state: RetryCallState) -> None:
        if state.attempt_number == 1:
            log.info("trying for %g s to have %s of %s: %s", tries_for_s, ports, address, owner_of(ports))

    listener = Retrying(
        retry=retry_if_result(lambda found: found is None),
        wait=wait_random_exponential(multiplier=0.05, max=1.0),
        stop=stop_after_delay(tries_for_s),
        before_sleep=before_sleep,
        retry_error_callback=lambda _: None,
    )(one_round)
    if listener is None:
        raise PortError(
            f"cannot listen on {address} for {purpose}: {ports} is taken ({owner_of(ports)}); tried for "
            f"{tries_for_s:g} s. Stop the owner, or choose another port or a wider range"
        )
    return listener


def owner_of(ports: PortRange) -> str:
    return "the kernel has no free port left" if ports.any_free else find_owner(ports.first)


def find_owner(port: int) -> str:
    """Who has `port`, at whichever address of this machine, in words, as an error has them. Never raises."""
    import psutil

    with contextlib.suppress(OSError, psutil.Error):
        seen = [
            one for one in psutil.net_connections("tcp") if one.pid and one.laddr and one.laddr.port == port
        ]
        seen.sort(key=lambda one: one.status != psutil.CONN_LISTEN)  # its connections have the port, too
        return f"pid {seen[0].pid}, {psutil.Process(seen[0].pid).name()}" if seen else OWNER_UNKNOWN
    return OWNER_UNKNOWN


OWNER_UNKNOWN = "owner unknown: a process of another user or container, or a connection that ends within 60 s"


class OfferedPort:
    """The port that this node offers for the store of the next generation's workers, bound and listening."""

    def __init__(self, listener: socket.socket, bind: Callable[[], socket.socket]) -> None:
        """`bind` opens another one. It raises PortError."""
        self.listener = listener
        self._bind = bind

    def renew(self) -> int:
        """Close it and offer another: no worker may meet on one that belongs to a past generation."""
        self.listener.close()
        self.listener = self._bind()
        return int(self.listener.getsockname()[1])


def _listen(address: str, port: int, purpose: str) -> socket.socket | None:
    """One try on one port: the listening socket, or None if the port is taken."""
    try:
        version = ipaddress.ip_address(address).version
    except ValueError as exc:
        raise PortError(f"cannot listen for {purpose}: {address!r} is not an IP address") from exc
    listener = None
    try:
        listener = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # getaddrinfo only for the scope of fe80::1%eth0: with a numeric address it asks no name server.
        listener.bind(socket.getaddrinfo(address, port, flags=socket.AI_NUMERICHOST)[0][4])
        listener.listen(BACKLOG)
    except OSError as exc:
        if listener is not None:
            listener.close()
        if exc.errno == errno.EADDRINUSE:
            return None
        remedy = _REMEDIES.get(exc.errno or 0, "trying again will not change that; choose another address")
        refusal = PortLacking if exc.errno in REMEDIES else PortError
        raise refusal(
            f"cannot listen on {address} port {port} for {purpose}: {exc.strerror}: {remedy}"
        ) from exc
    return listener
