"""This node in its network: its name and address, its interface, its ports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ....codec import AtMost, Checked, Count, Seconds, Text
from ..finding import Finding, Outcome
from ..needs import NodeNeeds
from ..text import listed, span

SLOW_NAMES_S = 1.0
SLOW_NAMES_ADVICE = (
    "torch looks up each peer's name, and the start of a generation waits: correct the name servers in"
    " /etc/resolv.conf, or write the nodes into /etc/hosts"
)
SLOW_LINK_MBPS = 1000
LEAST_PORTS = 4
"""For metrics, the rendezvous store, the workers' store, and that of the next generation beside it."""

_Name = Annotated[str, Text(1024)]
_Names = Annotated[tuple[_Name, ...], AtMost(64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NameFacts(Checked):
    host: _Name
    addresses: _Names = ()
    """Of this host's name; none: it does not resolve."""
    problem: _Name = ""
    own: _Names = ()
    """Those of them that belong to this machine."""
    forward_s: Seconds = 0.0
    back: _Name = ""
    """The name of the node's address, or else of the first one above; empty: it has none."""
    back_s: Seconds = 0.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts(Checked):
    exists: bool
    state: Annotated[str, Text(64)] = ""
    """operstate: up, down, unknown, ..."""
    speed_mbps: Count | None = None
    """None: the kernel does not know it."""
    mtu: Count | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts(Checked):
    free: Count
    tried: Count
    refused: _Name = ""
    """Why a port cannot be bound at all, where it is for another reason than that it is taken."""


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
