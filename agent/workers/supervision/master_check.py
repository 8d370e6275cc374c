"""Whether this node reaches the port where the workers of its generation meet, asked as they start.

torch asks for minutes, in silence, and then names an address and nothing else. The port listens before the world names
it, so an agent that gets no answer knows more: a packet filter drops or rejects what it sends, or the machine is gone.
A thread connects and closes at once; the store there sees a client that said nothing.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from ....rendezvous.records import Endpoint, World
from ....rendezvous.threads import Thread
from ...common.events import Event, MasterUnreachable

log = logging.getLogger(__name__)

WARN_AFTER_S = 2.0
FAIL_AFTER_S = 20.0
"""The kernel has sent five SYNs by then."""
PAUSE_S = 0.5
"""After an answer that was no connection."""

Connect = Callable[[Endpoint, float], None]
"""Within so many seconds. Raises OSError."""


def connect(to: Endpoint, timeout_s: float) -> None:
    socket.create_connection((to.address, to.port), timeout_s).close()


class MasterCheck:
    """Of one generation."""

    def __init__(self, world: World, post: Callable[[Event], None]) -> None:
        self._world = world
        self._post = post
        self._over = threading.Event()

    def start(self) -> None:
        Thread(self._run, "master-port").start()

    def close(self) -> None:
        """The generation is over on this node, or soon will be."""
        self._over.set()

    def _run(self) -> None:
        world = self._world
        there = f"{world.master} of node {world.members[0].node}"
        warn = partial(log.warning, "generation %d: %s", world.generation)
        if problem := find_obstacle(world.master, there, self._over, warn):
            self._post(MasterUnreachable(world.generation, problem))


def find_obstacle(
    master: Endpoint,
    there: str,
    over: threading.Event,
    warn: Callable[[str], None],
    connect: Connect = connect,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Why `master` cannot be reached; empty when it can, or need no longer be. `warn` is called once, before."""
    began = clock()
    warned, found = False, ""
    while not over.is_set():
        until_s = FAIL_AFTER_S if warned else WARN_AFTER_S
        left_s = began + until_s - clock()
        if left_s > 0:
            try:
                connect(master, left_s)
                return ""
            except OSError as error:
                found = _in_words(error)
            if clock() < began + until_s:
                over.wait(PAUSE_S)
            continue
        problem = (
            f"this node does not reach {there}, where the workers meet: {found} for {until_s:g} s. "
            "If a packet filter stands between the nodes, open that port (--port-range bounds which it is), and those "
            "that gloo and NCCL choose; otherwise look at routes and --network-interface"
        )
        if warned:
            return problem
        warned = True
        warn(problem)
    return ""


def _in_words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()
