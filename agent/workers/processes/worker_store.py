"""The workers' own store: one fresh TCPStore for each generation, on a socket that was bound long before.

torchrun keeps one store for all restarts, and on torch 2.13 the second process group finds the first one's keys
and hangs. Here the master node serves a new store on a listening socket bound when it joined: no other process can take
the port in between, and a worker that connects before the store is up waits in the backlog instead of failing and
retrying half a second later.

Importing torch costs two seconds and 150 MB, so another process serves it (see `store_server`): a spare that becomes
it, or else a process of its own. The socket is its standard input, and closed here then. If it ends before its
generation does, that fails.

Invariant: a listening socket is open only while a store is served on it or soon will be. Workers of a store that
has ended are refused, never left to wait.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.events import Event, IoThread
from ...common.exits import describe_exit
from .proc import KILL_WAIT_S, ends_within
from .spare_wire import ServeStore
from .workers import Spares, start_helper

if TYPE_CHECKING:
    from .proc import Child

SERVER = Path(__file__).with_name("store_server.py")


class WorkerStore:
    """For the main thread: the server dies with the thread that starts it."""

    def __init__(
        self, environment: Mapping[str, str], spares: Spares, io: IoThread, post: Callable[[Event], None]
    ) -> None:
        """`environment` is what the workers inherit."""
        # It computes nothing, and of a client that is cut off torch would write pages of C++ frames.
        self._environment = {**environment, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._spares = spares
        self._io = io
        self._post = post
        self._server: Child | None = None
        self._unkillable: list[Child] = []
        """Killed, and never seen to end."""
        self.on_failure: Callable[[str], object] = lambda problem: None
        """Called with the reason when the store that is to be served is not."""

    @property
    def pid(self) -> int | None:
        """The server's, while there is one."""
        return self._server.pid if self._server is not None else None

    @property
    def pids(self) -> tuple[int, ...]:
        server = (self._server.pid,) if self._server is not None else ()
        return (*server, *(process.pid for process in self._unkillable))

    def serve(self, listener: socket.socket) -> None:
        """Takes over `listener`, until `close`. Raises OSError when no server can be started."""
        self.close()
        with listener:
            self._server = self._spares.hand_out(ServeStore(), [listener.fileno()]) or start_helper(
                [sys.executable, str(SERVER)], self._environment, listener.fileno()
            )
        pidfd = os.pidfd_open(self._server.pid)
        self._io.watch(pidfd, partial(self._readable, pidfd, self._server.pid))

    def _readable(self, pidfd: int, pid: int) -> None:
        """In the io thread."""
        self._io.forget(pidfd)
        os.close(pidfd)
        self._post(partial(self._ended, pid))

    def _ended(self, pid: int) -> None:
        if self.pid == pid:
            ended = self.close()
            self.on_failure(f"the workers' store is gone: the process {pid} that served it ended: {ended}")

    def close(self) -> str:
        """The generation is over: its store's keys are forgotten, and its port is free. How the server has ended, in
        words."""
        process, self._server = self._server, None
        if process is None:
            return ""
        os.kill(process.pid, signal.SIGKILL)  # it is our child, and not yet reaped
        if ends_within(process.pid, KILL_WAIT_S):
            return describe_exit(process.wait())
        self._unkillable.append(process)
        return "it hangs in the kernel"
