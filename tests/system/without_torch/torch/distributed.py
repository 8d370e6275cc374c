"""All that an agent asks of torch where the workers' store is asked for nothing. It is there in no time."""

from __future__ import annotations

import socket


class TCPStore:
    """Holds the socket of the store, and answers no one."""

    def __init__(
        self, host: str, port: int, *, is_master: bool, wait_for_workers: bool, master_listen_fd: int
    ) -> None:
        self._listener = socket.socket(fileno=master_listen_fd)
