"""Every message to and from a memory server, the process of an agent that serves its node's copies to other nodes.

    requests    MemoryClient, a server, an agent -> server    List, Read, Push, each on a `Link`
    answers     server -> who asked                           Found ... End; Stretch ... ; Have, Send, Acknowledged
    a push      the node that sends -> server                 Push, then Piece ..., Sent; or Superseded
    orders      a worker -> its own node's server             Replicate, Settled, AbandonNewer, on a UNIX socket

Servers push replicas, and the agent of a node that leaves pushes what only that node has.

A message that cannot be read is refused where it is made, and where it arrives.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from ....codec import AtMost, Checked, Codec, Count, Positive, Text
from ...wire.messages import MOST_PARTNERS, NodeName, SlotName
from ..memory.copy_header import FoundCopy, Header
from ..memory.slot_folders import Folder

VERSION = 2
MAX_BYTES = 8 << 20
"""Of one message on a `Link`, which may hold the checksums of a whole copy. Only who has the key can send one."""
MAX_ORDER_BYTES = 32768
MOST_WORKERS = 256

Directory = Annotated[str, Text(16, re.compile(r"[0-9a-f]{16}"))]
"""The digest of a checkpoint directory's path, see `SlotFolder`."""
Address = Annotated[str, Text(300, re.compile(r".+:\d{1,5}"))]
"""HOST:PORT."""
Reason = Annotated[str, Text(500)]


# ---------------------------------------------------------------- list and read


@dataclass(frozen=True, slots=True)
class List(Checked):
    """Which copies of this checkpoint directory are there? Answered by Found, one for each, and End."""

    directory: Directory


@dataclass(frozen=True, slots=True)
class Found(Checked):
    copy: FoundCopy


@dataclass(frozen=True, slots=True)
class End(Checked):
    """There are no more."""


@dataclass(frozen=True, slots=True)
class Read(Checked):
    """Bytes of the copy of this version. Answered by Stretch until all have come, or by Gone.

    `verify`: the server first compares the pieces that have these bytes with the copy's checksums, if it has some.
    """

    folder: Folder
    slot: SlotName
    generation: Count
    step: Count
    offset: Count
    length: Positive
    verify: bool


@dataclass(frozen=True, slots=True)
class Stretch(Checked):
    """The next bytes: the payload."""


@dataclass(frozen=True, slots=True)
class Gone(Checked):
    """The slot no longer has that version: it was overwritten, or it was damaged and the server has dropped it."""

    reason: Reason


# ---------------------------------------------------------------- push


@dataclass(frozen=True, slots=True)
class Push(Checked):
    """Keep the copy that `node` has in `folder`, its own or a replica. Answered by Have, Send or Refused."""

    node: NodeName
    folder: Folder
    header: Header


@dataclass(frozen=True, slots=True)
class Have(Checked):
    """That copy is here, or one of the same shards; or a newer one of a state that is the same on all ranks."""


@dataclass(frozen=True, slots=True)
class Send(Checked):
    """There is room for it: send its pieces."""


@dataclass(frozen=True, slots=True)
class Refused(Checked):
    """`no_room`: the memory that the agent may take is used up; `abandoned`: the job has gone on from an older state;
    `busy`: both slots of the replica are being read, or another connection brings the copy; `damaged`: what came is not
    what was to come."""

    why: Literal["no_room", "abandoned", "busy", "damaged"]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Piece(Checked):
    """The next piece of `slots.PIECE_BYTES`, or what is left: the payload."""

    index: Count


@dataclass(frozen=True, slots=True)
class Superseded(Checked):
    """The rest does not come: there is a newer copy."""


@dataclass(frozen=True, slots=True)
class Sent(Checked):
    """All pieces are sent; these are their checksums. Answered by Acknowledged or Refused."""

    sums: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class Acknowledged(Checked):
    """The copy is here, whole, verified, and others find it."""


# ---------------------------------------------------------------- orders


@dataclass(frozen=True, slots=True)
class Partner(Checked):
    """`local_ranks` are of the workers whose copies it is to get, `loaded_ranks` of those whose copies of the loaded
    version, and of older ones: other nodes may hold the same shards of that than of those to come."""

    node: NodeName
    address: Address
    local_ranks: Annotated[tuple[Count, ...], AtMost(MOST_WORKERS)]
    loaded_ranks: Annotated[tuple[Count, ...], AtMost(MOST_WORKERS)]


@dataclass(frozen=True, slots=True)
class Replicate(Checked):
    """From now on bring this node's newest copies to `partners`. It takes the place of the order before.

    The workers are of `generation`, and went on from the version `resumed`: older generations' other copies are not
    brought; where they are newer than that they are not taken from others either, and replicas of them are dropped.
    """

    directory: str
    generation: Count
    resumed: tuple[Count, Count]
    partners: Annotated[tuple[Partner, ...], AtMost(MOST_PARTNERS)] = ()


@dataclass(frozen=True, slots=True)
class Settled(Checked):
    """Replicas that are older than this version are no longer needed, on no node: see `copy_rule.oldest_needed`."""

    directory: str
    generation: Count
    step: Count


@dataclass(frozen=True, slots=True)
class AbandonNewer(Checked):
    """Drop replicas that are newer than this version."""

    directory: str
    generation: Count
    step: Count


Order = Replicate | Settled | AbandonNewer


# ---------------------------------------------------------------- what is read where

REQUESTS: Codec[List | Read | Push] = Codec((List, Read, Push), VERSION, MAX_BYTES)
LISTED: Codec[Found | End] = Codec((Found, End), VERSION, MAX_BYTES)
STRETCHES: Codec[Stretch | Gone] = Codec((Stretch, Gone), VERSION, MAX_BYTES)
PUSH_ANSWERS: Codec[Have | Send | Refused] = Codec((Have, Send, Refused), VERSION, MAX_BYTES)
PUSHED: Codec[Piece | Superseded | Sent] = Codec((Piece, Superseded, Sent), VERSION, MAX_BYTES)
PUSH_ENDS: Codec[Acknowledged | Refused] = Codec((Acknowledged, Refused), VERSION, MAX_BYTES)
ORDERS: Codec[Order] = Codec((Replicate, Settled, AbandonNewer), VERSION, MAX_ORDER_BYTES)

_ALL = Codec[Checked]((), VERSION, MAX_BYTES)


def encode(message: Checked) -> bytes:
    """One line."""
    return _ALL.encode(message)
