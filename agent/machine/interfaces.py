"""The network interfaces of this machine and its RDMA ports, and how they are named to NCCL, gloo and TensorPipe.

Links and addresses come from getifaddrs, which NCCL and gloo read, too; RDMA ports from sysfs.

The network profile says which network the collectives cross, as NCCL itself would choose: RDMA where there is an active
port, InfiniBand before EFA before RoCE, else TCP.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import psutil

from ..workers.processes.proc import read

IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY = "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"
GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class Address:
    """One address of an interface."""

    ip: IP
    prefix: int

    @property
    def routable(self) -> bool:
        """Whether this address means the same on other hosts."""
        return not (self.ip.is_loopback or self.ip.is_link_local)

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
        return f"{self.device}:{self.number}"


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
                ip = ipaddress.ip_address(one.address.partition("%")[0])
                prefix = (
                    int(ipaddress.ip_address(one.netmask)).bit_count() if one.netmask else ip.max_prefixlen
                )
                addresses.setdefault(name, []).append(Address(ip, prefix))
    return tuple(
        Interface(name, link.isup, tuple(addresses.get(name, ())), link.mtu, link.speed or None)
        for name, link in links.items()
    )


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


TCP = Profile("ethernet", "no RDMA port is active on this machine")


def choose_profile(active: Sequence[RdmaPort]) -> Profile:
    transport: Transport = next((rdma for rdma in _RDMA if _ports(active, rdma)), "ethernet")
    found = f"{_RDMA[transport]} is active" if transport in _RDMA else "no RDMA port is active"
    return Profile(transport, f"{found} on this machine", _ports(active, transport))


def _ports(active: Sequence[RdmaPort], transport: Transport) -> tuple[str, ...]:
    return tuple(str(port) for port in active if _transport(port) == transport)


def _transport(port: RdmaPort) -> Transport:
    if port.link_layer == "InfiniBand":
        return "infiniband"
    # EFA has no link layer that sysfs knows; its devices are rdmap<bus>s<slot>, or efa_<n> without udev's names.
    if port.link_layer != "Ethernet" and port.device.startswith(("rdmap", "efa")):
        return "efa"
    return "roce"
