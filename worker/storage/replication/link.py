"""A connection between two processes of one job that both know its key: the handshake, and frames.

    server -> client   MAGIC, a nonce
    client -> server   a nonce, HMAC(key, "client", both nonces)
    server -> client   HMAC(key, "server", both nonces)

Each side's nonce is new for each connection, so that nothing of an older one can be said again; the words keep one
side's proof from being the other's. A frame is a head (`_HEAD`), a HMAC, one message, and perhaps a payload. The HMAC
is over the number of the frame, its head and its message, with a key of this connection and direction. The head has
the payload's CRC-32, which finds accidents; HMAC over all bytes would make every transfer three times slower.

Nothing is encrypted. All waits have an end: a message comes within `silence_s`, and a payload at `LEAST_RATE` or more.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct
import time
import zlib
from collections.abc import Callable
from typing import TypeVar

from ....codec import Checked, Codec, Invalid
from .messages import encode

MAGIC = b"elagmem1"
NONCE_BYTES = 32
MAC_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
PROOF_BYTES = NONCE_BYTES + MAC_BYTES

LEAST_RATE = 1 << 16
"""Bytes per second, below which the other end counts as silent."""
SEND_BYTES = 1 << 20
"""Sent at once: between two such stretches a pause may be made."""

_HEAD = struct.Struct("!III")
"""Bytes of the message and of the payload, CRC-32 of the payload."""

_T = TypeVar("_T")


class NotAuthenticated(ConnectionError):
    """The other end does not have this job's key."""


class Damaged(ConnectionError):
    """What came is not what was sent."""


class Link:
    """The frames of one authenticated connection. For one thread at a time."""

    def __init__(
        self, connection: socket.socket, key: bytes, nonces: bytes, *, server: bool, silence_s: float
    ) -> None:
        self.connection = connection
        self.silence_s = silence_s
        to_server, to_client = (_mac(key, word, nonces) for word in (b"to server", b"to client"))
        self._sending, self._receiving = (to_client, to_server) if server else (to_server, to_client)
        self._sent = self._received = 0
        self._payload = (0, 0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self.connection.close()

    def send(
        self,
        message: Checked,
        payload: memoryview | None = None,
        crc: int | None = None,
        pause: Callable[[int], None] = lambda count: None,
    ) -> None:
        """`crc` is of the payload, where it is known; `pause` is called before so many bytes go. Raises OSError."""
        text = encode(message)
        size = len(payload) if payload is not None else 0
        if payload is not None and crc is None:
            crc = zlib.crc32(payload)
        head = _HEAD.pack(len(text), size, crc or 0)
        self._send(memoryview(head + self._frame_mac(self._sending, self._sent, head, text) + text))
        self._sent += 1
        if payload is not None:
            for begin in range(0, size, SEND_BYTES):
                with payload[begin : begin + SEND_BYTES] as stretch:
                    pause(len(stretch))
                    self._send(stretch)

    def receive(self, codec: Codec[_T]) -> _T:
        """The next message; its payload is left to `receive_payload`. Raises OSError."""
        deadline = time.monotonic() + self.silence_s
        head = receive_exactly(self.connection, _HEAD.size + MAC_BYTES, deadline)
        head, mac = head[: _HEAD.size], head[_HEAD.size :]
        length, size, crc = _HEAD.unpack(head)
        if length > codec.most_bytes:
            raise Damaged(f"a message of {length} bytes, at most {codec.most_bytes} are read")
        text = receive_exactly(self.connection, length, deadline)
        if not hmac.compare_digest(mac, self._frame_mac(self._receiving, self._received, head, text)):
            raise Damaged("a message that does not match its HMAC")
        self._received += 1
        self._payload = size, crc
        try:
            return codec.decode(text)
        except Invalid as error:
            raise Damaged(str(error)) from error

    def waits(self, within_s: float) -> bool:
        """Whether more comes within that time, or the end."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(within_s * 1000.0))

    @property
    def payload_bytes(self) -> int:
        """That come after the message that was received last."""
        return self._payload[0]

    def receive_payload(self, into: memoryview) -> int:
        """All of it, into the whole of `into`; returns its CRC-32. Raises OSError."""
        size, crc = self._payload
        self._payload = 0, 0
        if size != len(into):
            raise Damaged(f"{size} bytes came, {len(into)} were to come")
        deadline = time.monotonic() + self.silence_s + size / LEAST_RATE
        count = 0
        while count < size:
            self._wait_at_most(deadline)
            with into[count:] as rest:
                got = self.connection.recv_into(rest)
            if not got:
                raise ConnectionError(f"the connection ended after {count} of {size} bytes")
            count += got
        if (found := zlib.crc32(into)) != crc:
            raise Damaged("bytes that do not match their checksum")
        return found

    def _send(self, data: memoryview) -> None:
        deadline = time.monotonic() + self.silence_s + len(data) / LEAST_RATE
        while data:
            self._wait_at_most(deadline)
            data = data[self.connection.send(data) :]

    def _wait_at_most(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError("the other end is too slow")
        self.connection.settimeout(min(left_s, self.silence_s))

    @staticmethod
    def _frame_mac(key: bytes, number: int, head: bytes, text: bytes) -> bytes:
        return hmac.digest(key, number.to_bytes(8, "big") + head + text, hashlib.sha256)


def receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Raises OSError, also at the end of the stream, and where not all has come before the deadline, monotonic."""
    found = bytearray()
    while len(found) < count:
        left_s = deadline - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError(f"{len(found)} of {count} bytes came in time")
        connection.settimeout(left_s)
        more = connection.recv(count - len(found))
        if not more:
            raise ConnectionError(f"the connection ended after {len(found)} of {count} bytes")
        found += more
    return bytes(found)


# ---------------------------------------------------------------- handshake


def hello() -> bytes:
    """The first bytes of a server, other ones for each connection."""
    return MAGIC + os.urandom(NONCE_BYTES)


def answered(
    connection: socket.socket, said: bytes, proof: bytes, key: bytes, silence_s: float
) -> tuple[Link, bytes]:
    """A server's link, and the bytes to send first; `said` is its hello, `proof` what came. Raises NotAuthenticated."""
    nonces = said[len(MAGIC) :] + proof[:NONCE_BYTES]
    if not hmac.compare_digest(proof[NONCE_BYTES:], _mac(key, b"client", nonces)):
        raise NotAuthenticated("the other end does not have this job's key")
    return Link(connection, key, nonces, server=True, silence_s=silence_s), _mac(key, b"server", nonces)


def connect(address: str, key: bytes, within_s: float) -> Link:
    """A client's link to the server at HOST:PORT. Raises OSError."""
    deadline = time.monotonic() + within_s
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=within_s)
    try:
        said = receive_exactly(connection, HELLO_BYTES, deadline)
        if not said.startswith(MAGIC):
            raise NotAuthenticated(f"another program, or version, answers at {address}")
        nonce = os.urandom(NONCE_BYTES)
        nonces = said[len(MAGIC) :] + nonce
        connection.sendall(nonce + _mac(key, b"client", nonces))
        if not hmac.compare_digest(
            receive_exactly(connection, MAC_BYTES, deadline), _mac(key, b"server", nonces)
        ):
            raise NotAuthenticated(f"what answers at {address} does not have this job's key")
        return Link(connection, key, nonces, server=False, silence_s=within_s)
    except BaseException:
        connection.close()
        raise


def _mac(key: bytes, word: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, MAGIC + word + b"\0" + nonces, hashlib.sha256)
