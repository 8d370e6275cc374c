"""Brings one copy to another node's memory server, over a connection that is there already.

The receiver says which pieces it has, so a push over a new connection goes on where the one before broke.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from .....worker.storage.memory.slots import PIECE_BYTES
from .....worker.storage.replication.client import CopyGone
from .....worker.storage.replication.link import Link
from .....worker.storage.replication.messages import (
    PUSH_ANSWERS,
    PUSH_ENDS,
    Acknowledged,
    Have,
    Piece,
    Push,
    Refused,
    Sent,
    Superseded,
)
from .copies import CopyReader

LASTING = ("no_room", "abandoned")
"""Refusals of which the next try would bring another."""


class RefusedCopy(Exception):
    """The other node does not take the copy now."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.reason)
        self.lasts = refusal.why in LASTING


@dataclass(slots=True)
class Sender:
    """`node` is the one whose copies are sent. `pause` is called before so many bytes go, `sent` after."""

    node: str
    pause: Callable[[int], None] = lambda count: None
    sent: Callable[[int], None] = lambda count: None
    superseded: Callable[[], bool] = lambda: False
    """There is a newer copy, which makes this one useless. Looked at before each piece."""
    sums: dict[int, int] = field(default_factory=dict)
    """Of pieces that were read, by their number: of one copy, also over several connections."""

    def push(self, link: Link, reader: CopyReader) -> bool:
        """Whether the other node has acknowledged it; False: superseded.

        Raises OSError, CopyGone, RefusedCopy, and what `pause` and `superseded` raise.
        """
        header, sums = reader.header, self.sums
        count = -(-header.size // PIECE_BYTES)
        with memoryview(bytearray(min(PIECE_BYTES, header.size))) as buffer:

            def read(index: int) -> memoryview:
                begin = index * PIECE_BYTES
                piece = buffer[: min(PIECE_BYTES, header.size - begin)]
                reader.read(begin, piece)
                sums[index] = zlib.crc32(piece)
                return piece

            link.send(Push(self.node, reader.folder, header))
            answer = link.receive(PUSH_ANSWERS)
            if isinstance(answer, Have):
                return True
            if isinstance(answer, Refused):
                raise RefusedCopy(answer)
            try:
                for index in range(answer.piece):
                    if index not in sums:
                        read(index).release()
                for index in range(answer.piece, count):
                    if self.superseded():
                        link.send(Superseded())
                        return False
                    with read(index) as piece:
                        link.send(Piece(index), piece, sums[index], self.pause)
                        self.sent(len(piece))
            except CopyGone:
                link.send(Superseded())
                raise
            whole = tuple(sums[index] for index in range(count))
            link.send(Sent(whole))
            end = link.receive(PUSH_ENDS)
            if not isinstance(end, Acknowledged):
                sums.clear()
                raise RefusedCopy(end)
            with contextlib.suppress(OSError):  # no room for the sums: the copy goes without
                reader.add_sums(whole)
        return True
