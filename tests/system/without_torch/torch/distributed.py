"""All that an agent asks of torch where its workers ask their store for nothing.

An agent that meets others in a c10d store gets the real TCPStore, of torch's C library: its Python modules, which a
store does not use, are four fifths of what an import of torch costs. Every other process is one that serves the
workers' store: it gets a stand-in, which costs nothing.
"""

from __future__ import annotations

import importlib
import socket
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

HERE = Path(__file__).parents[1]


class HeldSocket:
    """Holds the socket of the workers' store, and answers no request."""

    def __init__(
        self, host: str, port: int, *, is_master: bool, wait_for_workers: bool, master_listen_fd: int
    ) -> None:
        self._listener = socket.socket(fileno=master_listen_fd)


def _is_agent() -> bool:
    """Whether this is `python -m elastic_agent`."""
    program = sys.modules["__main__"].__spec__
    return program is not None and program.name == "elastic_agent.__main__"


if _is_agent():
    real = PathFinder.find_spec("torch", [entry for entry in sys.path if Path(entry) != HERE])
    assert real is not None
    torch.__path__.extend(real.submodule_search_locations or ())
    library = importlib.import_module("torch._C")
    library._c10d_init()
    TCPStore = library._distributed_c10d.TCPStore
    DistError, DistStoreError = library._DistError, library._DistStoreError
    QueueEmptyError = library._DistQueueEmptyError
else:
    TCPStore = HeldSocket
