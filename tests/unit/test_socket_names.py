"""How NCCL, gloo and TensorPipe read the names of interfaces that a user has set."""

from __future__ import annotations

import ipaddress

import pytest

from elastic_agent.agent.machine.interfaces import (
    Address,
    Interface,
    check_socket_names,
    nccl_takes,
)

V4 = (Address(ipaddress.ip_address("10.0.0.1"), 24),)
V6 = (Address(ipaddress.ip_address("fd00::1"), 64),)
HERE = (
    Interface("lo", True, V4),
    Interface("eth0", True, V4),
    Interface("eth1", False, V4),
    Interface("eth10", True, V6),
    Interface("docker0", True, V4),
    Interface("ib0", True),
)
NAMES = [interface.name for interface in HERE]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("eth", "eth0 eth1 eth10"),
        ("eth1", "eth1 eth10"),
        ("=eth1", "eth1"),
        ("=eth", ""),
        ("=eth0,eth1", "eth0 eth1"),
        ("eth0,=eth1", "eth0"),
        ("^eth,docker", "lo ib0"),
        ("^=eth1,lo", "eth0 eth10 docker0 ib0"),
        ("=^eth1", ""),
        ("^eth,docker,lo,ib", ""),
        ("eth0:1", "eth0"),
        ("eth0,,ib", "eth0 ib0"),
        (",", " ".join(NAMES)),
        ("^,", ""),
    ],
)
def test_what_nccl_takes(value: str, expected: str) -> None:
    assert nccl_takes(value, NAMES) == expected.split()


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("NCCL_SOCKET_IFNAME", "ens5", "a pattern that fits an interface of this node: lo, eth0, eth1, eth10"),
        ("NCCL_SOCKET_IFNAME", "=eth", "or unset it and the agent sets it"),
        ("NCCL_SOCKET_IFNAME", "^eth,docker,lo,ib", "a pattern that fits"),
        ("GLOO_SOCKET_IFNAME", "eth", "whole names of interfaces of this node: lo, eth0"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth5", "whole names of interfaces of this node: lo, eth0"),
        ("GLOO_SOCKET_IFNAME", "=eth0", "whole names of interfaces of this node: lo, eth0"),
        ("TP_SOCKET_IFNAME", "eth0,eth1", "the whole name of an interface of this node: lo, eth0"),
        ("TP_SOCKET_IFNAME", "^=docker0", "the whole name of an interface"),
    ],
)  # fmt: skip
def test_what_fits_nothing_is_refused_with_key_value_and_remedy(variable: str, value: str, text: str) -> None:
    (problem,) = check_socket_names({variable: value}, HERE)
    assert str(problem).startswith(f"{variable} {value!r}: expected ")
    assert text in str(problem)


@pytest.mark.parametrize(
    ("variable", "value", "here"),
    [
        ("NCCL_SOCKET_IFNAME", "=eth", True),
        ("GLOO_SOCKET_IFNAME", "eth5", True),
        ("GLOO_SOCKET_IFNAME", "^docker0", False),
        ("TP_SOCKET_IFNAME", "=eth0", False),
    ],
)
def test_a_pattern_that_only_nccl_reads_is_wrong_on_every_machine(
    variable: str, value: str, here: bool
) -> None:
    (problem,) = check_socket_names({variable: value}, HERE)
    assert problem.here is here


def test_all_problems_are_named() -> None:
    environ = dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "nothing")
    assert [problem.origin for problem in check_socket_names(environ, HERE)] == [*environ]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NCCL_SOCKET_IFNAME": "x", "GLOO_SOCKET_IFNAME": "x", "TP_SOCKET_IFNAME": ""},
        {"NCCL_SOCKET_IFNAME": "", "GLOO_SOCKET_IFNAME": ""},
        {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1,eth0", "TP_SOCKET_IFNAME": "ib0"},
    ],
)
def test_what_fits_and_what_the_libraries_take_for_none_is_let_through(environ: dict[str, str]) -> None:
    assert check_socket_names(environ, HERE) == []
