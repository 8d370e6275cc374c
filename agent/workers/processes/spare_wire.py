"""What the agent, the fork server and its spares, and a daemon and its spare agent, send each other, with descriptors,
on socket pairs.

A message is one datagram of a SOCK_SEQPACKET pair, so it arrives whole, once, or not at all. Its text is in a memory
file that goes with it: a worker's environment may be longer than any socket takes at once.

Run in the job's interpreter, too: standard library and the codec only.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ....codec import Codec, Count, Invalid, Positive

FORK_SERVER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fork_server.py")
STORE = "store"
"""In the place of the agent's number: this process of the fork server's program serves the workers' store."""

SCRIPT = "script"
MODULE = "module"

MOST_DESCRIPTORS = 250
"""In one message beside the text's own; the kernel takes 253."""

LONGEST = 16 * 2**20
"""Bytes: many times what the kernel takes as a process' arguments and environment."""


@dataclass(frozen=True, slots=True)
class Fork:
    """To the fork server: fork a spare for each socket that comes with this."""


@dataclass(frozen=True, slots=True)
class Preloaded:
    """From the fork server: so many modules are loaded; `skipped` has others, and why.

    `reads`: the variables that they have read of its environment."""

    modules: Count
    skipped: dict[str, str]
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """From a spare."""

    pid: Positive


@dataclass(frozen=True, slots=True)
class CannotFork:
    """From a spare that is to become a worker: why it starts cold. From the fork server, which ends: why no
    spares can be forked."""

    text: str


@dataclass(frozen=True, slots=True)
class BecomeWorker:
    """To a spare: run `python -u TARGET ARGS...` or `python -u -m TARGET ARGS...` with this environment and no other.

    With it come standard input, output and error.
    """

    target_kind: Literal["script", "module"]
    target: str
    args: tuple[str, ...]
    environment: dict[str, str]
    cwd: str
    cpus: str
    """For `shim.keep_to`."""
    cold: tuple[str, ...]
    """The command of the same worker, started cold."""

    @property
    def command(self) -> tuple[str, ...]:
        """As it stands on the command line, after the interpreter."""
        module = ("-m",) if self.target_kind == MODULE else ()
        return ("-u", *module, self.target, *self.args)


@dataclass(frozen=True, slots=True)
class ServeStore:
    """To a spare: serve the workers' store on the listening socket that comes with this, and a place for stderr."""


@dataclass(frozen=True, slots=True)
class BecomeAgent:
    """To a daemon's spare agent: be `elastic-agent WORDS...`, in this directory, with this environment and no other.

    With it comes the file for what is printed. `Ready` is the answer, before anything is done for the job."""

    words: tuple[str, ...]
    environment: dict[str, str]
    directory: str


Message: TypeAlias = Fork | Preloaded | Ready | CannotFork | BecomeWorker | ServeStore | BecomeAgent
CODEC: Codec[Message] = Codec(
    (Fork, Preloaded, Ready, CannotFork, BecomeWorker, ServeStore, BecomeAgent), version=1, most_bytes=LONGEST
)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Raises OSError where the other end is closed; nothing was sent then."""
    text = os.memfd_create("message", os.MFD_CLOEXEC)
    try:
        with open(text, "wb", closefd=False) as file:
            file.write(CODEC.encode(message))
        socket.send_fds(channel, [b"."], [text, *descriptors])
    finally:
        os.close(text)


def receive(channel: socket.socket) -> tuple[Message, list[int]] | None:
    """None at the end. The descriptors are close-on-exec, and the caller's. Raises Invalid, OSError."""
    data, descriptors, _, _ = socket.recv_fds(channel, 1, MOST_DESCRIPTORS + 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    if not descriptors:
        raise Invalid("message without its text")
    text, *others = descriptors
    try:
        with open(text, "rb") as file:
            file.seek(0)
            return CODEC.decode(file.read(LONGEST + 1)), others
    except (OSError, Invalid):
        for descriptor in others:
            os.close(descriptor)
        raise
