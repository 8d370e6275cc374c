"""Looks names up, reads an interface, and tries to bind ports."""

from __future__ import annotations

import errno
import os
import socket
import time

from ..needs import NodeNeeds
from ..rules.network import InterfaceFacts, NameFacts, PortFacts

MOST_ADDRESSES = 16
MOST_PORTS = 256
"""Of a wider range, these are tried, spread over it."""


def probe_names(needs: NodeNeeds) -> NameFacts:
    host = socket.gethostname()
    began = time.monotonic()
    addresses: tuple[str, ...] = ()
    problem = ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = tuple(dict.fromkeys(str(place[4][0]) for place in found))[:MOST_ADDRESSES]
    except OSError as error:
        problem = error.strerror or str(error)
    forward_s = time.monotonic() - began
    address = needs.address or (addresses[0] if addresses else "")
    began = time.monotonic()
    try:
        back = socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0] if address else ""
    except OSError:
        back = ""
    return NameFacts(
        host=host,
        addresses=addresses,
        problem=problem,
        own=tuple(filter(_is_own, addresses)),
        forward_s=forward_s,
        back=back,
        back_s=time.monotonic() - began,
    )


def _is_own(address: str) -> bool:
    """Whether a socket can be bound there."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.bind(place)
    except OSError:
        return False
    return True


def probe_interface(needs: NodeNeeds, sys: str = "/sys") -> InterfaceFacts:
    folder = os.path.join(sys, "class/net", needs.interface)
    if not os.path.isdir(folder):
        # /sys may be missing, or be that of another network namespace.
        there = needs.interface in (name for _, name in socket.if_nameindex())
        return InterfaceFacts(exists=there, state="unknown")
    speed, mtu = _number(os.path.join(folder, "speed")), _number(os.path.join(folder, "mtu"))
    return InterfaceFacts(
        exists=True,
        state=_read(os.path.join(folder, "operstate")) or "unknown",
        speed_mbps=speed if speed not in (0, 2**32 - 1) else None,
        mtu=mtu,
    )


def probe_ports(needs: NodeNeeds) -> PortFacts:
    """A port counts as free when a socket can be bound and listen there; it is closed at once."""
    assert needs.ports is not None, "else there is nothing to look at"
    first, last = needs.ports
    step = max(1, (last - first + 1) // MOST_PORTS)
    family = socket.AF_INET6 if ":" in needs.address else socket.AF_INET
    free, tried, refused = 0, 0, ""
    for port in list(range(first, last + 1, step))[:MOST_PORTS]:
        tried += 1
        try:
            with socket.socket(family, socket.SOCK_STREAM) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                place = socket.getaddrinfo(needs.address or "0.0.0.0", port, flags=socket.AI_NUMERICHOST)
                listener.bind(place[0][4])
                listener.listen(1)
            free += 1
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                refused = error.strerror or str(error)
    return PortFacts(free=free, tried=tried, refused="" if free else refused)


def _read(path: str) -> str:
    """Empty where the kernel does not say."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _number(path: str) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None
