"""All that agents and store servers ask of torch: the real TCPStore, of torch's C library.

Its Python modules, which a store does not use, are four fifths of what an import of torch costs. Where the workers ask
their store for nothing, the process that serves it gets a stand-in, which costs nothing.
"""

from __future__ import annotations

import importlib
import os
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


if "SYSTEM_TEST_WITHOUT_TORCH" not in os.environ or sys.orig_argv[1:3] == ["-m", "elastic_agent"]:
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
