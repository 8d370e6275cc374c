"""This node in its network: its name and address, its interface, and whether others answer."""

from __future__ import annotations

import http.client
import os
import socket
import time

from .finding import Finding, NodeNeeds, Outcome, listed, span

SLOW_NAMES_S = 1.0
SLOW_NAMES_ADVICE = (
    "torch looks up each peer's name, and the start of a generation waits: correct the name servers in"
    " /etc/resolv.conf, or write the nodes into /etc/hosts"
)
SILENT_ADVICE = "look at this machine's network and at what stands between it and the other nodes"
SLOW_LINK_MBPS = 1000
MOST_ADDRESSES = 16
PEER_S = 2.0


# --- Names


def check_names(needs: NodeNeeds) -> Finding:
    """MPI, and gloo without an interface, resolve the host's name; torch's store looks peers' addresses up."""
    host, problem = socket.gethostname(), ""
    addresses: list[str] = []
    began = time.monotonic()
    try:
        found_here = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(place[4][0]) for place in found_here))[:MOST_ADDRESSES]
    except OSError as error:
        problem = error.strerror or str(error)
    forward_s = time.monotonic() - began
    address = needs.address or (addresses[0] if addresses else "")
    began = time.monotonic()
    try:
        back = socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0] if address else ""
    except OSError:
        back = ""
    back_s = time.monotonic() - began

    def found(outcome: Outcome, summary: str, advice: str = "") -> Finding:
        values = {"forward_seconds": forward_s, "back_seconds": back_s}
        return Finding("name-resolution", outcome, summary, advice, values)

    if addresses and not any(map(_is_own, addresses)):
        return found(
            Outcome.WARN,
            f"{host} is {listed(addresses)}, which is no address of this machine",
            "others that look for this node come to another: correct DNS or /etc/hosts",
        )
    if max(forward_s, back_s) > SLOW_NAMES_S:
        slow, took_s = (host, forward_s) if forward_s >= back_s else (address, back_s)
        return found(Outcome.WARN, f"looking up {slow} took {span(took_s)}", SLOW_NAMES_ADVICE)
    if not addresses:
        return found(
            Outcome.WARN,
            f"the host's own name {host} does not resolve ({problem})",
            "programs that look it up fail: write it into /etc/hosts",
        )
    return found(
        Outcome.OK, f"{host} is {listed(addresses)}; {address} " + (f"is {back}" if back else "has no name")
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


# --- The interface


def check_interface(needs: NodeNeeds, sys: str = "/sys") -> Finding:
    """A loopback, a tunnel and many virtual ones are in the state `unknown`, and work."""
    name = needs.interface
    folder = os.path.join(sys, "class/net", name)
    # /sys may be missing, or be that of another network namespace.
    if not os.path.isdir(folder) and name not in (known for _, known in socket.if_nameindex()):
        advice = "choose one of `ip link` with --network-interface"
        return Finding("interface", Outcome.FAIL, f"there is no interface {name}", advice)
    state = _read(os.path.join(folder, "operstate")) or "unknown"
    speed_mbps, mtu = _number(os.path.join(folder, "speed")), _number(os.path.join(folder, "mtu"))
    if speed_mbps in (0, 2**32 - 1):
        speed_mbps = None
    known_here = {"speed_mbps": speed_mbps, "mtu": mtu}
    values = {what: float(value) for what, value in known_here.items() if value is not None}
    if state not in ("up", "unknown"):
        advice = f"check cable and switch port, or `ip link set {name} up`; or choose another with --network-interface"
        return Finding("interface", Outcome.FAIL, f"{name} is {state}", advice, values)
    speed = "speed unknown" if speed_mbps is None else f"{speed_mbps} Mbit/s"
    shown = f"{name} is {'up' if state == 'up' else 'there'}, {speed}"
    if speed_mbps is not None and speed_mbps < SLOW_LINK_MBPS:
        advice = "the slowest link sets the pace of all: check cable and switch port (ethtool), or choose another with"
        return Finding("interface", Outcome.WARN, shown, f"{advice} --network-interface", values)
    return Finding("interface", Outcome.OK, shown, values=values)


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


# --- Other nodes' agents


def check_peers(needs: NodeNeeds) -> Finding:
    """Whether they answer over HTTP, as they do among themselves. Most have to: a single silent one may itself be
    gone."""
    asked, silent = len(needs.peers), [peer for peer in needs.peers if not answers(peer)]
    if not silent:
        return Finding("peers", Outcome.OK, f"{asked} other nodes answer over HTTP")
    outcome = Outcome.FAIL if 2 * len(silent) > asked else Outcome.WARN
    return Finding("peers", outcome, f"no answer over HTTP from {', '.join(silent)}", SILENT_ADVICE)


def answers(peer: str) -> bool:
    """HOST:PORT, with an IPv6 address in brackets."""
    connection = http.client.HTTPConnection(peer, timeout=PEER_S)
    try:
        connection.request("GET", "/node")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
