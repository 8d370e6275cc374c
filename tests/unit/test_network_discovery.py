"""Looking for the network: what the configuration's names and the kernel's routes lead to, and how long is waited."""

from __future__ import annotations

import ipaddress
import itertools
import logging

import pytest

from elastic_agent.agent.common.exits import CannotStart, ExitCode
from elastic_agent.agent.configuration.config import Command, Config, ConfigError
from elastic_agent.agent.configuration.parse import NodeCounts
from elastic_agent.agent.configuration.rendezvous import EtcdConfig, RendezvousConfig
from elastic_agent.agent.machine import network as network_discovery
from elastic_agent.agent.machine.network import (
    AddressError,
    Interface,
    Network,
    NotReady,
    discover_network,
    wait_for_network,
)
from elastic_agent.rendezvous.records import Endpoint

OWN, OTHER = "10.0.0.1", "10.9.0.1"
HOSTS = {
    "localhost": "127.0.0.1",
    "me": "127.0.1.1",  # as Debian's /etc/hosts has it
    "etcd1": "10.0.0.7",
    "etcd2": "10.9.0.7",
    "nowhere": "10.7.0.7",
}
ROUTES = {"127.0.0.1": "127.0.0.1", "::1": "::1", "10.0.0.7": OWN, OWN: OWN, "10.9.0.7": OTHER}
"""This node's address on the way to each."""


def an_interface(name: str, address: str, up: bool = True) -> Interface:
    return Interface(name, up, (ipaddress.ip_interface(address),))


LO = an_interface("lo", "127.0.0.1/8")
HERE = (LO, an_interface("eth0", f"{OWN}/24"), an_interface("eth1", f"{OTHER}/24"))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int) -> str:
        if host not in HOSTS and not host[0].isdigit() and ":" not in host:
            raise AddressError(f"{host} does not resolve")
        return HOSTS.get(host, host)

    monkeypatch.setattr(network_discovery, "resolve", resolve)
    monkeypatch.setattr(network_discovery, "source_address", ROUTES.get)
    monkeypatch.setattr(network_discovery, "default_source", lambda: OWN)
    monkeypatch.setattr(network_discovery, "interfaces", lambda: HERE)
    monkeypatch.setattr(network_discovery, "rdma_ports", lambda: ())


def a_config(
    backend: str, *hosts: str, local_addr: str | None = None, wait_s: float = 30.0, most: int = 4
) -> Config:
    endpoints = tuple(Endpoint(host, 1) for host in hosts)
    rendezvous = RendezvousConfig(
        backend, endpoints, EtcdConfig() if backend == "etcd" else None, join_timeout_s=wait_s
    )
    return Config(
        Command("script", "train.py"),
        nodes=NodeCounts(1, 1 if backend == "memory" else most),
        rendezvous=rendezvous,
        local_addr=local_addr,
    )


@pytest.mark.parametrize(
    ("config", "address", "endpoint"),
    [
        (a_config("memory"), "127.0.0.1", None),
        (a_config("c10d"), OWN, None),
        (a_config("c10d", most=1), "127.0.0.1", None),
        (a_config("c10d", "etcd2", most=1), OTHER, "10.9.0.7"),
        (a_config("c10d", "etcd2"), OTHER, "10.9.0.7"),
        (a_config("c10d", "localhost"), "127.0.0.1", "127.0.0.1"),
        (a_config("c10d", "me"), OWN, OWN),
        (a_config("c10d", "me", local_addr="eth1"), OTHER, OTHER),
        (a_config("c10d", "etcd1", local_addr="eth1"), OTHER, "10.0.0.7"),
        (a_config("c10d", "etcd1", local_addr=OTHER), OTHER, "10.0.0.7"),
        (a_config("etcd", "etcd1", "etcd2"), OWN, None),
        (a_config("etcd", "unknown", "etcd2", "etcd1"), OTHER, None),
        (a_config("etcd", "localhost"), "127.0.0.1", None),
        (a_config("etcd", "::1", "localhost"), "::1", None),
        (a_config("etcd", "localhost", "etcd2"), OTHER, None),
        (a_config("etcd", "localhost", "me"), OWN, None),
        (a_config("etcd", "localhost", "unknown"), OWN, None),
        (a_config("etcd", "unknown", local_addr=OTHER), OTHER, None),
    ],
    ids=lambda value: "+".join(e.address for e in value.rendezvous.endpoints) if isinstance(value, Config) else value,
)  # fmt: skip
def test_where_other_nodes_reach_this_one_and_where_its_store_is(
    config: Config, address: str, endpoint: str | None
) -> None:
    found = discover_network(config)
    assert isinstance(found, Network), found
    assert found.address == address
    assert found.endpoint == (None if endpoint is None else Endpoint(endpoint, 1))


@pytest.mark.parametrize(
    ("config", "unknown"),
    [
        (a_config("etcd", "x", "y"), "x does not resolve; y does not resolve"),
        (a_config("c10d", "x"), "x does not resolve"),
        (a_config("c10d", "etcd1", local_addr="z"), "z does not resolve"),
    ],
)
def test_a_name_may_resolve_later(config: Config, unknown: str) -> None:
    found = discover_network(config)
    assert isinstance(found, NotReady)
    assert found.missing == f"a host name ({unknown})"


def test_what_can_never_work_is_said_at_once_also_while_names_do_not_resolve() -> None:
    with pytest.raises(ConfigError) as caught:
        discover_network(a_config("c10d", "x", local_addr="10.9.9.9"))
    assert [problem.value for problem in caught.value.problems] == ["10.9.9.9"]


def test_without_netlink_a_single_node_trains_and_several_wait_for_an_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network_discovery, "interfaces", lambda: ())
    found = discover_network(a_config("memory"))
    assert isinstance(found, Network)
    assert found.address == "127.0.0.1"
    several = discover_network(a_config("c10d", "etcd1"))
    assert isinstance(several, NotReady)
    assert "no interface at all" in several.missing


# --- Waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The instants of the sleeps; time goes on only by that."""
    slept: list[float] = []
    monkeypatch.setattr(network_discovery.time, "monotonic", lambda: sum(slept))
    return slept


def test_what_comes_up_in_time_is_taken_and_said_once(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    down = (LO, an_interface("eth1", f"{OTHER}/24", up=False))
    looks = itertools.chain([down] * 20, itertools.repeat(HERE))
    monkeypatch.setattr(network_discovery, "interfaces", lambda: next(looks))
    with caplog.at_level(logging.INFO):
        found = wait_for_network(a_config("c10d", "etcd2", local_addr="eth1"), clock.append)
    assert found.interface == "eth1"
    assert sum(clock) == 5.0
    (line,) = caplog.messages
    assert line.startswith("waiting up to 30 s (--join-timeout) for interface eth1 to come up")


@pytest.mark.parametrize(("wait_s", "waited_s"), [(3.0, 3.0), (0.0, 0.0)])
def test_what_does_not_come_up_in_time_ends_the_agent(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], wait_s: float, waited_s: float
) -> None:
    monkeypatch.setattr(network_discovery, "interfaces", lambda: (LO,))
    with pytest.raises(CannotStart, match=f"waited {wait_s:g} s for a route to .*: check cables") as caught:
        wait_for_network(a_config("c10d", "nowhere", wait_s=wait_s), clock.append)
    assert caught.value.code is ExitCode.NO_NETWORK
    assert sum(clock) == waited_s


def test_what_can_never_work_is_not_waited_for(clock: list[float]) -> None:
    with pytest.raises(CannotStart, match=r"10\.9\.9\.9") as caught:
        wait_for_network(a_config("c10d", "x", local_addr="10.9.9.9"), clock.append)
    assert caught.value.code is ExitCode.NOT_HERE
    assert clock == []
