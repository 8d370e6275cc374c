"""Names, addresses and routes as this machine knows them now, and the name by which its agent goes."""

from __future__ import annotations

import ipaddress
import re
import socket
import uuid

from ....rendezvous.records import Endpoint

LOOPBACK = "127.0.0.1"

ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of the ranges kept for documentation: never contacted, only asked for the route towards them."""


class AddressError(Exception):
    """The host name cannot be turned into an address."""


def resolve(host: str, port: int) -> str:
    """The first address of `host`, the way every node resolves it. Raises AddressError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"{host!r} does not resolve to an address ({error})") from error
    # IPv4 first: a dual-stack name often has link-local or unrouted IPv6 addresses that only look usable.
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return str(found[0][4][0])


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def endpoint_address(endpoint: Endpoint) -> str | None:
    """The address of an endpoint that one of the nodes serves; None for this machine's own name. Raises AddressError.

    Debian's /etc/hosts gives a machine's own name a loopback address, where no other node can come.
    """
    address = resolve(endpoint.address, endpoint.port)
    own_name = is_loopback(address) and endpoint.address not in ("localhost", address)
    return None if own_name else address


def source_address(towards: str) -> str | None:
    """This node's own address on its route to an address; None without a route."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only looks the route up.
            probe.connect((towards, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def default_source() -> str | None:
    """This node's own address on its default route, IPv4 first; None without one."""
    return next((source for place in ELSEWHERE if (source := source_address(place)) is not None), None)


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
