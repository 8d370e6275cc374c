"""What is read of interfaces and RDMA ports: this machine's own, and a sysfs made for the test."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.agent.machine.network import interfaces as module
from elastic_agent.agent.machine.network.interfaces import (
    Address,
    Interface,
    RdmaPort,
    interfaces,
    rdma_ports,
)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_this_machines_own() -> None:
    found = {interface.name: interface for interface in interfaces()}
    assert list(found) == [name for _, name in socket.if_nameindex()]
    lo = found["lo"]
    assert lo.up
    assert lo.loopback
    assert lo.mtu == int(Path("/sys/class/net/lo/mtu").read_text())
    assert Address(ipaddress.ip_address("127.0.0.1"), 8) in lo.addresses


def attribute(kind: int, content: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(content), kind) + content + b"\0" * (-len(content) % 4)


def link(index: int, name: str, flags: int, mtu: int) -> bytes:
    about = struct.pack("=BxHiII", 0, 1, index, flags, 0)
    return about + attribute(3, name.encode() + b"\0") + attribute(4, struct.pack("=I", mtu))


def address(index: int, text: str, flags: int = 0x80, peer: str | None = None) -> bytes:
    own = ipaddress.ip_interface(text)
    family = socket.AF_INET if own.version == 4 else socket.AF_INET6
    about = struct.pack("=BBBBI", family, own.network.prefixlen, flags & 0xFF, 0, index)
    one = attribute(1, ipaddress.ip_address(peer).packed if peer else own.ip.packed)
    two = attribute(2, own.ip.packed) if peer or own.version == 4 else b""
    return about + one + two + attribute(8, struct.pack("=I", flags))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    links = [
        link(1, "lo", 0x10049, 65536),
        link(2, "eth0", 0x11043, 9000),
        link(3, "eth1", 0x1003, 1500),  # switched on, without a carrier
        link(7, "wg0", 0x100D1, 1420),
    ]
    addresses = [
        address(1, "127.0.0.1/8"),
        address(2, "10.0.0.1/24"),
        address(2, "fd00::1/64", flags=0xC0),  # still looked for on the network: tentative
        address(2, "fd00::2/64", flags=0x20),  # deprecated
        address(7, "10.8.0.1/32", peer="10.8.0.2"),
    ]

    def ask(what: int) -> Iterator[bytes]:
        return iter({18: links, 22: addresses}[what])

    monkeypatch.setattr(module, "_ask", ask)


def test_links_and_their_addresses_are_put_together(kernel: None, tmp_path: Path) -> None:
    for name, speed in (("eth0", "100000\n"), ("eth1", "-1\n"), ("wg0", "0\n")):
        write(tmp_path / f"class/net/{name}/speed", speed)
    ip = ipaddress.ip_address
    assert interfaces(tmp_path) == (
        Interface("lo", True, (Address(ip("127.0.0.1"), 8),), 65536),
        Interface(
            "eth0",
            True,
            (
                Address(ip("10.0.0.1"), 24),
                Address(ip("fd00::1"), 64, ready=False),
                Address(ip("fd00::2"), 64, ready=False),
            ),
            9000,
            100_000,
        ),
        Interface("eth1", False),
        Interface("wg0", True, (Address(ip("10.8.0.1"), 32),), 1420),
    )


def test_only_active_rdma_ports_count(tmp_path: Path) -> None:
    ports = tmp_path / "class/infiniband"
    for device, number, state, layer, netdev in (
        ("mlx5_1", 1, "4: ACTIVE\n", "Ethernet\n", "eth1\n"),
        ("mlx5_0", 2, "1: DOWN\n", "InfiniBand\n", None),
        ("mlx5_0", 1, "4: ACTIVE\n", "InfiniBand\n", None),
        ("mlx5_2", 1, "2: INIT\n", "InfiniBand\n", None),
    ):
        port = ports / device / "ports" / str(number)
        write(port / "state", state)
        write(port / "link_layer", layer)
        if netdev:
            write(port / "gid_attrs/ndevs/0", netdev)
    assert rdma_ports(tmp_path) == (
        RdmaPort("mlx5_0", 1, "InfiniBand"),
        RdmaPort("mlx5_1", 1, "Ethernet", "eth1"),
    )
    assert [str(port) for port in rdma_ports(tmp_path)] == ["mlx5_0:1", "mlx5_1:1"]


def test_a_machine_without_rdma_has_none(tmp_path: Path) -> None:
    assert rdma_ports(tmp_path) == ()


@pytest.mark.parametrize(
    ("text", "routable"),
    [("10.0.0.1", True), ("fd00::1", True), ("169.254.1.1", False), ("fe80::1", False), ("127.0.0.2", False)],
)
def test_which_addresses_mean_the_same_to_other_hosts(text: str, routable: bool) -> None:
    assert Address(ipaddress.ip_address(text), 24).routable is routable
    assert not Address(ipaddress.ip_address(text), 24, ready=False).routable
