"""The sockets of an agent, bound before anything is started: a port that cannot be had is refused by its number."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass

from ...health.metrics import Metrics
from ...rendezvous.records import Endpoint
from ..common.exits import CannotStart, ExitCode
from ..common.ports import FIXED_PORT, ONE_TRY, PortError, bind_listener, find_owner
from ..configuration.config import Config
from ..machine.network import LOOPBACK
from ..rendezvous_io.store_opening import Binder, store_listener

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listeners:
    workers: socket.socket
    """For the store of the next generation's workers."""
    http: socket.socket
    store: socket.socket | None
    """For the rendezvous store, if this agent is to host it."""
    memory: socket.socket | None
    """For the memory servers and workers of other nodes, if there can be any."""


def binder(config: Config, metrics: Metrics) -> Binder:
    """Binds a port for a purpose, `None` for one that the configuration allows, and counts how that goes."""

    def bind(address: str, port: int | None, purpose: str) -> socket.socket:
        ports = port if port is not None else config.port_range or 0
        waiting = False

        def attempted(purpose: str, ok: bool) -> None:
            metrics.port_bind_attempts_total.inc(purpose=purpose)
            metrics.port_bind_failures_total.inc(not ok, purpose=purpose)

        def wait(seconds: float) -> None:
            nonlocal waiting
            if not waiting:
                waiting = True
                owner = find_owner(address, ports if isinstance(ports, int) else ports.first)
                log.info(
                    "waiting up to %g s for port %s of %s, for %s: it is taken (%s)",
                    FIXED_PORT.timeout_s,
                    ports,
                    address,
                    purpose,
                    owner.words,
                )
            time.sleep(seconds)

        return bind_listener(address, ports, purpose, on_attempt=attempted, sleep=wait)

    return bind


def http_listener(config: Config, address: str, bind: Binder) -> socket.socket:
    """For metrics and probes. Raises PortError."""
    http = config.http_address
    if http is None and config.solitary:
        http = Endpoint(LOOPBACK, 0)
    return bind(http.address, http.port, "metrics") if http is not None else bind(address, None, "metrics")


def memory_listener(config: Config, address: str) -> socket.socket | None:
    """Where no port is left the agent does without."""
    if config.solitary:
        return None
    try:
        return bind_listener(address, config.port_range or 0, "copies in memory", policy=ONE_TRY)
    except PortError as error:
        log.warning("other nodes cannot read copies in this node's memory, nor keep replicas here: %s", error)
        return None


def bind_all(
    config: Config, endpoint: Endpoint | None, address: str, bind: Binder, *, copies: bool
) -> Listeners:
    """`copies`: of the workers' states, in memory. Raises CannotStart."""
    try:
        return Listeners(
            bind(address, None, "master"),
            http_listener(config, address, bind),
            store_listener(config, endpoint, address, bind),
            memory_listener(config, address) if copies else None,
        )
    except PortError as error:
        raise CannotStart(ExitCode.NOT_HERE, str(error)) from error
