"""Ports for scripts: free when they are named, and held while they are reserved."""

from __future__ import annotations

import socket

import pytest

from elastic_agent.worker import find_free_network_port, reserve_port


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_reserved_port_is_nobody_elses(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with reserve_port(host) as port, socket.socket(family) as other:
        with pytest.raises(OSError, match="Address already in use"):
            other.bind((host, port))
        with socket.socket(family) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            own.bind((host, port))
            own.listen()


def test_a_free_port_can_be_bound_at_once() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", find_free_network_port()))
