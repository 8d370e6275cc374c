"""The holder: a process that serves the workers' stores, so that the agent need not import torch for them.

`worker_store` starts it as `python store_holder.py`, through `shim`, so that it dies with the agent wherever it is,
in the import of torch too. Its standard input is one end of a socket pair that keeps messages apart. It sends `ready`
when torch is imported. From then on every message ends the store before it: `serve` brings the listening socket of
the next one, `close` none. What goes wrong is its last word, and then it ends; at end-of-file it ends, too.

Invariant: it holds no socket but that of the store it serves. When it dies, workers are refused, not kept waiting.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""By this process: a service manager may signal all that it started, while workers in their grace go on."""

READY = b"ready"
SERVE = b"serve"
CLOSE = b"close"
LONGEST_MESSAGE = 4096


def main() -> None:
    """Serves until end-of-file."""
    # A service manager may signal all that it started: workers in their grace still need the store.
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # Python looks first where this file lies, but the modules here are not to be imported by their bare names.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]
    agent = socket.socket(fileno=0)
    try:
        _serve(agent)
    except Exception as error:
        agent.send(f"{type(error).__name__}: {error}".encode()[:LONGEST_MESSAGE])
        raise


def _serve(agent: socket.socket) -> None:
    from torch.distributed import TCPStore

    def store_on(listener: socket.socket) -> Any:
        host, port = listener.getsockname()[:2]
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    agent.send(READY)
    message, sockets = _receive(agent)
    while message:
        store = store_on(sockets[0]) if message == SERVE else None
        message, sockets = _receive(agent)
        del store  # its keys die with it, and who still asks is cut off


def _receive(agent: socket.socket) -> tuple[bytes, list[socket.socket]]:
    message, descriptors, _, _ = socket.recv_fds(agent, LONGEST_MESSAGE, 1)
    return message, [socket.socket(fileno=descriptor) for descriptor in descriptors]


if __name__ == "__main__":
    main()
