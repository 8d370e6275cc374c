"""The messages to the service manager that started this agent: systemd's notify protocol, one datagram at a time.

READY is sent once everything that this node alone can refuse is checked, its HTTP server answers and signals are
handled: not later, because the store may be away for long, and that is no reason to kill the start of a unit. STATUS
is what the agent waits for, or which generation trains. WATCHDOG comes from the main thread alone: from every turn
of the loop, and before there is one from the wait for the store. An agent whose main thread is stuck falls silent,
and is killed and started again. STOPPING announces the end, from when on the manager counts its stop limit.

Invariant: sending never blocks, and never fails the agent. What could not be sent is lost, and the log says so once;
but READY, without which the manager kills the agent, is sent again at the next turns.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, MutableMapping

log = logging.getLogger(__name__)

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""Addressed to one process alone: a worker that inherited them could send in the agent's name."""

STATUS_EVERY_S = 1.0
LONGEST_STATUS = 300


class ServiceManager:
    """See the module's docstring. For the main thread. Without an address nothing is sent."""

    def __init__(self, address: str | None, watchdog_s: float | None, clock: Callable[[], float]) -> None:
        """`address` is a path, or a name in the abstract namespace that begins with `@`."""
        self._address = address.replace("@", "\0", 1) if address and address[0] == "@" else address
        self._beat_every_s = watchdog_s / 3 if watchdog_s is not None and address is not None else None
        self._clock = clock
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address is not None else None
        self._ready_waits = False
        self._stopping = False
        self._status = ""
        self._status_at = self._beat_at = float("-inf")
        self._unreachable = False

    @classmethod
    def take(cls, environ: MutableMapping[str, str], pid: int, clock: Callable[[], float]) -> ServiceManager:
        """The one that `environ` names, whose variables are taken out of it: no child may inherit them."""
        given = {name: environ.pop(name) for name in VARIABLES if name in environ}
        address, period_us, addressee = map(given.get, VARIABLES)
        watched = (period_us or "").isdecimal() and addressee in (None, str(pid))
        watchdog_s = int(period_us or 0) / 1e6 if watched else 0.0
        return cls(address or None, watchdog_s or None, clock)

    @property
    def next_beat(self) -> float | None:
        """The instant of the next turn that the watchdog needs; None without one."""
        return None if self._beat_every_s is None else self._beat_at + self._beat_every_s

    def ready(self) -> None:
        self._ready_waits = not self._send("READY=1")

    def turn(self, status: str) -> None:
        """The main thread goes on. To be called at least every second, and at `next_beat`."""
        now = self._clock()
        if self._ready_waits:
            self.ready()
        if status != self._status and now >= self._status_at + STATUS_EVERY_S and self._send_status(status):
            self._status_at = now
        beat_at = self.next_beat
        if beat_at is not None and now >= beat_at and self._send("WATCHDOG=1"):
            self._beat_at = now

    def stopping(self, status: str) -> None:
        """From now on the agent only ends. May be called again with a newer status."""
        if not self._stopping:
            self._stopping = True
            self._send("STOPPING=1")
        self._send_status(status)

    def _send_status(self, status: str) -> bool:
        sent = self._send(f"STATUS={' '.join(status.split())[:LONGEST_STATUS]}")
        if sent:
            self._status = status
        return sent

    def _send(self, message: str) -> bool:
        if self._socket is None or self._address is None:
            return True
        try:
            self._socket.sendto(message.encode(errors="replace"), socket.MSG_DONTWAIT, self._address)
        except OSError as error:
            if not self._unreachable:
                log.warning("the service manager cannot be reached at NOTIFY_SOCKET: %s", error.strerror)
            self._unreachable = True
            return False
        self._unreachable = False
        return True
