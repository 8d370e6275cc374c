"""The one decision about the network: which interface and which address of this node its job uses.

The store, MASTER_ADDR, the address of metrics and probes, NCCL, gloo and TensorPipe all follow it, so that no two of
them pick different cables. `discover_network` reads the interfaces, resolves the names that the configuration gives,
asks the kernel for routes, and lets `choose` decide: a pure function over the configuration (`NetworkRequest`) and what
was found on the machine (`HostNetwork`). The user's choice comes first, then the route to the rendezvous, then the
default route, then the fastest interface that is up. What is only missing for now (an interface that is down, a route
that is not there) is `NotReady`, for which `wait_for_network` waits; what can never work is a `ConfigError`. Nothing is
opened or changed.

Links and addresses come from getifaddrs, which NCCL and gloo read, too; RDMA ports from sysfs.

Words: *plumbing* is an interface that joins containers or machines of this host, and is alike on every node; it is
taken only by name. A *tunnel* is taken by name, or where a route leads.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import psutil

from ...rendezvous.records import Endpoint
from ..common.exits import CannotStart, ExitCode
from ..common.variables import Variable
from ..configuration.config import Config, ConfigError, Problem
from ..workers.processes.proc import read

log = logging.getLogger(__name__)

IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Address: TypeAlias = ipaddress.IPv4Interface | ipaddress.IPv6Interface
"""One of an interface, with its subnet."""

LOOPBACK = "127.0.0.1"

ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of the ranges kept for documentation: never contacted, only asked for the route towards them."""

RETRY_S = 0.25

PLUMBING = (
    "docker", "br-", "veth", "podman", "lxc", "lxd", "virbr", "vnet",
    "cni", "cali", "vxlan.calico", "cilium", "flannel", "weave", "kube", "nodelocaldns",
    "tailscale",
)  # fmt: skip
"""How their names begin. Tailscale's is here because it would carry a whole training between neighbours."""

TUNNELS = ("wg", "tun", "tap", "ppp", "zt", "utun", "nebula", "gre", "ipip")

MOST_LISTED = 12


# --- What there is


@dataclass(frozen=True, slots=True)
class Interface:
    """`up`: switched on, with a carrier. `speed_mbps` is None where the kernel does not know it."""

    name: str
    up: bool
    addresses: tuple[Address, ...] = ()
    mtu: int = 1500
    speed_mbps: int | None = None

    @property
    def loopback(self) -> bool:
        return any(address.is_loopback for address in self.addresses)

    @property
    def plumbing(self) -> bool:
        return self.name.startswith(PLUMBING)

    @property
    def state(self) -> str:
        """For people, as what there is to choose from."""
        addresses = ", ".join(str(address.ip) for address in self.addresses)
        return f"{self.name} ({addresses or 'no address'}{'' if self.up else ', down'})"


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """What was found. `routed` and `default` are this node's source addresses: towards the store, and on the default
    route; None without such a route. `rdma`: the ACTIVE ports, as NCCL names them."""

    interfaces: tuple[Interface, ...]
    routed: str | None = None
    default: str | None = None
    rdma: tuple[str, ...] = ()


def interfaces() -> tuple[Interface, ...]:
    """In the kernel's order; none where it does not answer (systemd: RestrictAddressFamilies without AF_NETLINK)."""
    try:
        listed, links = psutil.net_if_addrs(), psutil.net_if_stats()
    except OSError:
        return ()
    addresses: dict[str, list[Address]] = {}
    for label, found in listed.items():
        name = label.partition(":")[0]  # eth0:1 is a second address of eth0
        for one in found:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                ip = _ip(one.address)
                prefix = int(_ip(one.netmask)).bit_count() if one.netmask else ip.max_prefixlen
                addresses.setdefault(name, []).append(ipaddress.ip_interface((ip, prefix)))
    return tuple(
        Interface(name, link.isup, tuple(addresses.get(name, ())), link.mtu, link.speed or None)
        for name, link in links.items()
    )


def rdma_ports(sys: Path = Path("/sys")) -> tuple[str, ...]:
    """The ACTIVE ones: InfiniBand, RoCE or another RDMA device's."""
    ports = sys.glob("class/infiniband/*/ports/*")
    active = (port for port in ports if read(port / "state").endswith("ACTIVE"))  # "4: ACTIVE"
    return tuple(sorted(f"{port.parents[1].name}:{port.name}" for port in active))


# --- The choice


@dataclass(frozen=True, slots=True)
class NetworkRequest:
    """From the configuration. `towards` is the rendezvous store, or a member of it; None: this node hosts it."""

    interface: str | None = None
    address: str | None = None
    towards: str | None = None
    memory: bool = False
    """No other node can ever join."""


@dataclass(frozen=True, slots=True)
class Network:
    """The interface of this node's job and its address there; `reason` is the sentence for a person."""

    interface: str
    address: str
    reason: str
    mtu: int = 1500
    speed_mbps: int | None = None
    rdma_ports: tuple[str, ...] = ()
    """All ACTIVE ports of the node, not only this interface's."""
    endpoint: Endpoint | None = None
    """Of a store that another agent hosts, as an address; None: there is none."""

    @property
    def family(self) -> str:
        return "AF_INET6" if ":" in self.address else "AF_INET"

    def __str__(self) -> str:
        speed = "speed unknown" if self.speed_mbps is None else f"{self.speed_mbps} Mbit/s"
        rdma = ", ".join(self.rdma_ports) or "none"
        return (
            f"{self.interface}, {self.address} (MTU {self.mtu}, {speed}, RDMA ports: {rdma}): {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class NotReady:
    """What is missing and may still come, and what to do if it does not."""

    missing: str
    advice: str


def choose(wanted: NetworkRequest, here: HostNetwork) -> Network | NotReady:
    """Raises ConfigError for an address that this node does not have."""
    if wanted.address is not None:
        holder = _interface_of(wanted.address, here)
        if holder is None:
            expected = f"an address of this node, which has {_listed(here.interfaces)}"
            advice = "correct it, or leave it out"
            raise ConfigError([Problem("--local-addr", wanted.address, expected, advice, here=True)])
        return _choice(holder, _ip(wanted.address), "you named its address with --local-addr", here)
    named = next((interface for interface in here.interfaces if interface.name == wanted.interface), None)
    if named is not None:
        return _choice(named, _ip_on(named, wanted.towards), "you named it with --local-addr", here)
    if wanted.memory:
        return _loopback(LOOPBACK, "a job of this machine alone", here)
    if wanted.towards is not None and is_loopback(wanted.towards):
        reason = f"the rendezvous at {wanted.towards} is on this machine's loopback, so all nodes are on this machine"
        return _loopback(here.routed or LOOPBACK, reason, here)
    return _by_routes(wanted, here)


def _by_routes(wanted: NetworkRequest, here: HostNetwork) -> Network | NotReady:
    if wanted.towards is not None:
        route = _interface_of(here.routed, here)
        if route is None:
            return NotReady(
                f"a route to the rendezvous at {wanted.towards}; there are {_listed(here.interfaces)}",
                "check cables, routes and --rdzv-endpoint",
            )
        if not route.loopback and not route.plumbing:
            return _routed(route, here.routed, f"the route to the rendezvous at {wanted.towards}", here)
    default = _interface_of(here.default, here)
    if default is not None and default.up and not default.loopback and not default.plumbing:
        return _routed(default, here.default, "the default route", here)
    fastest = _fastest(here.interfaces)
    if fastest is not None:
        return _choice(*fastest, "the fastest interface that is up, without any default route", here)
    return NotReady(
        f"an interface that other nodes reach; there are {_listed(here.interfaces)}",
        "bring one up, or choose with --local-addr; if all agents are on this machine, "
        f"choose --local-addr {LOOPBACK}",
    )


def _routed(interface: Interface, source: str | None, reason: str, here: HostNetwork) -> Network | NotReady:
    assert source is not None, "a route has a source address"
    ip = _ip(source)
    return _choice(interface, None if ip.is_link_local else ip, reason, here)


def _fastest(interfaces: Iterable[Interface]) -> tuple[Interface, IP] | None:
    usable = [
        (interface, ip)
        for interface in interfaces
        if interface.up and not interface.loopback and not interface.name.startswith((*PLUMBING, *TUNNELS))
        if (ip := _ip_on(interface, None)) is not None
    ]
    return max(usable, key=lambda found: found[0].speed_mbps or 0, default=None)


def _ip_on(interface: Interface, towards: str | None) -> IP | None:
    """One that means the same on other hosts, of the family of `towards` if there is one, else IPv4 before IPv6."""
    usable = [address.ip for address in interface.addresses if not address.is_link_local]
    wanted = _ip(towards).version if towards is not None else 4
    return min(usable, key=lambda ip: ip.version != wanted, default=None)


def _interface_of(source: str | None, here: HostNetwork) -> Interface | None:
    """A loopback interface has all of 127.0.0.0/8 without listing it."""
    if source is None:
        return None
    ip = _ip(source)
    v4_loopback = ip.version == 4 and ip.is_loopback
    return next(
        (
            interface
            for interface in here.interfaces
            if any(ip == address.ip for address in interface.addresses)
            or (v4_loopback and interface.loopback)
        ),
        None,
    )


def _loopback(address: str, reason: str, here: HostNetwork) -> Network:
    found = _interface_of(address, here) or Interface("lo", True, mtu=65536)
    return _chosen(found, _ip(address), reason, here)


def _choice(interface: Interface, ip: IP | None, reason: str, here: HostNetwork) -> Network | NotReady:
    if not interface.up:
        return NotReady(
            f"interface {interface.name} to come up ({reason})",
            f"check the cable and `ip link set {interface.name} up`, or choose another with --local-addr",
        )
    if ip is None:
        return NotReady(
            f"an address that other nodes reach; now there is {interface.state}",
            f"give {interface.name} an address, or choose another interface with --local-addr",
        )
    return _chosen(interface, ip, reason, here)


def _chosen(interface: Interface, ip: IP, reason: str, here: HostNetwork) -> Network:
    scope = f"%{interface.name}" if ip.version == 6 and ip.is_link_local else ""
    return Network(interface.name, f"{ip}{scope}", reason, interface.mtu, interface.speed_mbps, here.rdma)


def _ip(address: str) -> IP:
    return ipaddress.ip_address(address.partition("%")[0])


def _listed(interfaces: tuple[Interface, ...]) -> str:
    """A host with many containers has hundreds of them."""
    states = [interface.state for interface in interfaces if not interface.name.startswith("veth")]
    more = len(interfaces) - len(states[:MOST_LISTED])
    return (
        ", ".join([*states[:MOST_LISTED], *([f"and {more} more"] if more else [])])
        or "no interface at all (systemd: RestrictAddressFamilies needs AF_NETLINK)"
    )


def network_variables(network: Network) -> tuple[Variable, ...]:
    """The choice, for the workers' libraries. On loopback NCCL finds its way alone, as it does on one node;
    the others would look up the host's name, which takes its time where the name servers do not answer."""
    reason = f"the interface of {network.address}, this node's address: {network.reason}"
    name = network.interface
    exact = (
        Variable(library, name, reason, by="network")
        for library in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    )
    if is_loopback(network.address):
        return tuple(exact)
    nccl = "NCCL_SOCKET_IFNAME"
    return (
        Variable(nccl, f"={name}", f"exactly this name; {reason}", by="network"),
        *exact,
        # The interface that was chosen for NCCL may have no address of this family.
        Variable(
            "NCCL_SOCKET_FAMILY",
            network.family,
            f"the family of {network.address}; NCCL would take the first it finds",
            by="network",
            aliases=(nccl,),
        ),
    )


# --- Finding it, and waiting for it


def discover_network(config: Config) -> Network | NotReady:
    """Now. Raises ConfigError for what can never work."""
    here = interfaces()
    named = config.local_addr if config.local_addr in {one.name for one in here} else None
    wanted = NetworkRequest(named, memory=config.solitary)
    unknown: AddressError | None = None
    addresses: list[str | None] = []
    try:
        if config.local_addr != named:
            wanted = replace(wanted, address=resolve(str(config.local_addr), 0))
        if config.rendezvous.kind.host is not None or wanted.address is None:
            addresses = _store_addresses(config)
            wanted = replace(wanted, towards=_towards(addresses, len(config.rendezvous.endpoints)))
    except AddressError as error:
        unknown = error
    routed = source_address(wanted.towards) if wanted.towards is not None else None
    found = choose(wanted, HostNetwork(here, routed, default_source(), rdma_ports()))
    if unknown is not None:
        advice = f"check --rdzv-endpoint, --local-addr (interfaces: {_listed(here)}), /etc/hosts and DNS on this node"
        return NotReady(f"a host name ({unknown})", advice)
    if isinstance(found, NotReady):
        return found
    return replace(found, endpoint=_endpoint(config, addresses, found.address))


def wait_for_network(config: Config, sleep: Callable[[float], None] = time.sleep) -> Network:
    """Looks for as long as --join-timeout. Raises CannotStart."""
    within_s = config.rendezvous.join_timeout_s
    give_up_at = time.monotonic() + within_s
    logged = ""
    while True:
        try:
            found = discover_network(config)
        except ConfigError as error:
            raise CannotStart(error.code, str(error)) from error
        if isinstance(found, Network):
            return found
        if time.monotonic() >= give_up_at:
            waited = f"waited {within_s:g} s for {found.missing}"
            raise CannotStart(ExitCode.NO_NETWORK, f"{waited}: {found.advice}")
        if found.missing != logged:
            logged = found.missing
            log.info("waiting up to %g s (--join-timeout) for %s", within_s, logged)
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
        return distant[0]
    # The others may be elsewhere than a member on loopback, so it counts only when all are.
    return addresses[0] if addresses and None not in addresses and len(addresses) == given else None


def _endpoint(config: Config, addresses: list[str | None], own: str) -> Endpoint | None:
    if config.rendezvous.kind.host is None or not addresses:
        return None
    ((given,), (address,)) = config.rendezvous.endpoints, addresses
    return Endpoint(own if address is None else address, given.port)


# --- Names, addresses and routes


class AddressError(Exception):
    """The host name cannot be turned into an address."""


def resolve(host: str, port: int) -> str:
    """The first address of `host`, the way every node resolves it. Raises AddressError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"{host!r} does not resolve to an address ({error})") from error
    # IPv4 first: a dual-stack name often has link-local or unrouted IPv6 addresses that only look usable.
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return str(found[0][4][0])


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def endpoint_address(endpoint: Endpoint) -> str | None:
    """The address of an endpoint that one of the nodes serves; None for this machine's own name. Raises AddressError.

    Debian's /etc/hosts gives a machine's own name a loopback address, where no other node can come.
    """
    address = resolve(endpoint.address, endpoint.port)
    own_name = is_loopback(address) and endpoint.address not in ("localhost", address)
    return None if own_name else address


def source_address(towards: str) -> str | None:
    """This node's own address on its route to an address; None without a route."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only looks the route up.
            probe.connect((towards, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def default_source() -> str | None:
    """This node's own address on its default route, IPv4 first; None without one."""
    return next((source for place in ELSEWHERE if (source := source_address(place)) is not None), None)


def reachable_at(listening: tuple[str, int], address: str) -> Endpoint | None:
    """Where other nodes, who know this one by `address`, reach what listens here; None when they cannot."""
    host, port = listening
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        return Endpoint(address, port)
    return None if is_loopback(host) and not is_loopback(address) else Endpoint(host, port)


def unique_node_id() -> str:
    """The host's name and a part that no other agent has, so that several agents can share a host."""
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname()).strip("-")[:40] or "node"
    return f"{host}-{uuid.uuid4().hex[:6]}"
