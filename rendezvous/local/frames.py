"""Messages on a stream: each has its length before it, in four bytes."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct(">I")


class FrameInvalid(ValueError):
    """What comes is no message of ours: the stream cannot be read any further."""


def frame(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Puts together again what comes in pieces."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._received = bytearray()

    def __bool__(self) -> bool:
        """There is more than was taken, if only the beginning of a message."""
        return bool(self._received)

    def feed(self, received: bytes) -> None:
        self._received += received

    def take(self) -> bytes | None:
        """The next message, when all of it is there. Raises FrameInvalid."""
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if not 0 < length <= self._most_bytes:
            raise FrameInvalid(f"a message of {length} bytes, at most {self._most_bytes} are read")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        message = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message
