"""Answers what other nodes ask of the copies here: which there are, and their bytes."""

from __future__ import annotations

from .....worker.storage.replication.client import CopyGone
from .....worker.storage.replication.link import Damaged, Link
from .....worker.storage.replication.messages import (
    REQUESTS,
    End,
    Found,
    Gone,
    List,
    Read,
    Stretch,
)
from .copies import CopyReader, VerifiedPieces, copies_of
from .receiving import Receiver

STRETCH_BYTES = 1 << 20
MOST_CHARS = 500
NEXT_S = 0.002
"""How long a thread waits for the next request of a connection before others have it: of many small reads each comes
right after the other."""


def answer(link: Link, memory: str, receiver: Receiver, verified: VerifiedPieces) -> None:
    """The request that has begun to come, and those right behind it. Raises OSError, and then the connection is of no
    more use."""
    with _Answers(link, memory, receiver, verified) as answers:
        answers.give()
        while link.waits(NEXT_S):
            answers.give()


class _Answers:
    def __init__(self, link: Link, memory: str, receiver: Receiver, verified: VerifiedPieces) -> None:
        self._link = link
        self._memory = memory
        self._receiver = receiver
        self._verified = verified
        self._buffer = bytearray()
        self._copy: CopyReader | None = None
        """That was read last."""

    def __enter__(self) -> _Answers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._copy is not None:
            self._copy.close()

    def give(self) -> None:
        request = self._link.receive(REQUESTS)
        if self._link.payload_bytes:
            raise Damaged("a request with a payload")
        if isinstance(request, List):
            for copy in copies_of(self._memory, request.directory):
                self._link.send(Found(copy))
            self._link.send(End())
        elif isinstance(request, Read):
            try:
                self._read(request)
            except CopyGone as gone:
                self._link.send(Gone(str(gone)[:MOST_CHARS]))
        else:
            self._receiver.receive(self._link, request)

    def _read(self, request: Read) -> None:
        copy = self._copy_of(request)
        end = request.offset + request.length
        if end > copy.header.size:
            raise CopyGone(f"the copy has {copy.header.size} bytes, and {end} are asked for")
        if len(self._buffer) < min(STRETCH_BYTES, request.length):
            self._buffer = bytearray(min(STRETCH_BYTES, request.length))
        with memoryview(self._buffer) as buffer:
            for offset in range(request.offset, end, STRETCH_BYTES):
                with buffer[: min(STRETCH_BYTES, end - offset)] as stretch:
                    if request.verify:
                        copy.verify(offset, len(stretch), self._verified.of(copy))
                    copy.read(offset, stretch)
                    self._link.send(Stretch(), stretch)

    def _copy_of(self, request: Read) -> CopyReader:
        """Raises CopyGone."""
        version = request.generation, request.step
        copy = self._copy
        if copy is not None and (copy.folder, copy.slot, copy.header.version) == (
            request.folder,
            request.slot,
            version,
        ):
            return copy
        found = CopyReader(self._memory, request.folder, request.slot, version)
        if copy is not None:
            copy.close()
        self._copy = found
        return found
