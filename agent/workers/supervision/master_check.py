"""Warns where this node does not reach the port at which the workers of its generation may meet.

torch asks for minutes, in silence, and then names an address and nothing else. The port listens before the world names
it, so an agent without an answer can say more: a packet filter drops or rejects what it sends, or the machine is gone.
A thread connects and closes at once; the store there sees a client that sent nothing.

It never ends a generation: a script need not use that port, and the port closes where the workers of rank 0's node
have ended.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from ....rendezvous.records import Endpoint, World
from ....threads import Thread

log = logging.getLogger(__name__)

WARN_AFTER_S = 2.0
"""Then the check is over, too. The kernel has sent two SYNs by then."""
PAUSE_S = 0.5
"""After an answer that was no connection."""

Connect = Callable[[Endpoint, float], None]
"""Within so many seconds. Raises OSError."""


def connect(to: Endpoint, timeout_s: float) -> None:
    socket.create_connection((to.address, to.port), timeout_s).close()


class MasterCheck:
    """Of one generation, on node `node`."""

    def __init__(self, world: World, node: str) -> None:
        self._world = world
        self._node = node
        self._over = threading.Event()

    def start(self) -> None:
        Thread(self._run, "master-port", self._over.set).start()

    @property
    def under_way(self) -> bool:
        return not self._over.is_set()

    def close(self) -> None:
        """The port may close from now on, or need not be reached any more."""
        self._over.set()

    def _run(self) -> None:
        world = self._world
        if found := find_obstacle(world.master, self._over):
            log.warning(
                "generation %d: node %s does not reach %s of node %s, where the workers meet: %s for %g s. Harmless "
                "for scripts that do not use MASTER_PORT. If a packet filter stands between the nodes, open that port "
                "(--port-range bounds which it is), and those that gloo and NCCL choose; otherwise look at routes and "
                "--network-interface",
                *(world.generation, self._node, world.master, world.members[0].node, found, WARN_AFTER_S),
            )
        self._over.set()


def find_obstacle(
    master: Endpoint,
    over: threading.Event,
    connect: Connect = connect,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """What came of connecting for `WARN_AFTER_S`; empty when `master` was reached once, or need no longer be."""
    ends, found = clock() + WARN_AFTER_S, ""
    while not over.is_set() and (left_s := ends - clock()) > 0:
        try:
            connect(master, left_s)
            return ""
        except OSError as error:
            found = _in_words(error)
        if (left_s := ends - clock()) > 0:
            over.wait(min(PAUSE_S, left_s))
    return "" if over.is_set() else found


def _in_words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()
