"""The network interfaces of this machine and its RDMA ports, as the kernel shows them now. Facts, no judgement.

Links and addresses come from netlink, the same source that NCCL and gloo read through getifaddrs, and with what
others hide: that an IPv6 address is still being checked for duplicates, when it cannot be bound. Speeds and RDMA
ports come from sysfs.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ...common.kernel_files import read

IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_GET_LINKS, _GET_ADDRESSES = 18, 22
_REQUEST_ALL = 0x301
_ERROR, _DONE = 2, 3
_UP_AND_RUNNING = 0x41
_IFLA_IFNAME, _IFLA_MTU = 3, 4
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_FAILED, _DEPRECATED, _TENTATIVE = 0x08, 0x20, 0x40
_ANSWER_BYTES = 1 << 16
"""More than the kernel puts into one answer."""


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
    interface: str | None = None
    """The network interface of the same port, where the kernel names it."""

    def __str__(self) -> str:
        """As NCCL_IB_HCA names it."""
        return f"{self.device}:{self.number}"


def interfaces(sys: Path = Path("/sys")) -> tuple[Interface, ...]:
    """In the kernel's order. Raises OSError where it does not answer."""
    addresses: dict[int, list[Address]] = {}
    for index, address in _addresses():
        addresses.setdefault(index, []).append(address)
    return tuple(
        Interface(name, up, tuple(addresses.get(index, ())), mtu, _speed_mbps(sys / "class/net" / name))
        for index, name, up, mtu in _links()
    )


def rdma_ports(sys: Path = Path("/sys")) -> tuple[RdmaPort, ...]:
    """The ACTIVE ones, by device and number."""
    found = []
    for directory in sys.glob("class/infiniband/*/ports/*"):
        if read(directory / "state").endswith("ACTIVE"):  # "4: ACTIVE"
            port = RdmaPort(
                directory.parents[1].name,
                int(directory.name),
                read(directory / "link_layer"),
                _interface_of(directory),
            )
            found.append(port)
    return tuple(sorted(found, key=lambda port: (port.device, port.number)))


def _speed_mbps(directory: Path) -> int | None:
    word = read(directory / "speed")
    return int(word) if word.isdigit() and word != "0" else None  # -1: unknown


def _interface_of(port: Path) -> str | None:
    return next((name for entry in sorted(port.glob("gid_attrs/ndevs/*")) if (name := read(entry))), None)


# --- Netlink


def _links() -> Iterator[tuple[int, str, bool, int]]:
    """Index, name, whether it is up and running, MTU."""
    for message in _ask(_GET_LINKS):
        index, flags = struct.unpack_from("=4xiI", message)
        attributes = _attributes(message, 16)
        name = os.fsdecode(attributes[_IFLA_IFNAME].rstrip(b"\0"))
        yield index, name, flags & _UP_AND_RUNNING == _UP_AND_RUNNING, _number(attributes[_IFLA_MTU])


def _addresses() -> Iterator[tuple[int, Address]]:
    """The index of the interface, and the address."""
    for message in _ask(_GET_ADDRESSES):
        family, prefix, short_flags, index = struct.unpack_from("=BBBxI", message)
        attributes = _attributes(message, 8)
        # On a point-to-point link _IFA_ADDRESS is the other end's.
        packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
        if family not in (socket.AF_INET, socket.AF_INET6) or packed is None:
            continue
        flags = _number(attributes[_IFA_FLAGS]) if _IFA_FLAGS in attributes else short_flags
        ready = not flags & (_FAILED | _DEPRECATED | _TENTATIVE)
        yield index, Address(ipaddress.ip_address(packed), prefix, ready)


def _ask(what: int) -> Iterator[bytes]:
    """The payload of each message of the answer."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as kernel:
        kernel.send(struct.pack("=IHHIIB3x", 20, what, _REQUEST_ALL, 1, 0, socket.AF_UNSPEC))
        while True:
            answer = kernel.recv(_ANSWER_BYTES)
            at = 0
            while at < len(answer):
                length, kind = struct.unpack_from("=IH", answer, at)
                payload = answer[at + 16 : at + length]
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    number = -struct.unpack_from("=i", payload)[0]
                    raise OSError(number, f"the kernel does not list interfaces: {os.strerror(number)}")
                yield payload
                at += _aligned(length)


def _attributes(message: bytes, at: int) -> dict[int, bytes]:
    found = {}
    while at < len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        found[kind] = message[at + 4 : at + length]
        at += _aligned(length)
    return found


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _number(packed: bytes) -> int:
    return int(struct.unpack("=I", packed)[0])
