"""What a job needs of this node, as far as checks look at it: frozen, and sent to the process that runs the probes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ...codec import AtMost, Checked, Count, Document, Positive, Text, Within

Port = Annotated[int, Within(0, 65535)]
MOST_PEERS = 8
"""The most other nodes that are asked whether they answer."""
_Path = Annotated[str, Text(4096)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeeds(Checked):
    """Empty texts and zeros: the job does not say, or does not need it."""

    workers: Positive = 1
    """On this node."""
    ranks: Positive = 1
    """Of the whole job, at its largest."""
    copies_bytes: Count = 0
    """Of the states that are to be kept in shared memory."""
    checkpoint_directory: _Path = ""
    log_directory: _Path = ""
    interface: Annotated[str, Text(64)] = ""
    address: Annotated[str, Text(256)] = ""
    """By which other nodes reach this one."""
    ports: tuple[Port, Port] | None = None
    """The first and the last that the agent may listen on; None: any free one."""
    gpus: Annotated[tuple[Annotated[str, Text(128)], ...], AtMost(256)] = ()
    """As NVML knows them: a PCI address, a uuid or an index."""
    rdma: bool = False
    """NCCL uses InfiniBand or RoCE."""
    peers: Annotated[tuple[Annotated[str, Text(280)], ...], AtMost(MOST_PEERS)] = ()
    """Where other nodes' agents answer over HTTP, as HOST:PORT."""


NEEDS = Document(NodeNeeds, version=1, most_chars=65_536)
