"""What the host of a local store knows of each connection, and of the client that has made it."""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass, field

from ..store.wire import REQUEST_LIMIT_BYTES, Caller
from .frames import Frames

MOST_UNANSWERED = 64
"""Calls of one connection; no more are read before one of them is answered."""


@dataclass(slots=True)
class Parked:
    scopes: tuple[str, ...]
    after_revision: int
    until: float


@dataclass(slots=True, eq=False)
class Connection:
    socket: socket.socket
    received: Frames = field(default_factory=lambda: Frames(REQUEST_LIMIT_BYTES))
    begun_at: float | None = None
    """Since when there is the beginning of a message."""
    to_send: deque[memoryview] = field(default_factory=deque)
    parked: dict[Caller, Parked] = field(default_factory=dict)
    at_disk: int = 0
    """Calls that are done, and answered when they are on disk."""
    client: str | None = None
    events: int = 0

    @property
    def reads(self) -> bool:
        return not self.to_send and len(self.parked) + self.at_disk < MOST_UNANSWERED


@dataclass(slots=True)
class Client:
    link: int
    connections: set[Connection]
