"""What is read of interfaces and RDMA ports: this machine's own, and a sysfs made for the test."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_agent.agent.machine import network as module
from elastic_agent.agent.machine.network import Interface, interfaces, rdma_ports


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_this_machines_own() -> None:
    found = {interface.name: interface for interface in interfaces()}
    assert set(found) == {name for _, name in socket.if_nameindex()}
    lo = found["lo"]
    assert lo.up
    assert lo.loopback
    assert lo.mtu == int(Path("/sys/class/net/lo/mtu").read_text())
    assert ipaddress.ip_interface("127.0.0.1/8") in lo.addresses


def address(text: str) -> SimpleNamespace:
    own = ipaddress.ip_interface(text)
    netmask = str(own.network.netmask) if own.network.prefixlen else None
    return SimpleNamespace(
        family=socket.AF_INET if own.version == 4 else socket.AF_INET6, address=str(own.ip), netmask=netmask
    )


def test_links_and_their_addresses_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {
        "lo": SimpleNamespace(isup=True, mtu=65536, speed=0),
        "eth0": SimpleNamespace(isup=True, mtu=9000, speed=100_000),
        "eth1": SimpleNamespace(isup=False, mtu=1500, speed=0),
        "wg0": SimpleNamespace(isup=True, mtu=1420, speed=0),
    }
    addresses = {
        "lo": [address("127.0.0.1/8")],
        "eth0": [
            address("10.0.0.1/24"),
            address("fd00::1/64"),
            address("fd00::2/64"),
            SimpleNamespace(family=socket.AF_INET6, address="fe80::1%eth0", netmask="ffff:ffff:ffff:ffff::"),
            SimpleNamespace(family=socket.AF_PACKET, address="02:fc:00:00:00:01", netmask=None),
        ],
        "eth0:1": [address("10.0.0.2/24")],
        "wg0": [address("10.8.0.1/32")],
    }
    monkeypatch.setattr(module.psutil, "net_if_stats", lambda: links)
    monkeypatch.setattr(module.psutil, "net_if_addrs", lambda: addresses)
    ip = ipaddress.ip_interface
    assert interfaces() == (
        Interface("lo", True, (ip("127.0.0.1/8"),), 65536),
        Interface(
            "eth0",
            True,
            (
                ip("10.0.0.1/24"),
                ip("fd00::1/64"),
                ip("fd00::2/64"),
                ip("fe80::1/64"),
                ip("10.0.0.2/24"),
            ),
            9000,
            100_000,
        ),
        Interface("eth1", False),
        Interface("wg0", True, (ip("10.8.0.1/32"),), 1420),
    )


def test_only_active_rdma_ports_count(tmp_path: Path) -> None:
    ports = tmp_path / "class/infiniband"
    for device, number, state in (
        ("mlx5_1", 1, "4: ACTIVE\n"),
        ("mlx5_0", 2, "1: DOWN\n"),
        ("mlx5_0", 1, "4: ACTIVE\n"),
        ("mlx5_2", 1, "2: INIT\n"),
    ):
        write(ports / device / "ports" / str(number) / "state", state)
    assert rdma_ports(tmp_path) == ("mlx5_0:1", "mlx5_1:1")


def test_a_machine_without_rdma_has_none(tmp_path: Path) -> None:
    assert rdma_ports(tmp_path) == ()
