"""A process of the agent's own beside the workers, such as the disk writer: started anew when it has ended.

It dies with the agent, and no signal to all of a service ends it (`start_helper`). What it reads or writes may
hang in the kernel, so the agent waits for its end for a bounded time, and then leaves it behind.

One of them serves the workers' own store: one fresh TCPStore for each generation, on a socket that was bound long
before. torchrun keeps one store for all restarts, and on torch 2.13 the second process group finds the first one's keys
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

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.events import Event, IoThread
from ...common.exits import describe_exit
from .proc import KILL_WAIT_S, has_ended, process_status, reap_within
from .spare_wire import ServeStore
from .workers import Spares, start_helper

if TYPE_CHECKING:
    from .proc import Child

log = logging.getLogger(__name__)


class Helper:
    """One process at a time. For the main thread: the process dies with the thread that starts it."""

    def __init__(self, io: IoThread, ended: Callable[[], object]) -> None:
        """`ended` is called in the io thread once for each process; then `reap` it."""
        self._io = io
        self._ended = ended
        self._process: Child | None = None

    @property
    def runs(self) -> bool:
        return self._process is not None

    @property
    def pids(self) -> tuple[int, ...]:
        return (self._process.pid,) if self._process is not None else ()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], stdin: int, pass_fds: Sequence[int] = ()
    ) -> None:
        """Raises OSError."""
        self.watch(start_helper(command, environment, stdin, pass_fds=pass_fds))

    def watch(self, process: Child) -> None:
        """One that was started in another way. Raises OSError: it has been ended then."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            end(process)
            raise
        self._process = process
        self._io.watch(pidfd, partial(self._readable, pidfd))

    def reap(self) -> str:
        """How the process has ended; empty where there is none any more, or another one runs."""
        if self._process is None or not has_ended(self._process.pid):
            return ""
        process, self._process = self._process, None
        return describe_exit(process.wait())

    def release(self) -> Child | None:
        """The process, for the caller to wait for."""
        process, self._process = self._process, None
        return process

    def end(self, consequence: str = "") -> None:
        """It has nothing to finish. `consequence`: of its being left behind."""
        process = self.release()
        if process is not None:
            end(process, consequence)

    def _readable(self, pidfd: int) -> None:
        self._io.forget(pidfd)
        os.close(pidfd)
        self._ended()


def end(process: Child, consequence: str = "") -> None:
    """It may be in the middle of a write to a disk that is dead, and then never ends."""
    os.kill(process.pid, signal.SIGKILL)  # it is our child, and not yet reaped
    if reap_within(process, KILL_WAIT_S) is None:
        log.warning(
            "%s. It was killed, and is left behind%s", process_status(f"/proc/{process.pid}"), consequence
        )


# --- The workers' store

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
        self._server = Helper(io, lambda: post(self._ended))
        self.on_failure: Callable[[str], object] = lambda problem: None
        """Called with the reason when the store that is to be served is not."""

    @property
    def pids(self) -> tuple[int, ...]:
        return self._server.pids

    def serve(self, listener: socket.socket) -> None:
        """Takes over `listener`, until `close`. Raises OSError when no server can be started."""
        self.close()
        with listener:
            spare = self._spares.hand_out(ServeStore(), [listener.fileno()])
            if spare is not None:
                self._server.watch(spare)
            else:
                self._server.start([sys.executable, str(SERVER)], self._environment, listener.fileno())

    def close(self) -> None:
        """The generation is over: its store's keys are forgotten, and its port is free."""
        self._server.end("; the port of the workers' store is not free")

    def _ended(self) -> None:
        if how := self._server.reap():
            self.on_failure(f"the workers' store is gone: the process that served it ended: {how}")
