"""Consoles that stand still: pipes that are full before anybody writes, and that nobody reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullPipe:
    read: int
    write: int

    def take_all(self, until: bytes = b"") -> bytes:
        """What was written since it was full, up to and with `until`; waits for that."""
        found = bytearray()
        while until not in found or not found:
            found += os.read(self.read, 65536)
        return bytes(found).lstrip(b"\0")


@contextlib.contextmanager
def full_pipe() -> Iterator[FullPipe]:
    """Whoever writes there waits, as for a terminal after Ctrl-S."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write, bytes(65536))
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write, bytes(1))
        os.set_blocking(write, True)
        yield FullPipe(read, write)
    finally:
        # A thread that still waits there must not write to what gets the same number next.
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), write)
        os.close(read)
