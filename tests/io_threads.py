"""The io thread of an agent, where a test stands in an agent's place."""

from __future__ import annotations

import functools
import threading

from elastic_agent.agent.common.events import IoThread


@functools.cache
def started_io() -> IoThread:
    """One for all tests of a process."""
    io = IoThread()
    io.start()
    return io


def settle_io() -> None:
    """Return when all is done that was posted before."""
    settled = threading.Event()
    started_io().post(settled.set)
    assert settled.wait(20.0)
