"""Reads copies of the state from the memory of other nodes, and gives orders to this node's own memory server."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..memory.copy_header import FoundCopy
from ..memory.slot_folders import SlotFolder
from .link import Damaged, Link, connect
from .messages import LISTED, STRETCHES, End, Gone, List, Order, Read, encode

AHEAD = 32
"""Ranges that are asked for before the first has come: so many questions fit into the buffers of any connection."""
ORDER_S = 0.005
"""For an order: a server that is busy takes it later, from its socket."""

_T = TypeVar("_T")


class CopyGone(OSError):
    """The slot no longer has that version, or it was damaged: list the copies again, or take another place."""


class MemoryClient:
    """Asks one memory server. For one thread; the connection is made when it is needed, and kept."""

    def __init__(self, address: str, key: bytes, within_s: float) -> None:
        """`address` is HOST:PORT, `within_s` the longest wait for a connection, and for the next bytes."""
        self._address = address
        self._key = key
        self._within_s = within_s
        self._link: Link | None = None

    def __enter__(self) -> MemoryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def copies(self, directory: str) -> tuple[FoundCopy, ...]:
        """All of a checkpoint directory that are whole, replicas included. Raises OSError."""
        return self._asked(lambda link: _copies(link, SlotFolder.of(directory).directory))

    def read(
        self,
        folder: SlotFolder,
        slot: str,
        version: tuple[int, int],
        offset: int,
        into: memoryview,
        *,
        verify: bool = False,
    ) -> None:
        """The bytes from `offset` on, as many as `into` has.

        `verify`: the server compares them with the copy's checksums, if it has some, and raises CopyGone where it is
        damaged. Not for who reads all of the copy, and verifies that. Raises CopyGone, and OSError for all else.
        """
        self.read_many(folder, slot, version, [(offset, into)], verify=verify)

    def read_many(
        self,
        folder: SlotFolder,
        slot: str,
        version: tuple[int, int],
        ranges: Sequence[tuple[int, memoryview]],
        *,
        verify: bool = False,
    ) -> None:
        """Like `read` for each offset and its bytes, without a wait for each: for many small ranges."""
        questions = [
            (Read(folder, slot, *version, offset, len(into), verify), into)
            for offset, into in ranges
            if len(into)
        ]
        if questions:
            self._asked(lambda link: _read_many(link, questions))

    def _asked(self, ask: Callable[[Link], _T]) -> _T:
        """Once more over a new connection where one has failed: servers close those that are idle."""
        try:
            return self._ask(ask)
        except ConnectionError:
            return self._ask(ask)

    def _ask(self, ask: Callable[[Link], _T]) -> _T:
        link = self._link
        if link is None:
            link = self._link = connect(self._address, self._key, self._within_s)
        try:
            return ask(link)
        except BaseException:  # whatever still comes is no answer to the next question
            self.close()
            raise


def _copies(link: Link, directory: str) -> tuple[FoundCopy, ...]:
    link.send(List(directory))
    found = []
    while not isinstance(answer := link.receive(LISTED), End):
        found.append(answer.copy)
    return tuple(found)


def _receive(link: Link, question: Read, into: memoryview) -> None:
    """The answer. Raises CopyGone."""
    count = 0
    while count < question.length:
        answer = link.receive(STRETCHES)
        if isinstance(answer, Gone):
            raise CopyGone(answer.reason)
        if not 0 < link.payload_bytes <= question.length - count:
            raise Damaged(f"{link.payload_bytes} bytes came of {question.length - count}")
        end = count + link.payload_bytes
        with into[count:end] as stretch:
            link.receive_payload(stretch)
        count = end


def _read_many(link: Link, questions: Sequence[tuple[Read, memoryview]]) -> None:
    for question, _ in questions[:AHEAD]:
        link.send(question)
    for number, (question, into) in enumerate(questions):
        _receive(link, question, into)
        if number + AHEAD < len(questions):
            link.send(questions[number + AHEAD][0])


def order(path: str, message: Order, within_s: float = ORDER_S) -> bool:
    """Give it to the memory server whose socket has this path. False: it is lost, and a later one is as good.

    `within_s` may be longer where training does not wait.
    """
    deadline = time.monotonic() + within_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(within_s)
            connection.connect(path)
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.sendall(encode(message))
        return True
    except OSError:
        return False
