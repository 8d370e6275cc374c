"""A network port for those who must name one. Under an agent no script needs it: MASTER_PORT is bound beforehand."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


def find_free_network_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. Another process may take it before it is used: `reserve_port` holds it."""
    with reserve_port(host) as port:
        return port


@contextlib.contextmanager
def reserve_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that is held until the block ends: the kernel gives it to no process that asks for any.

    Inside of the block only a socket with SO_REUSEPORT can bind it. For others, such as torch's TCPStore, leave the
    block right before they start. Raises OSError.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]
