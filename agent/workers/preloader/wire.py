"""How the agent, the preloaded process and its spares speak: whole JSON messages, with descriptors, on socket pairs.

A message is one datagram of a SOCK_SEQPACKET pair, so it arrives whole, once, or not at all. What it says is put in a
memory file that goes with it: a worker's environment may be longer than any socket takes at once.

Run in the job's interpreter, too: standard library only.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

MOST_DESCRIPTORS = 250
"""In one message beside the text's own; the kernel takes 253."""

LONGEST = 16 * 2**20
"""Bytes: many times what the kernel takes as a process' arguments and environment."""


class BadMessage(ValueError):
    """What came is no message of ours: sender and receiver are not of one version."""


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Raises OSError where the other end is closed; nothing was sent then."""
    text = os.memfd_create("message", os.MFD_CLOEXEC)
    try:
        with open(text, "wb", closefd=False) as file:
            file.write(json.dumps(message).encode())
        sent = array.array("i", [text, *descriptors])
        channel.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
    finally:
        os.close(text)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """None at the end. The descriptors are close-on-exec, and the caller's. Raises BadMessage, OSError."""
    room = socket.CMSG_SPACE(4 * (MOST_DESCRIPTORS + 1))
    data, ancillary, _, _ = channel.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // 4 * 4])
    if not descriptors:
        raise BadMessage("a message without its text")
    text, *others = descriptors
    with open(text, "rb") as file:
        file.seek(0)
        found = file.read(LONGEST + 1)
    try:
        message = json.loads(found)
    except ValueError as error:
        raise BadMessage(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise BadMessage(f"not an object: {found[:200]!r}")
    return message, others
