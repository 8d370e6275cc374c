"""The orders to replicate, kept in the agent's folder in memory: for the next memory server, and for a handover."""

from __future__ import annotations

import contextlib
import os

from .....worker.storage.memory.slot_folders import SlotFolder
from .....worker.storage.replication.messages import MAX_ORDER_BYTES, ORDERS, Replicate, encode
from .....worker.wire.files import open_directory, read_whole, replace_file

MOST_ORDERS = 16
"""Checkpoint directories, of which the newest count."""

_KEPT = ".replicate"
"""The end of the name of a file with an order."""


def keep(memory: str, order: Replicate) -> None:
    """In the place of the one before for the same checkpoint directory."""
    name = SlotFolder.of(order.directory).directory + _KEPT
    with contextlib.suppress(OSError), open_directory(memory) as folder:
        replace_file(folder, name, encode(order))


def kept_orders(memory: str) -> list[Replicate]:
    """The oldest first."""
    found = []
    with contextlib.suppress(OSError), open_directory(memory) as folder:
        names = [name for name in os.listdir(folder) if name.endswith(_KEPT)]
        oldest_first = sorted(names, key=lambda name: os.stat(name, dir_fd=folder).st_mtime_ns)
        for name in oldest_first[-MOST_ORDERS:]:
            with contextlib.suppress(OSError, ValueError):
                order = ORDERS.decode(read_whole(folder, name, MAX_ORDER_BYTES))
                if isinstance(order, Replicate):
                    found.append(order)
    return found
