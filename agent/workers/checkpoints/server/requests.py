"""Answers what other nodes ask of the copies here: which there are, and their bytes."""

from __future__ import annotations

from .....worker.storage.memory.slot_folders import SlotFolder
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
from .copies import CopyReader, copies_of
from .receiving import Receiver

STRETCH_BYTES = 1 << 20
MOST_CHARS = 500


def answer(link: Link, memory: str, receiver: Receiver) -> None:
    """The one request that has begun to come. Raises OSError, and then the connection is of no more use."""
    request = link.receive(REQUESTS)
    if link.payload_bytes:
        raise Damaged("a request with a payload")
    if isinstance(request, List):
        for copy in copies_of(memory, request.directory):
            link.send(Found(copy.folder.name, copy.slot, copy.header))
        link.send(End())
    elif isinstance(request, Read):
        _read(link, request, memory)
    else:
        receiver.receive(link, request)


def _read(link: Link, request: Read, memory: str) -> None:
    folder = SlotFolder.parse(request.folder)
    assert folder is not None
    version = request.generation, request.step
    try:
        with (
            CopyReader(memory, folder, request.slot, version) as copy,
            memoryview(bytearray(min(STRETCH_BYTES, request.length))) as buffer,
        ):
            end = request.offset + request.length
            if end > copy.header.size:
                raise CopyGone(f"the copy has {copy.header.size} bytes, and {end} are asked for")
            for offset in range(request.offset, end, STRETCH_BYTES):
                with buffer[: min(STRETCH_BYTES, end - offset)] as stretch:
                    copy.read(offset, stretch)
                    link.send(Stretch(), stretch)
    except CopyGone as gone:
        link.send(Gone(str(gone)[:MOST_CHARS]))
