"""What a daemon and its standby send each other, on a socket pair.

The standby sends `Ready` when it is. The daemon sends `AgentCommand`, with the file for what is printed, maybe before
that. The standby answers `Taken` before it does anything for the job. So a standby that has ended without it has
started nothing, and the job's agent may be started in another way.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TypeAlias

from ...codec import Codec, Invalid

READY_WITHIN_S = 30.0
"""From the job on: a standby may have just been started, on a machine with too much to do."""

TAKEN_WITHIN_S = 2.0
"""One that is ready answers within milliseconds, unless it was stopped or hangs."""

LONGEST = 16 * 2**20
"""Bytes: many times what the kernel takes as a process' arguments and environment."""


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """What the agent of a job is started with: `elastic-agent WORDS...`, in this directory, with this environment and
    no other. A standby that gets it becomes that agent."""

    words: tuple[str, ...]
    environment: dict[str, str]
    directory: str


@dataclass(frozen=True, slots=True)
class Ready:
    """This process has imported what it needs, and answers at once."""


@dataclass(frozen=True, slots=True)
class Taken:
    """From now on this process is the job's agent: how it ends is how that ends."""


_Message: TypeAlias = AgentCommand | Ready | Taken
_CODEC: Codec[_Message] = Codec((AgentCommand, Ready, Taken), version=1, most_bytes=LONGEST)


def pair() -> tuple[socket.socket, socket.socket]:
    """For messages that arrive whole, or not at all."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_job(channel: socket.socket, job: AgentCommand, output: int) -> None:
    """Never waits. Raises OSError: nothing was sent then."""
    text = os.memfd_create("job", os.MFD_CLOEXEC)
    try:
        with open(text, "wb", closefd=False) as file:
            file.write(_CODEC.encode(job))
        socket.send_fds(channel, [b"."], [text, output], socket.MSG_DONTWAIT)
    finally:
        os.close(text)


def receive_job(channel: socket.socket) -> tuple[AgentCommand, int] | None:
    """None when the daemon has ended. The file for what is printed is the caller's. Raises Invalid, OSError."""
    data, descriptors, _, _ = socket.recv_fds(channel, 1, 2)
    if not data:
        return None
    if len(descriptors) != 2:
        raise Invalid("job without its text or its output")
    text, output = descriptors
    os.set_inheritable(output, False)
    with open(text, "rb") as file:
        file.seek(0)
        message = _CODEC.decode(file.read(LONGEST + 1))
    if not isinstance(message, AgentCommand):
        raise Invalid("message of another kind than a job")
    return message, output


def send_ready(channel: socket.socket) -> None:
    """Raises OSError when the daemon has ended."""
    channel.send(_CODEC.encode(Ready()))


def send_taken(channel: socket.socket) -> None:
    """Raises OSError when the daemon has ended."""
    channel.send(_CODEC.encode(Taken()))


def was_taken(channel: socket.socket) -> bool:
    """Waits for the answer."""
    try:
        return _next_is(channel, Ready, READY_WITHIN_S) and _next_is(channel, Taken, TAKEN_WITHIN_S)
    except (OSError, Invalid):  # the end of the standby, or its silence
        return False


def _next_is(channel: socket.socket, kind: type[_Message], within_s: float) -> bool:
    channel.settimeout(within_s)
    return isinstance(_CODEC.decode(channel.recv(1024)), kind)
