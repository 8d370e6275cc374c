"""Which network the workers' collectives cross, from --network-profile and the RDMA ports that are active.

`auto` takes what NCCL itself would take: RDMA where there is an active port, InfiniBand before EFA before RoCE, else
TCP. A profile that was chosen by name must fit the machine, because NCCL falls back to TCP without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...configuration.config import ConfigError, Problem
from ...configuration.values import NetworkProfile
from .interfaces import RdmaPort

Transport = Literal["ethernet", "infiniband", "efa", "roce"]

_RDMA: dict[Transport, str] = {"infiniband": "InfiniBand", "efa": "EFA", "roce": "RoCE"}
"""In the order of preference."""


@dataclass(frozen=True, slots=True)
class Profile:
    """`ports`: the active RDMA ports of this transport. `reason` is the sentence for --check-config."""

    transport: Transport
    reason: str
    by_name: bool = False
    debug: bool = False
    ports: tuple[str, ...] = ()
    foreign_ports: tuple[str, ...] = ()
    """Active RDMA ports of another transport, which NCCL would use as well."""


TCP = Profile("ethernet", "no RDMA port is active on this machine")


def choose_profile(wanted: NetworkProfile, active: Sequence[RdmaPort]) -> Profile:
    """Raises ConfigError when the machine has no port for the profile that was asked for."""
    transport: Transport
    if wanted == "auto" or wanted == "debug":
        transport = next((rdma for rdma in _RDMA if _ports(active, rdma)), "ethernet")
        found = f"{_RDMA[transport]} is active" if transport in _RDMA else "no RDMA port is active"
        reason = f"{found} on this machine"
    else:
        transport, reason = wanted, "you chose it"
        if transport in _RDMA and not _ports(active, transport):
            raise ConfigError([_no_port(transport, active)])
    own = _ports(active, transport)
    return Profile(
        transport,
        reason,
        by_name=transport == wanted,
        debug=wanted == "debug",
        ports=own,
        foreign_ports=tuple(str(port) for port in active if str(port) not in own),
    )


def _ports(active: Sequence[RdmaPort], transport: Transport) -> tuple[str, ...]:
    return tuple(str(port) for port in active if _transport(port) == transport)


def _no_port(transport: Transport, active: Sequence[RdmaPort]) -> Problem:
    others = ", ".join(map(str, active)) or "none"
    return Problem(
        "--network-profile",
        transport,
        f"an active {_RDMA[transport]} port on this machine, whose active RDMA ports are: {others}",
        "check `rdma link`, or use --network-profile auto",
        here=True,
    )


def _transport(port: RdmaPort) -> Transport:
    if port.link_layer == "InfiniBand":
        return "infiniband"
    # EFA has no link layer that sysfs knows; its devices are rdmap<bus>s<slot>, or efa_<n> without udev's names.
    if port.link_layer != "Ethernet" and port.device.startswith(("rdmap", "efa")):
        return "efa"
    return "roce"
