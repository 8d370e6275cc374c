"""The network interfaces of this machine and its RDMA ports, and how they are named to NCCL, gloo and TensorPipe.

Links and addresses come from getifaddrs, which NCCL and gloo read, too, and from /proc whether an IPv6 address is still
being checked for duplicates, when it cannot be bound. RDMA ports come from sysfs.

The network profile says which network the collectives cross, as NCCL itself would choose: RDMA where there is an active
port, InfiniBand before EFA before RoCE, else TCP.

The user's own NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME are judged before a worker trips over them.
NCCL: a list of prefixes; a leading `=` makes them whole names, a leading `^` takes all others, `^=` both, for the whole
list. gloo: a list of whole names. TensorPipe: one whole name. NCCL and gloo take a value of one character for none.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import psutil

from ..common.kernel_files import read
from ..configuration.config import Problem

IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY = "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"
GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"


_FAILED, _DEPRECATED, _TENTATIVE = 0x08, 0x20, 0x40
"""Flags of an address that cannot be bound, or is about to be withdrawn."""


@dataclass(frozen=True, slots=True)
class Address:
    """One address of an interface. `ready`: it can be bound, and is not about to be withdrawn."""

    ip: IP
    prefix: int
    ready: bool = True

    @property
    def routable(self) -> bool:
        """Whether this address means the same on other hosts."""
        return self.ready and not (self.ip.is_loopback or self.ip.is_link_local)

    def shares_subnet(self, other: IP) -> bool:
        return other in ipaddress.ip_network((self.ip, self.prefix), strict=False)


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
        return any(address.ip.is_loopback for address in self.addresses)

    @property
    def state(self) -> str:
        """For people, as what there is to choose from."""
        addresses = ", ".join(str(address.ip) for address in self.addresses)
        return f"{self.name} ({addresses or 'no address'}{'' if self.up else ', down'})"


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """An ACTIVE port: InfiniBand, RoCE (its link layer is Ethernet) or another RDMA device's."""

    device: str
    number: int
    link_layer: str

    def __str__(self) -> str:
        """As NCCL_IB_HCA names it."""
        return f"{self.device}:{self.number}"


def interfaces(proc: Path = Path("/proc")) -> tuple[Interface, ...]:
    """In the kernel's order; none where it does not answer (systemd: RestrictAddressFamilies without AF_NETLINK)."""
    try:
        listed, links = psutil.net_if_addrs(), psutil.net_if_stats()
    except OSError:
        return ()
    not_ready = _not_ready(proc)
    addresses: dict[str, list[Address]] = {}
    for label, found in listed.items():
        name = label.partition(":")[0]  # eth0:1 is a second address of eth0
        for one in found:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                ip = ipaddress.ip_address(one.address.partition("%")[0])
                prefix = (
                    int(ipaddress.ip_address(one.netmask)).bit_count() if one.netmask else ip.max_prefixlen
                )
                addresses.setdefault(name, []).append(Address(ip, prefix, (name, ip) not in not_ready))
    return tuple(
        Interface(name, link.isup, tuple(addresses.get(name, ())), link.mtu, link.speed or None)
        for name, link in links.items()
    )


def _not_ready(proc: Path) -> set[tuple[str, IP]]:
    """IPv6 addresses of interfaces, as in `fe800000000000000042c0fffea80002 02 40 20 80 eth0`."""
    rows = [line.split() for line in read(proc / "net/if_inet6").splitlines()]
    bad = _FAILED | _DEPRECATED | _TENTATIVE
    return {(row[5], ipaddress.ip_address(int(row[0], 16))) for row in rows if int(row[4], 16) & bad}


def rdma_ports(sys: Path = Path("/sys")) -> tuple[RdmaPort, ...]:
    """The ACTIVE ones, by device and number."""
    found = []
    for directory in sys.glob("class/infiniband/*/ports/*"):
        if read(directory / "state").endswith("ACTIVE"):  # "4: ACTIVE"
            device, layer = directory.parents[1].name, read(directory / "link_layer")
            found.append(RdmaPort(device, int(directory.name), layer))
    return tuple(sorted(found, key=lambda port: (port.device, port.number)))


# --- Network profiles

Transport = Literal["ethernet", "infiniband", "efa", "roce"]

_RDMA: dict[Transport, str] = {"infiniband": "InfiniBand", "efa": "EFA", "roce": "RoCE"}
"""In the order of preference."""


@dataclass(frozen=True, slots=True)
class Profile:
    """`ports`: the active RDMA ports of this transport. `reason` is the sentence for --check-config."""

    transport: Transport
    reason: str
    ports: tuple[str, ...] = ()
    foreign_ports: tuple[str, ...] = ()
    """Active RDMA ports of another transport, which NCCL would use as well."""


TCP = Profile("ethernet", "no RDMA port is active on this machine")


def choose_profile(active: Sequence[RdmaPort]) -> Profile:
    transport: Transport = next((rdma for rdma in _RDMA if _ports(active, rdma)), "ethernet")
    found = f"{_RDMA[transport]} is active" if transport in _RDMA else "no RDMA port is active"
    own = _ports(active, transport)
    others = tuple(str(port) for port in active if str(port) not in own)
    return Profile(transport, f"{found} on this machine", own, others)


def _ports(active: Sequence[RdmaPort], transport: Transport) -> tuple[str, ...]:
    return tuple(str(port) for port in active if _transport(port) == transport)


def _transport(port: RdmaPort) -> Transport:
    if port.link_layer == "InfiniBand":
        return "infiniband"
    # EFA has no link layer that sysfs knows; its devices are rdmap<bus>s<slot>, or efa_<n> without udev's names.
    if port.link_layer != "Ethernet" and port.device.startswith(("rdmap", "efa")):
        return "efa"
    return "roce"


# --- Names that the user has set


def nccl_takes(value: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that NCCL_SOCKET_IFNAME=`value` stands for."""
    others = value.startswith("^")
    exact = value[others:].startswith("=")
    words = (word.partition(":")[0] for word in value[others + exact :].split(","))  # name:port
    listed = [word for word in words if word]

    def fits(name: str) -> bool:
        # An empty list is none at all, for NCCL.
        return not listed or any(name == word if exact else name.startswith(word) for word in listed)

    return [name for name in names if fits(name) != others]


def check_socket_names(environ: Mapping[str, str], interfaces: Iterable[Interface]) -> list[Problem]:
    """What cannot work with the interfaces that exist, up or not."""
    names = [interface.name for interface in interfaces]
    nccl, gloo = environ.get(NCCL_SOCKET_IFNAME, ""), environ.get(GLOO_SOCKET_IFNAME, "")
    tensorpipe = environ.get(TP_SOCKET_IFNAME, "")
    wrong = []
    if len(nccl) > 1 and not nccl_takes(nccl, names):
        wrong.append((NCCL_SOCKET_IFNAME, nccl, "a pattern that fits an interface"))
    if len(gloo) > 1 and not set(gloo.split(",")) <= set(names):
        wrong.append((GLOO_SOCKET_IFNAME, gloo, "whole names of interfaces"))
    if tensorpipe and tensorpipe not in names:
        wrong.append((TP_SOCKET_IFNAME, tensorpipe, "the whole name of an interface"))
    advice = "correct it, or unset it and the agent sets it"
    # Only NCCL has patterns: such a value of the others is wrong on every machine.
    return [
        Problem(
            variable,
            value,
            f"{what} of this node: {', '.join(names)}",
            advice,
            here=variable == NCCL_SOCKET_IFNAME or value[0] not in "^=",
        )
        for variable, value, what in wrong
    ]
