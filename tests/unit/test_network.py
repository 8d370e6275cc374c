"""Which interfaces a machine has, which one and which address its job uses, and what follows for others."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_agent.agent.common.variables import compose
from elastic_agent.agent.configuration.config import ConfigError
from elastic_agent.agent.machine import network as module
from elastic_agent.agent.machine.network import (
    HostNetwork,
    Interface,
    Network,
    NetworkRequest,
    NotReady,
    choose,
    interfaces,
    network_variables,
    rdma_ports,
    reachable_at,
)
from elastic_agent.rendezvous.records import Endpoint


def an_interface(name: str, *addresses: str, up: bool = True, speed: int | None = None) -> Interface:
    return Interface(name, up, tuple(map(ipaddress.ip_interface, addresses)), 1500, speed)


LO = an_interface("lo", "127.0.0.1/8", "::1/128")
DOCKER = an_interface("docker0", "172.17.0.1/16", speed=10_000)
OFFICE = an_interface("eth0", "10.0.0.1/24", "fd00::1/64", "fe80::1/64", speed=1_000)
FABRIC = an_interface("eth1", "10.1.0.1/24", speed=100_000)
V6 = an_interface("eth2", "fe80::2/64", "fd02::1/64", speed=25_000)
VPN = an_interface("wg0", "10.8.0.1/24")
OVERLAY = an_interface("tailscale0", "100.64.0.1/32")
UNPLUGGED = an_interface("eth3", "10.3.0.1/24", up=False, speed=400_000)
BARE = an_interface("eth4", "fe80::4/64")
HOST = (LO, DOCKER, OFFICE, FABRIC, V6, VPN, OVERLAY, UNPLUGGED, BARE)

SEVERAL = NetworkRequest()
TO_OFFICE, TO_FABRIC = NetworkRequest(towards="10.0.0.9"), NetworkRequest(towards="10.1.0.9")


@pytest.mark.parametrize(
    ("wanted", "routed", "default", "expected"),
    [
        # The user's word comes first.
        (NetworkRequest(interface="eth1", towards="10.0.0.9"), "10.0.0.1", "10.0.0.1", ("eth1", "10.1.0.1")),
        (NetworkRequest(interface="docker0"), None, None, ("docker0", "172.17.0.1")),
        (NetworkRequest(interface="tailscale0"), None, None, ("tailscale0", "100.64.0.1")),
        (NetworkRequest(interface="lo"), None, None, ("lo", "127.0.0.1")),
        (NetworkRequest(interface="eth2"), None, None, ("eth2", "fd02::1")),
        (NetworkRequest(interface="eth0", towards="fd00::9"), "fd00::1", None, ("eth0", "fd00::1")),
        (NetworkRequest(interface="eth0", memory=True), None, None, ("eth0", "10.0.0.1")),
        (NetworkRequest(address="10.1.0.1", towards="10.0.0.9"), "10.0.0.1", None, ("eth1", "10.1.0.1")),
        (NetworkRequest(address="127.0.0.3", towards="127.0.0.1"), "127.0.0.1", None, ("lo", "127.0.0.3")),
        (NetworkRequest(address="fe80::2"), None, None, ("eth2", "fe80::2%eth2")),
        # Then what needs no network.
        (NetworkRequest(memory=True), None, "10.0.0.1", ("lo", "127.0.0.1")),
        (NetworkRequest(towards="127.0.0.1"), "127.0.0.1", "10.0.0.1", ("lo", "127.0.0.1")),
        (NetworkRequest(towards="::1"), "::1", "10.0.0.1", ("lo", "::1")),
        # Then routes.
        (TO_FABRIC, "10.1.0.1", "10.0.0.1", ("eth1", "10.1.0.1")),
        (NetworkRequest(towards="fd02::9"), "fd02::1", "10.0.0.1", ("eth2", "fd02::1")),
        (NetworkRequest(towards="10.0.0.1"), "10.0.0.1", None, ("eth0", "10.0.0.1")),
        (NetworkRequest(towards="10.8.0.9"), "10.8.0.1", "10.0.0.1", ("wg0", "10.8.0.1")),
        (NetworkRequest(towards="172.17.0.9"), "172.17.0.1", "10.0.0.1", ("eth0", "10.0.0.1")),
        (NetworkRequest(towards="100.64.0.9"), "100.64.0.1", "10.0.0.1", ("eth0", "10.0.0.1")),
        (SEVERAL, None, "10.0.0.1", ("eth0", "10.0.0.1")),
        (SEVERAL, None, "10.8.0.1", ("wg0", "10.8.0.1")),
        # Then the fastest: not the unplugged one, no tunnel, no plumbing.
        (SEVERAL, None, None, ("eth1", "10.1.0.1")),
        (SEVERAL, None, "172.17.0.1", ("eth1", "10.1.0.1")),
        (SEVERAL, None, "10.3.0.1", ("eth1", "10.1.0.1")),
    ],
)  # fmt: skip
def test_the_choice(
    wanted: NetworkRequest, routed: str | None, default: str | None, expected: tuple[str, str]
) -> None:
    choice = choose(wanted, HostNetwork(HOST, routed, default))
    assert isinstance(choice, Network), choice
    assert (choice.interface, choice.address) == expected
    assert choice.reason


def test_without_a_default_route_no_tunnel_is_taken_for_the_fastest() -> None:
    tunnels = tuple(
        an_interface(name, "10.8.0.1/24", speed=10_000) for name in ("wg0", "tun0", "ztabc", "gre1")
    )
    choice = choose(SEVERAL, HostNetwork((LO, *tunnels, OFFICE)))
    assert isinstance(choice, Network), choice
    assert choice.interface == OFFICE.name
    assert isinstance(choose(SEVERAL, HostNetwork((LO, *tunnels))), NotReady)


def test_the_choice_carries_what_is_known_of_the_interface_and_all_rdma_ports_of_the_node() -> None:
    ports = ("mlx5_0:1", "mlx5_1:2")
    fast = replace(FABRIC, mtu=9000)
    choice = choose(TO_FABRIC, HostNetwork((LO, fast), "10.1.0.1", rdma=ports))
    assert isinstance(choice, Network)
    assert (choice.mtu, choice.speed_mbps, choice.rdma_ports) == (9000, 100_000, ("mlx5_0:1", "mlx5_1:2"))
    assert str(choice) == (
        "eth1, 10.1.0.1 (MTU 9000, 100000 Mbit/s, RDMA ports: mlx5_0:1, mlx5_1:2): "
        "the route to the rendezvous at 10.1.0.9"
    )


@pytest.mark.parametrize(
    ("wanted", "interfaces", "routed", "default", "missing"),
    [
        (NetworkRequest(interface="eth3"), HOST, None, "10.0.0.1", "interface eth3 to come up"),
        (NetworkRequest(address="10.3.0.1"), HOST, None, "10.0.0.1", "interface eth3 to come up"),
        (NetworkRequest(interface="eth4"), HOST, None, "10.0.0.1", r"an address .* eth4 \(fe80::4\)"),
        (NetworkRequest(towards="10.3.0.9"), HOST, "10.3.0.1", "10.0.0.1", "interface eth3 to come up"),
        (NetworkRequest(towards="10.99.0.9"), HOST, None, None, "a route to the rendezvous at 10.99.0.9"),
        (TO_OFFICE, (LO,), None, None, "a route to the rendezvous at 10.0.0.9"),
        (SEVERAL, (LO, DOCKER), None, None, "an interface that other nodes reach"),
        (SEVERAL, (LO, BARE, UNPLUGGED), None, "10.3.0.1", "an interface that other nodes reach"),
        (NetworkRequest(towards="fe80::9"), HOST, "fe80::4", None, "an address that other nodes reach"),
    ],
)  # fmt: skip
def test_what_may_still_come_is_named_and_no_loopback_taken_instead(
    wanted: NetworkRequest,
    interfaces: tuple[Interface, ...],
    routed: str | None,
    default: str | None,
    missing: str,
) -> None:
    found = choose(wanted, HostNetwork(interfaces, routed, default))
    assert isinstance(found, NotReady), found
    assert found == NotReady(found.missing, found.advice)
    assert re.search(missing, found.missing), found.missing
    assert found.advice


@pytest.mark.parametrize(
    ("wanted", "problems"),
    [
        (
            NetworkRequest(address="10.9.9.9"),
            ["--local-addr '10.9.9.9': expected an address of this node, which has lo"],
        ),
    ],
)  # fmt: skip
def test_what_this_node_does_not_have_is_refused(wanted: NetworkRequest, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(wanted, HostNetwork(HOST, None, "10.0.0.1"))
    assert len(caught.value.problems) == len(problems)
    for problem, expected in zip(caught.value.problems, problems, strict=True):
        assert re.match(expected, str(problem)), problem


def variables(choice: Network, **inherited: str) -> dict[str, str]:
    return compose(inherited, network_variables(choice))


def test_every_library_gets_the_one_choice() -> None:
    assert variables(Network("eth1", "10.1.0.1", "why")) == {
        "NCCL_SOCKET_IFNAME": "=eth1",
        "NCCL_SOCKET_FAMILY": "AF_INET",
        "GLOO_SOCKET_IFNAME": "eth1",
        "TP_SOCKET_IFNAME": "eth1",
    }
    assert variables(Network("eth2", "fd02::1", "why"))["NCCL_SOCKET_FAMILY"] == "AF_INET6"


def test_on_loopback_nccl_is_left_alone() -> None:
    expected = {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    assert variables(Network("lo", "127.0.0.1", "why")) == expected


def test_the_users_own_values_win_and_no_family_is_put_beside_their_interface() -> None:
    own = {"NCCL_SOCKET_IFNAME": "^docker", "GLOO_SOCKET_IFNAME": "eth9"}
    assert variables(Network("eth1", "10.1.0.1", "why"), **own) == own | {"TP_SOCKET_IFNAME": "eth1"}
    family = {"NCCL_SOCKET_FAMILY": "AF_INET6"}
    assert variables(Network("eth1", "10.1.0.1", "why"), **family)["NCCL_SOCKET_FAMILY"] == "AF_INET6"


# --- Where others find what listens here


@pytest.mark.parametrize(
    ("host", "address", "reached_at"),
    [
        ("10.0.0.1", "10.0.0.1", "10.0.0.1"),
        ("10.9.9.9", "10.0.0.1", "10.9.9.9"),
        ("0.0.0.0", "10.0.0.1", "10.0.0.1"),
        ("::", "10.0.0.1", "10.0.0.1"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "127.0.1.1", "127.0.0.1"),
        ("127.0.0.1", "10.0.0.1", None),
        ("::1", "fd00::1", None),
        ("fe80::1%eth0", "fe80::1%eth0", "fe80::1%eth0"),
    ],
)
def test_peers_reach_a_listener_unless_it_is_on_loopback_only(
    host: str, address: str, reached_at: str | None
) -> None:
    expected = Endpoint(reached_at, 9100) if reached_at is not None else None
    assert reachable_at((host, 9100), address) == expected


# --- What there is


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
            (ip("10.0.0.1/24"), ip("fd00::1/64"), ip("fd00::2/64"), ip("fe80::1/64"), ip("10.0.0.2/24")),
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
