"""Opening the store: where this node is seen by others, which password is used, and what is not loaded for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.agent import store_opening
from elastic_agent.agent.config import (
    Backend,
    Command,
    Config,
    Endpoint,
    EtcdConfig,
    RendezvousConfig,
    Secret,
)
from elastic_agent.agent.exits import CannotStart, ExitCode
from elastic_agent.agent.network import AddressError
from elastic_agent.agent.store_opening import c10d_endpoint, etcd_password, node_address
from elastic_agent.rendezvous.errors import StoreRefused

OWN = "10.0.0.1"
HOSTS = {
    "localhost": "127.0.0.1",
    "me": "127.0.1.1",  # as Debian's /etc/hosts says
    "etcd1": "10.0.0.7",
    "etcd2": "10.9.0.7",
}
ROUTES = {"127.0.0.1": "127.0.0.1", "::1": "::1", "10.0.0.7": OWN, OWN: OWN, "10.9.0.7": "10.9.0.1"}
"""This node's address on the way to each."""


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int) -> str:
        if host not in HOSTS and not host[0].isdigit() and ":" not in host:
            raise AddressError(f"{host} does not resolve")
        return HOSTS.get(host, host)

    def own_address(towards: tuple[str, int] | None) -> str:
        return OWN if towards is None else ROUTES[towards[0]]

    monkeypatch.setattr(store_opening, "resolve", resolve)
    monkeypatch.setattr(store_opening, "own_address", own_address)


def a_config(backend: Backend, *hosts: str, local_addr: str | None = None) -> Config:
    endpoints = tuple(Endpoint(host, 1) for host in hosts)
    rendezvous = RendezvousConfig(backend, endpoints, EtcdConfig() if backend == "etcd" else None)
    return Config(Command("script", "train.py"), rendezvous=rendezvous, local_addr=local_addr)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (a_config("memory"), "127.0.0.1"),
        (a_config("c10d"), OWN),
        (a_config("c10d", "etcd2"), "10.9.0.1"),
        (a_config("c10d", "localhost"), "127.0.0.1"),
        (a_config("c10d", "me"), OWN),
        (a_config("etcd", "etcd1", "etcd2"), OWN),
        (a_config("etcd", "unknown", "etcd2", "etcd1"), "10.9.0.1"),
        (a_config("etcd", "localhost"), "127.0.0.1"),
        (a_config("etcd", "::1", "localhost"), "::1"),
        (a_config("etcd", "localhost", "etcd2"), "10.9.0.1"),
        (a_config("etcd", "localhost", "me"), OWN),
        (a_config("etcd", "localhost", "unknown"), OWN),
        (a_config("etcd", "unknown", local_addr="etcd2"), "10.9.0.7"),
    ],
    ids=lambda value: "+".join(e.host for e in value.rendezvous.endpoints) if isinstance(value, Config) else value,
)  # fmt: skip
def test_where_other_nodes_reach_this_one(config: Config, expected: str) -> None:
    assert node_address(config, c10d_endpoint(config)) == expected


def test_names_that_all_mean_nothing_are_refused() -> None:
    with pytest.raises(
        CannotStart, match="--rdzv-endpoint: x does not resolve; y does not resolve"
    ) as caught:
        node_address(a_config("etcd", "x", "y"), None)
    assert caught.value.code is ExitCode.BAD_CONFIG
    with pytest.raises(CannotStart, match="--rdzv-endpoint x:1: x does not resolve"):
        c10d_endpoint(a_config("c10d", "x"))


def test_the_password_is_read_anew_and_only_one_newline_is_not_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "password"
    etcd = EtcdConfig(user="u", password_file=file)
    for content, password in ((b"first\n", "first"), (b" second\r\n\n", " second\r\n"), ("ä".encode(), "ä")):
        file.write_bytes(content)
        assert etcd_password(etcd) == password
    assert etcd_password(EtcdConfig(user="u", password=Secret("third"))) == "third"


def test_a_password_file_without_text_is_refused_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(b"secret\xff")
    with pytest.raises(StoreRefused, match=f"--etcd-password-file {file} holds no UTF-8 text") as caught:
        etcd_password(EtcdConfig(user="u", password_file=file))
    assert "secret" not in str(caught.value)


def test_an_agent_with_a_store_in_memory_loads_neither_torch_nor_grpc() -> None:
    code = """
import queue, sys
import elastic_agent.agent.run
from elastic_agent.agent.config import Command, Config
from elastic_agent.agent.store_opening import open_store
open_store(Config(Command("script", "train.py")), None, None, queue.SimpleQueue()).grant(5.0)
sys.exit(" ".join({"torch", "grpc"} & set(sys.modules)) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
