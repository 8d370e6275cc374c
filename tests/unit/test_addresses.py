"""Where other nodes find what listens here."""

from __future__ import annotations

import pytest

from elastic_agent.agent.machine.network import reachable_at
from elastic_agent.rendezvous.records import Endpoint


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
