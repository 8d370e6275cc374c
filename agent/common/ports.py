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

Errors, by what the caller does: `PortConfigError` fix the configuration, `PortTaken` free the port or choose another,
`PortLacking` try again (`exits.Lack`).
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
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
    """Base of what this module raises."""


class PortConfigError(PortError):
    """The setting cannot work on this machine; trying again cannot help. Fix the configuration."""


class PortLacking(PortError):
    """This machine lacks descriptors or memory for it."""


@dataclass(frozen=True, slots=True)
class PortOwner:
    """Who keeps a port from being bound: `pid` where it can be seen, and always `words` for the operator."""

    pid: int | None
    words: str


class PortTaken(PortError):
    """Every port was taken for the whole timeout; `owner` holds the first of `ports`."""

    def __init__(self, address: str, ports: PortRange, purpose: str, owner: PortOwner, tried_s: float):
        if ports.any_free:
            what, remedy = "no free port is left", "Widen net.ipv4.ip_local_port_range, or name a port."
        elif len(ports) == 1:
            what, remedy = f"port {ports} is taken ({owner.words})", "Stop the owner, or choose another port."
        else:
            what = f"every port of {ports} is taken (for example {ports.first}: {owner.words})"
            remedy = "Stop the owners, or choose a wider range."
        super().__init__(
            f"cannot listen on {address} for {purpose}: {what}; tried for {tried_s:g} s. {remedy}"
        )


@dataclass(frozen=True, slots=True)
class PortRange:
    """The ports `first` to `last`, both included. 0 alone is any free port: the kernel chooses."""

    first: int
    last: int

    def __post_init__(self) -> None:
        for port in (self.first, self.last):
            if not 1 <= port <= 65535 and not self.any_free:
                raise PortConfigError(f"port {port} of {self} is not between 1 and 65535")
        if self.first > self.last:
            raise PortConfigError(f"port range {self} is empty: write the smaller port first")

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """`"29500-29600"` or `"29500"`: ports that the user named, so never 0."""
        match = re.fullmatch(r"([1-9][0-9]{0,4})(?:-([1-9][0-9]{0,4}))?", text)
        if match is None:
            raise PortConfigError(f"{text!r} is not a port or a range of ports: write 29500 or 29500-29600")
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
    Raises PortConfigError, PortTaken, PortLacking: see the module's docstring for what to do about each.
    """
    if isinstance(ports, int):
        ports = PortRange(ports, ports)

    def one_round() -> socket.socket | None:
        found = (_listen(address, port, purpose) for port in ports.one_round(rng))
        return next(filter(None, found), None)

    def before_sleep(state: RetryCallState) -> None:
        if state.attempt_number == 1:
            owner = find_owner(ports.first).words
            log.info("trying for %g s to have %s of %s: %s", tries_for_s, ports, address, owner)

    listener = Retrying(
        retry=retry_if_result(lambda found: found is None),
        wait=wait_random_exponential(multiplier=0.05, max=1.0),
        stop=stop_after_delay(tries_for_s),
        before_sleep=before_sleep,
        retry_error_callback=lambda _: None,
    )(one_round)
    if listener is None:
        raise PortTaken(address, ports, purpose, find_owner(ports.first), tries_for_s)
    return listener


def find_owner(port: int) -> PortOwner:
    """Who blocks `port`, at whichever address of this machine.

    A process of another user or container is hidden, and some ports have no process at all: the answer then says so.
    Never raises: it words an error that is already on its way.
    """
    import psutil

    try:
        sockets = [one for one in psutil.net_connections("tcp") if one.laddr and one.laddr.port == port]
    except (OSError, psutil.Error) as error:
        return PortOwner(None, f"owner unknown: {error}")
    if not sockets:
        return PortOwner(None, "owner unknown: no process listens there now, it was freed or never listened")
    # A listener's connections have its port too: name the listener if there is one, else any live socket.
    found = min(sockets, key=lambda each: (each.status != psutil.CONN_LISTEN, each.pid is None))
    closing = (psutil.CONN_TIME_WAIT, psutil.CONN_FIN_WAIT1, psutil.CONN_FIN_WAIT2, psutil.CONN_LAST_ACK)
    if found.pid is None and found.status in (*closing, psutil.CONN_CLOSING):
        return PortOwner(None, "no process: a closed connection lingers, the kernel frees it within 60 s")
    if found.pid is None:
        return PortOwner(None, "owner unknown: a process of another container or user, which is hidden")
    try:
        command = psutil.Process(found.pid).name()
    except psutil.Error:
        command = "which ended meanwhile"
    itself = ", this agent itself: two of its settings name one port" if found.pid == os.getpid() else ""
    return PortOwner(found.pid, f"pid {found.pid}, {command}{itself}")


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
        raise PortConfigError(f"cannot listen for {purpose}: {address!r} is not an IP address") from exc
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
        refusal = PortLacking if exc.errno in REMEDIES else PortConfigError
        raise refusal(
            f"cannot listen on {address} port {port} for {purpose}: {exc.strerror}: {remedy}"
        ) from exc
    return listener
