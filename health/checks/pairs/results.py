"""What nodes find out about each other, as they write it down for the one that judges.

Everything here may come from another node, so all of it is bounded and checked (`elastic_agent/codec.py`). Rates are
bytes per second, and no field holds an instant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from ....codec import AtMost, Checked, Seconds, Text, Within
from .rounds import Pair, pair_of

Node = Annotated[str, Text(128, re.compile(r"[A-Za-z0-9._-]{1,128}"))]
Rate = Annotated[float, Within(0, 2**60)]
Offset = Annotated[float, Within(-(2**40), 2**40)]
Detail = Annotated[str, Text(512)]
Secret = Annotated[str, Text(32, re.compile("[0-9a-f]{32}"))]

MOST_NODES = 4096


class Obstacle(Enum):
    """Why a node does not reach another one."""

    DROPPED = "dropped"
    """No answer at all to SYN."""
    REFUSED = "refused"
    NO_ROUTE = "no-route"
    FORBIDDEN = "forbidden"
    """By a packet filter of the node that asks."""
    RESET = "reset"
    """The connection came to be, and then a reset came."""
    SILENT = "silent"
    """The connection came to be, and then nothing more came."""
    STRANGER = "stranger"
    """What answers there is another program, or another machine with the same address."""
    OWN = "own"
    """The node that asks cannot: it is out of descriptors, of ports, or of time."""


@dataclass(frozen=True, slots=True)
class ProbeEndpoint(Checked):
    """Where a node answers the others' probes. A probe begins with `request_token`, and gets `reply_token`."""

    node: Node
    address: Annotated[str, Text(256)]
    port: Annotated[int, Within(1, 65535)]
    request_token: Secret
    reply_token: Secret


@dataclass(frozen=True, slots=True)
class Reach(Checked):
    """One try from `source` to `target`. None: the target answered."""

    source: Node
    target: Node
    obstacle: Obstacle | None = None
    detail: Detail = ""


@dataclass(frozen=True, slots=True)
class Measurement(Checked):
    """What `first`, which asked, found out about the pair of itself and `second`; None: not found out, or not tried.

    `sent` is the rate from `first` to `second`, `received` that of the way back.
    """

    round: Annotated[int, Within(1, 2)]
    first: Node
    second: Node
    obstacle: Obstacle | None = None
    detail: Detail = ""
    latency_s: Seconds | None = None
    """Of a byte there and back: the median."""
    sent: Rate | None = None
    received: Rate | None = None
    clock_offset_s: Offset | None = None
    """The clock of `second` less that of `first`."""
    all_reduce_s: Seconds | None = None
    """Of the fastest of a few."""
    all_reduce_problem: Detail = ""

    @property
    def pair(self) -> Pair:
        return pair_of(self.first, self.second)


@dataclass(frozen=True, slots=True)
class NodeResults(Checked):
    """What one node has to say after one stage of the check."""

    reached: Annotated[tuple[Reach, ...], AtMost(MOST_NODES)] = ()
    measured: Annotated[tuple[Measurement, ...], AtMost(16)] = ()
    seen: Annotated[tuple[Node, ...], AtMost(MOST_NODES)] = ()
    """Whose file in the checkpoint directory this node sees in its own."""
