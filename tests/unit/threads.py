"""Waits for threads that nothing but a test waits for."""

from __future__ import annotations

import threading

PATIENCE_S = 60.0


def join_threads(name: str) -> None:
    """All of this process that have this name."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), name
