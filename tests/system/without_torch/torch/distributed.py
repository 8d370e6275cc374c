"""All that an agent asks of torch where its workers ask their store for nothing. Its import costs nothing."""

from __future__ import annotations

import socket
from typing import NoReturn


class TCPStore:
    """Holds the socket of the workers' store, and answers no request."""

    def __init__(
        self, host: str, port: int, *, is_master: bool, wait_for_workers: bool, master_listen_fd: int
    ) -> None:
        self._listener = socket.socket(fileno=master_listen_fd)


def __getattr__(name: str) -> NoReturn:
    """What agents that meet in a c10d store ask for besides."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise RuntimeError(
        f"torch.distributed.{name} is not in this stand-in: start the agent with torch=True (harness)"
    )
