"""The address that other nodes reach this one at, and this node's name. Facts of the machine."""

from __future__ import annotations

import ipaddress
import re
import socket
import uuid

from ..rendezvous.records import Endpoint

LOOPBACK = "127.0.0.1"

_ELSEWHERE = ("192.0.2.1", 9)
"""An address of the range kept for documentation: never contacted, only asked for the route towards it."""


class AddressError(Exception):
    """The host name cannot be turned into an address."""


def resolve(host: str, port: int) -> str:
    """The first address of `host`, the way every node resolves it. Raises AddressError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(
            f"{host!r} does not resolve to an address ({error}): check the name, /etc/hosts and DNS on this node"
        ) from error
    # IPv4 first: a dual-stack name often has link-local or unrouted IPv6 addresses that only look usable.
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return str(found[0][4][0])


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address(towards: tuple[str, int] | None) -> str:
    """This node's source address on the route to `towards`, or on the default route; loopback without a route."""
    host, port = towards or _ELSEWHERE
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only looks the route up.
            probe.connect((host, port or 9))
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def reachable_at(listening: tuple[str, int], address: str) -> Endpoint | None:
    """Where other nodes, who know this one by `address`, reach what listens here; None when they cannot."""
    host, port = listening
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        return Endpoint(address, port)
    return None if is_loopback(host) and not is_loopback(address) else Endpoint(host, port)


def unique_node_id() -> str:
    """The host's name and a part that no other agent has, so that several agents can share a host."""
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname()).strip("-")[:40] or "node"
    return f"{host}-{uuid.uuid4().hex[:6]}"
