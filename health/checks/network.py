"""This node in its network: its name and address, its interface, its ports, and whether others answer."""

from __future__ import annotations

import errno
import http.client
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .finding import Finding, NodeNeeds, Outcome, listed, span

SLOW_NAMES_S = 1.0
SLOW_NAMES_ADVICE = (
    "torch looks up each peer's name, and the start of a generation waits: correct the name servers in"
    " /etc/resolv.conf, or write the nodes into /etc/hosts"
)
SILENT_ADVICE = "look at this machine's network and at what stands between it and the other nodes"
SLOW_LINK_MBPS = 1000
LEAST_PORTS = 4
"""For metrics, the rendezvous store, the workers' store, and that of the next generation beside it."""
MOST_PORTS = 256
"""Of a wider range, these are tried, spread over it."""
MOST_ADDRESSES = 16
PEER_S = 2.0


# --- Names


@dataclass(frozen=True, slots=True, kw_only=True)
class NameFacts:
    host: str
    addresses: tuple[str, ...] = ()
    """Of this host's name; none: it does not resolve."""
    problem: str = ""
    own: tuple[str, ...] = ()
    """Those of them that belong to this machine."""
    forward_s: float = 0.0
    back: str = ""
    """The name of the node's address, or else of the first one above; empty: it has none."""
    back_s: float = 0.0


def check_names(needs: NodeNeeds) -> Finding:
    return judge_names(probe_names(needs), needs)


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


def judge_names(facts: NameFacts, needs: NodeNeeds) -> Finding:
    """MPI, and gloo without an interface, resolve the host's name; torch's store looks peers' addresses up."""
    values = {"forward_seconds": facts.forward_s, "back_seconds": facts.back_s}
    address = needs.address or (facts.addresses[0] if facts.addresses else "")

    def found(outcome: Outcome, summary: str, advice: str = "") -> Finding:
        return Finding("name-resolution", outcome, summary, advice, values)

    if facts.addresses and not facts.own:
        return found(
            Outcome.WARN,
            f"{facts.host} is {listed(list(facts.addresses))}, which is no address of this machine",
            "others that look for this node come to another: correct DNS or /etc/hosts",
        )
    slowest_s = max(facts.forward_s, facts.back_s)
    if slowest_s > SLOW_NAMES_S:
        what = facts.host if facts.forward_s == slowest_s else address
        return found(
            Outcome.WARN,
            f"looking up {what} took {span(slowest_s)}",
            SLOW_NAMES_ADVICE,
        )
    if not facts.addresses:
        return found(
            Outcome.WARN,
            f"the host's own name {facts.host} does not resolve ({facts.problem})",
            "programs that look it up fail: write it into /etc/hosts",
        )
    back = f"{address} is {facts.back}" if facts.back else f"{address} has no name"
    return found(Outcome.OK, f"{facts.host} is {listed(list(facts.addresses))}; {back}")


# --- The interface


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    exists: bool
    state: str = ""
    """operstate: up, down, unknown, ..."""
    speed_mbps: int | None = None
    """None: the kernel does not know it."""
    mtu: int | None = None


def check_interface(needs: NodeNeeds) -> Finding:
    return judge_interface(probe_interface(needs), needs)


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


def judge_interface(facts: InterfaceFacts, needs: NodeNeeds) -> Finding:
    """A loopback, a tunnel and many virtual ones are in the state `unknown`, and work."""
    name, values = needs.interface, {}
    if facts.speed_mbps is not None:
        values["speed_mbps"] = float(facts.speed_mbps)
    if facts.mtu is not None:
        values["mtu"] = float(facts.mtu)
    if not facts.exists:
        advice = "choose one of `ip link` with --network-interface"
        return Finding("interface", Outcome.FAIL, f"there is no interface {name}", advice, values)
    if facts.state not in ("up", "unknown"):
        advice = f"check cable and switch port, or `ip link set {name} up`; or choose another with --network-interface"
        return Finding("interface", Outcome.FAIL, f"{name} is {facts.state}", advice, values)
    speed = "speed unknown" if facts.speed_mbps is None else f"{facts.speed_mbps} Mbit/s"
    shown = f"{name} is {'up' if facts.state == 'up' else 'there'}, {speed}"
    if facts.speed_mbps is not None and facts.speed_mbps < SLOW_LINK_MBPS:
        advice = "the slowest link sets the pace of all: check cable and switch port (ethtool), or choose another with"
        return Finding("interface", Outcome.WARN, shown, f"{advice} --network-interface", values)
    return Finding("interface", Outcome.OK, shown, values=values)


# --- Ports


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    free: int
    tried: int
    refused: str = ""
    """Why a port cannot be bound at all, where it is for another reason than that it is taken."""


def check_ports(needs: NodeNeeds) -> Finding:
    return judge_ports(probe_ports(needs), needs)


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


def judge_ports(facts: PortFacts, needs: NodeNeeds) -> Finding:
    assert needs.ports is not None, "else there is nothing to look at"
    first, last = needs.ports
    names, size = f"{first}-{last}", last - first + 1
    values: dict[str, float] = {"free": facts.free, "tried": facts.tried}
    of_tried = f"{facts.free} of {facts.tried} ports of {names} at {needs.address} are free"
    if facts.refused:
        advice = "choose another range with --port-range, or another address with --local-addr"
        return Finding(
            "port-range", Outcome.FAIL, f"{names} at {needs.address}: {facts.refused}", advice, values
        )
    if not facts.free:
        advice = "stop what holds them (ss -ltnp), or choose another range with --port-range"
        return Finding("port-range", Outcome.FAIL, of_tried, advice, values)
    if facts.free < LEAST_PORTS:
        stop = "" if size < LEAST_PORTS else "stop what holds the others (ss -ltnp), or "
        advice = (
            f"an agent needs up to {LEAST_PORTS}, and waits for one at each restart: {stop}widen --port-range"
        )
        return Finding("port-range", Outcome.WARN, of_tried, advice, values)
    return Finding("port-range", Outcome.OK, of_tried, values=values)


# --- Other nodes' agents


def check_peers(needs: NodeNeeds) -> Finding:
    """Whether they answer over HTTP, as they do among themselves."""
    return judge_peers(len(needs.peers), [peer for peer in needs.peers if not answers(peer)])


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


def judge_peers(asked: int, silent: Sequence[str]) -> Finding:
    """Most peers have to answer: a single silent one may itself be gone."""
    if not silent:
        return Finding("peers", Outcome.OK, f"{asked} other nodes answer over HTTP")
    outcome = Outcome.FAIL if 2 * len(silent) > asked else Outcome.WARN
    return Finding("peers", outcome, f"no answer over HTTP from {', '.join(silent)}", SILENT_ADVICE)
