"""The one decision about the network: which interface and which address of this node its job uses.

The store, MASTER_ADDR, the address of metrics and probes, NCCL, gloo and TensorPipe all follow it, so that no two of
them pick different cables. `choose` is a pure function over the configuration (`NetworkRequest`) and what was found on
the machine (`HostNetwork`); the user's choice comes first, then the route to the rendezvous, then the default
route, then the fastest interface that is up. What is only missing for now (an interface that is down, a route that is
not there) is `NotReady`, for which the caller may wait; what can never work is a `ConfigError`.

Words: *plumbing* is an interface that joins containers or machines of this host, and is alike on every node; it is
taken only by name. A *tunnel* is taken by name, or where a route leads.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ....rendezvous.records import MAX_RDMA_PORTS, NetworkFacts
from ...common.variables import Variable
from ...configuration.config import ConfigError, Problem
from .addresses import LOOPBACK, is_loopback
from .interfaces import IP, Interface, RdmaPort

PLUMBING = (
    "docker", "br-", "veth", "podman", "lxc", "lxd", "virbr", "vnet",
    "cni", "cali", "vxlan.calico", "cilium", "flannel", "weave", "kube", "nodelocaldns",
    "tailscale",
)  # fmt: skip
"""How their names begin. Tailscale's is here because it would carry a whole training between neighbours."""

MOST_LISTED = 12

TUNNELS = ("wg", "tun", "tap", "ppp", "zt", "utun", "nebula", "gre", "ipip")


@dataclass(frozen=True, slots=True)
class NetworkRequest:
    """From the configuration. `towards` is the rendezvous store, or a member of it; None: this node hosts it."""

    interface: str | None = None
    address: str | None = None
    towards: str | None = None
    memory: bool = False
    """No other node can ever join."""
    alone: bool = False
    """One node at a time: it may do without a network."""


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """What was found. `routed` and `default` are this node's source addresses: towards the store, and on the default
    route; None without such a route."""

    interfaces: tuple[Interface, ...]
    routed: str | None = None
    default: str | None = None
    rdma: tuple[RdmaPort, ...] = ()


@dataclass(frozen=True, slots=True)
class NetworkChoice:
    """The interface of this node's job and its address there; `reason` is the sentence for a person."""

    interface: str
    address: str
    reason: str
    mtu: int = 1500
    speed_mbps: int | None = None
    rdma: tuple[RdmaPort, ...] = ()
    """All ACTIVE ports of the node, not only this interface's."""

    @property
    def facts(self) -> NetworkFacts:
        """For the node's record, which other nodes read."""
        return NetworkFacts(self.interface, self.speed_mbps or 0, self.mtu, self.rdma_ports[:MAX_RDMA_PORTS])

    @property
    def family(self) -> str:
        return "AF_INET6" if ":" in self.address else "AF_INET"

    @property
    def rdma_ports(self) -> tuple[str, ...]:
        """As NCCL_IB_HCA names them."""
        return tuple(map(str, self.rdma))

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


def choose(wanted: NetworkRequest, here: HostNetwork) -> NetworkChoice | NotReady:
    """Raises ConfigError for an interface and an address that this node does not have, or not together."""
    named = next((interface for interface in here.interfaces if interface.name == wanted.interface), None)
    holder = _interface_of(wanted.address, here)
    problems = list(_problems(wanted, named, holder, here))
    if problems:
        raise ConfigError(problems)
    if wanted.address is not None and holder is not None:
        option, reason = f"--local-addr {wanted.address}", "you named its address with --local-addr"
        return _choice(holder, _ip(wanted.address), reason, here, option)
    if named is not None:
        option, reason = f"--network-interface {named.name}", "you named it with --network-interface"
        return _choice(named, _ip_on(named, wanted.towards), reason, here, option)
    if wanted.memory:
        return _loopback(LOOPBACK, "a job of this machine alone", here)
    if wanted.towards is not None and is_loopback(wanted.towards):
        reason = f"the rendezvous at {wanted.towards} is on this machine's loopback, so all nodes are on this machine"
        return _loopback(here.routed or LOOPBACK, reason, here)
    return _by_routes(wanted, here)


def network_variables(choice: NetworkChoice) -> tuple[Variable, ...]:
    """The choice, for the workers' libraries. On loopback NCCL finds its way alone, as it does on one node;
    the others would look up the host's name, which takes its time where the name servers do not answer."""
    reason = f"the interface of {choice.address}, this node's address: {choice.reason}"
    name = choice.interface
    exact = (Variable(library, name, reason, by="network") for library in _EXACT_NAMES)
    if is_loopback(choice.address):
        return tuple(exact)
    return (
        Variable(NCCL_SOCKET_IFNAME, f"={name}", f"exactly this name; {reason}", by="network"),
        *exact,
        # The interface that was chosen for NCCL may have no address of this family.
        Variable(
            NCCL_SOCKET_FAMILY,
            choice.family,
            f"the family of {choice.address}; NCCL would take the first it finds",
            by="network",
            aliases=(NCCL_SOCKET_IFNAME,),
        ),
    )


NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY = "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"
GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
_EXACT_NAMES = (GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME)


def _problems(
    wanted: NetworkRequest, named: Interface | None, holder: Interface | None, here: HostNetwork
) -> Iterator[Problem]:
    for option, word, found, what in (
        ("--network-interface", wanted.interface, named, "an interface"),
        ("--local-addr", wanted.address, holder, "an address"),
    ):
        if word is not None and found is None:
            expected = f"{what} of this node, which has {_listed(here.interfaces)}"
            yield Problem(option, word, expected, "correct it, or leave it out", here=True)
    if named is not None and holder is not None and named != holder:
        expected = f"the interface of --local-addr {wanted.address}, which is {holder.name}"
        yield Problem("--network-interface", named.name, expected, "keep one of the two options", here=True)


def _by_routes(wanted: NetworkRequest, here: HostNetwork) -> NetworkChoice | NotReady:
    passed_over = ""
    if wanted.towards is not None:
        route = _interface_of(here.routed, here)
        near = _down_but_near(wanted.towards, route, here.interfaces)
        if near is not None:
            return _choice(near, None, f"the rendezvous at {wanted.towards} is in its subnet", here)
        if route is None and not wanted.alone:
            return NotReady(
                f"a route to the rendezvous at {wanted.towards}; there are {_listed(here.interfaces)}",
                "check cables, routes and --rdzv-endpoint",
            )
        if route is not None and not route.loopback:
            if not route.name.startswith(PLUMBING):
                return _routed(route, here.routed, f"the route to the rendezvous at {wanted.towards}", here)
            passed_over = (
                f"; the rendezvous at {wanted.towards} is reached over {route.name}, but interfaces like it are taken"
                f" only by name (--network-interface {route.name})"
            )
    default = _interface_of(here.default, here)
    if default is not None and default.up and not default.loopback and not default.name.startswith(PLUMBING):
        return _routed(default, here.default, f"the default route{passed_over}", here)
    fastest = _fastest(here.interfaces)
    if fastest is not None:
        reason = f"the fastest interface that is up, without any default route{passed_over}"
        return _choice(*fastest, reason, here)
    if wanted.alone:
        return _loopback(LOOPBACK, "one node, and no other interface is up", here)
    return NotReady(
        f"an interface that other nodes reach; there are {_listed(here.interfaces)}{passed_over}",
        "bring one up, or choose with --network-interface; if all agents are on this machine, choose "
        f"--local-addr {LOOPBACK}",
    )


def _routed(
    interface: Interface, source: str | None, reason: str, here: HostNetwork
) -> NetworkChoice | NotReady:
    assert source is not None, "a route has a source address"
    ip = _ip(source)
    routable = any(address.routable for address in interface.addresses if address.ip == ip)
    return _choice(interface, ip if routable else None, reason, here)


def _down_but_near(
    towards: str, route: Interface | None, interfaces: Iterable[Interface]
) -> Interface | None:
    """One that is down, but will be the way to `towards` as soon as it is up: the present route is a detour."""
    target = _ip(towards)
    near = [
        interface
        for interface in (*filter(None, [route]), *interfaces)
        if any(address.shares_subnet(target) for address in interface.addresses)
    ]
    if route in near:
        return None
    return next((one for one in near if not one.up and not one.name.startswith(PLUMBING)), None)


def _fastest(interfaces: Iterable[Interface]) -> tuple[Interface, IP] | None:
    usable = [
        (interface, ip)
        for interface in interfaces
        if interface.up and not interface.loopback and not interface.name.startswith((*PLUMBING, *TUNNELS))
        if (ip := _ip_on(interface, None)) is not None
    ]
    return max(usable, key=lambda found: found[0].speed_mbps or 0, default=None)


def _ip_on(interface: Interface, towards: str | None) -> IP | None:
    """Of the family of `towards` if there is one, else IPv4 before IPv6."""
    usable = [address.ip for address in interface.addresses if address.routable or interface.loopback]
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


def _loopback(address: str, reason: str, here: HostNetwork) -> NetworkChoice:
    found = _interface_of(address, here) or Interface("lo", True, mtu=65536)
    return _chosen(found, _ip(address), reason, here)


def _choice(
    interface: Interface, ip: IP | None, reason: str, here: HostNetwork, option: str = ""
) -> NetworkChoice | NotReady:
    """`option` has chosen it, if any."""
    if not interface.up:
        return NotReady(
            f"interface {interface.name} to come up ({option or reason})",
            f"check the cable and `ip link set {interface.name} up`, or choose another with --network-interface",
        )
    if ip is None:
        return NotReady(
            f"an address that other nodes reach; now there is {interface.state}",
            f"give {interface.name} an address, or choose another interface with --network-interface",
        )
    return _chosen(interface, ip, reason, here)


def _chosen(interface: Interface, ip: IP, reason: str, here: HostNetwork) -> NetworkChoice:
    scope = f"%{interface.name}" if ip.version == 6 and ip.is_link_local else ""
    return NetworkChoice(
        interface.name, f"{ip}{scope}", reason, interface.mtu, interface.speed_mbps, here.rdma
    )


def _ip(address: str) -> IP:
    return ipaddress.ip_address(address.partition("%")[0])


def _listed(interfaces: tuple[Interface, ...]) -> str:
    """A host with many containers has hundreds of them."""
    states = [interface.state for interface in interfaces if not interface.name.startswith("veth")]
    more = len(interfaces) - len(states[:MOST_LISTED])
    return (
        ", ".join([*states[:MOST_LISTED], *([f"and {more} more"] if more else [])]) or "no interface at all"
    )
