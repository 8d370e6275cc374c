"""The network of this machine that the job can use, and the wait for it.

`discover_network` reads the interfaces, resolves the names that the configuration gives, asks the kernel for routes,
and lets `choice.choose` decide. Nothing is opened or changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ....rendezvous.records import Endpoint
from ...common.exits import CannotStart, ExitCode
from ...configuration.config import Config, ConfigError, Problem
from .addresses import AddressError, default_source, endpoint_address, is_loopback, resolve, source_address
from .choice import NCCL_SOCKET_IFNAME, HostNetwork, NetworkChoice, NetworkRequest, NotReady, choose
from .interfaces import interfaces, rdma_ports
from .socket_names import check_socket_names, nccl_waits_for

log = logging.getLogger(__name__)

RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class Network:
    """What was found. `endpoint` is that of a store which another agent hosts, as an address; None: there is none."""

    choice: NetworkChoice
    endpoint: Endpoint | None = None


def discover_network(config: Config, environ: Mapping[str, str]) -> Network | NotReady:
    """Now. Raises ConfigError with all that can never work. `environ` is what workers inherit."""
    try:
        here = interfaces()
    except OSError as error:
        if not config.solitary:
            expected = f"a netlink socket, with which NCCL, too, lists the interfaces, but: {error}"
            advice = "allow it (systemd: RestrictAddressFamilies with AF_NETLINK)"
            raise ConfigError([Problem("this node's network", None, expected, advice, here=True)]) from error
        here = ()
    problems = check_socket_names(environ, here)
    wanted = NetworkRequest(config.network_interface, memory=config.solitary, alone=config.nodes.max == 1)
    unknown: AddressError | None = None
    addresses: list[str | None] = []
    try:
        if config.local_addr is not None:
            wanted = replace(wanted, address=resolve(config.local_addr, 0))
        if config.rendezvous.kind.host is not None or wanted.address is None:
            addresses = _store_addresses(config)
            wanted = replace(wanted, towards=_towards(addresses, len(config.rendezvous.endpoints)))
    except AddressError as error:
        unknown = error
    routed = source_address(wanted.towards) if wanted.towards is not None else None
    choice: NetworkChoice | NotReady | None = None
    try:
        choice = choose(wanted, HostNetwork(here, routed, default_source(), rdma_ports()))
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    if unknown is not None:
        advice = "check --rdzv-endpoint and --local-addr, and /etc/hosts and DNS on this node"
        return NotReady(f"a host name ({unknown})", advice)
    if not isinstance(choice, NetworkChoice):
        assert choice is not None, "what was refused has been raised"
        return choice
    if nccl_waits_for(environ, here):
        value = f"{NCCL_SOCKET_IFNAME}={environ[NCCL_SOCKET_IFNAME]}"
        return NotReady(f"an interface of {value} to come up", f"bring it up, or unset {NCCL_SOCKET_IFNAME}")
    return Network(choice, _endpoint(config, addresses, choice))


def wait_for_network(
    config: Config, environ: Mapping[str, str], sleep: Callable[[float], None] = time.sleep
) -> Network:
    """Looks for as long as --network-wait. Raises CannotStart."""
    give_up_at = time.monotonic() + config.network_wait_s
    logged = ""
    while True:
        try:
            found = discover_network(config, environ)
        except ConfigError as error:
            raise CannotStart(error.code, str(error)) from error
        if isinstance(found, Network):
            return found
        if time.monotonic() >= give_up_at:
            waited = f"waited {config.network_wait_s:g} s (--network-wait) for {found.missing}"
            raise CannotStart(ExitCode.NO_NETWORK, f"{waited}: {found.advice}")
        if found.missing != logged:
            logged = found.missing
            log.info("waiting up to %g s (--network-wait) for %s", config.network_wait_s, logged)
        sleep(RETRY_S)


def _store_addresses(config: Config) -> list[str | None]:
    """The address of each endpoint that has one; None for this machine's own name. Raises AddressError if all fail."""
    addresses: list[str | None] = []
    errors = []
    for given in config.rendezvous.endpoints:
        try:
            addresses.append(endpoint_address(given))
        except AddressError as error:
            errors.append(str(error))
    if errors and not addresses:
        raise AddressError("; ".join(errors))
    return addresses


def _towards(addresses: list[str | None], given: int) -> str | None:
    """The address whose route is this node's way to the others."""
    distant = [address for address in addresses if address is not None and not is_loopback(address)]
    if distant:
        return next((address for address in distant if source_address(address) is not None), distant[0])
    # The others may be elsewhere than a member on loopback, so it counts only when all are.
    return addresses[0] if addresses and None not in addresses and len(addresses) == given else None


def _endpoint(config: Config, addresses: list[str | None], choice: NetworkChoice) -> Endpoint | None:
    if config.rendezvous.kind.host is None or not addresses:
        return None
    ((given,), (address,)) = config.rendezvous.endpoints, addresses
    return Endpoint(choice.address if address is None else address, given.port)
