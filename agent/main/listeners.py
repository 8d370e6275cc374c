"""The sockets of an agent, bound before anything is started: a port that cannot be had is refused by its number."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass

from ...rendezvous.records import Endpoint
from ..common.exits import CannotStart, ExitCode
from ..common.ports import PortError, bind_listener
from ..configuration.config import Config
from ..machine.network import LOOPBACK
from ..rendezvous_io.store_opening import store_listener

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


def bind_allowed(config: Config, address: str, purpose: str) -> socket.socket:
    """On a port that the configuration allows. Raises PortError."""
    return bind_listener(address, config.port_range or 0, purpose)


def http_listener(config: Config, address: str) -> socket.socket:
    """For metrics and probes. Raises PortError."""
    http = config.http_address
    if http is None and config.solitary:
        http = Endpoint(LOOPBACK, 0)
    if http is None:
        return bind_allowed(config, address, "metrics")
    return bind_listener(http.address, http.port, "metrics")


def memory_listener(config: Config, address: str) -> socket.socket | None:
    """Where no port is left the agent does without."""
    if config.solitary:
        return None
    try:
        return bind_listener(address, config.port_range or 0, "copies in memory", tries_for_s=0.0)
    except PortError as error:
        log.warning("other nodes cannot read copies in this node's memory, nor keep replicas here: %s", error)
        return None


def bind_all(config: Config, endpoint: Endpoint | None, address: str, *, copies: bool) -> Listeners:
    """`copies`: of the workers' states, in memory. Raises CannotStart."""
    try:
        return Listeners(
            bind_allowed(config, address, "master"),
            http_listener(config, address),
            store_listener(config, endpoint, address),
            memory_listener(config, address) if copies else None,
        )
    except PortError as error:
        raise CannotStart(ExitCode.NOT_HERE, str(error)) from error
