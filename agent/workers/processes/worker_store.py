"""The workers' own store: one fresh TCPStore for each generation, on a socket that was bound long before.

torchrun keeps one store for all restarts, and on torch 2.13 the second process group finds the first one's keys
and hangs. Here the master node serves a new store on a listening socket bound when it joined: no other process can take
the port in between, and a worker that connects before the store is up waits in the backlog instead of failing and
retrying half a second later.

Importing torch costs two seconds and 150 MB, so another process serves the stores: the *holder* (see `store_holder`),
started when this node is master for the first time and kept for the generations after: a spare that becomes it, or
else a process of its own. A socket is handed over as
soon as the holder is ready for it, and closed here then. If the holder ends, the generation that it serves fails; if it
serves none, that stays here. The next generation gets another.

Invariant: a listening socket is open only while a store is served on it or soon will be. Workers of a store that
has ended are refused, never left to wait.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...common.events import Event, IoThread
from ...common.exits import describe_exit
from .proc import KILL_WAIT_S, ends_within
from .spare_wire import ServeStores
from .store_holder import CLOSE, LONGEST_MESSAGE, READY, SERVE
from .workers import Process, Spares, start_helper

HOLDER = Path(__file__).with_name("store_holder.py")


@dataclass(slots=True)
class _Holder:
    """The process, our end of the socket pair, and its last messages."""

    process: Process
    channel: socket.socket
    ready: bool = False
    last_words: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid


class WorkerStore:
    """For the main thread: the holder dies with the thread that starts it."""

    def __init__(
        self, environment: Mapping[str, str], spares: Spares, io: IoThread, post: Callable[[Event], None]
    ) -> None:
        """`environment` is what the workers inherit."""
        # It computes nothing, and of a client that is cut off torch would write pages of C++ frames.
        self._environment = {**environment, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._spares = spares
        self._io = io
        self._post = post
        self._holder: _Holder | None = None
        self._unkillable: list[Process] = []
        """Killed, and never seen to end."""
        self.on_failure: Callable[[str], object] = lambda problem: None
        """Called with the reason when the store that is to be served is not."""
        self._serving = False
        self._listener: socket.socket | None = None
        """The served generation's socket until it is handed over."""
        self._served: socket.socket | None = None
        """The same one, handed over or not."""

    @property
    def pid(self) -> int | None:
        """The holder's, while there is one."""
        return self._holder.pid if self._holder is not None else None

    @property
    def pids(self) -> tuple[int, ...]:
        holder = (self._holder.pid,) if self._holder is not None else ()
        return (*holder, *(process.pid for process in self._unkillable))

    def serve(self, listener: socket.socket) -> None:
        """Takes over `listener`, until `close`. Again with the same one: goes on. Raises OSError when no holder can be
        started."""
        if self._serving and listener is self._served and self._holder is not None:
            return
        self._serving, self._listener, self._served = True, listener, listener
        if self._holder is not None and self._holder.ready and not self._hand_over(self._holder):
            self._end_holder()  # killed while it was not needed, and its end is not known yet
        if self._holder is None:
            self._start_holder()

    def handle(self, pid: int, message: bytes) -> None:
        """A message of the holder, or its end: that is empty."""
        holder = self._holder
        if holder is None or holder.pid != pid:
            return
        if message == READY:
            holder.ready = True
            if self._listener is not None:
                self._hand_over(holder)  # if it has ended meanwhile, that is the next message
            return
        if message:
            holder.last_words = message.decode(errors="replace")
            return
        returncode = self._end_holder()
        ended = describe_exit(returncode) if returncode is not None else "it hangs in the kernel"
        self._close_listener()
        words = holder.last_words or f"the process {pid} that served it ended: {ended}"
        if self._serving:
            self.on_failure(f"the workers' store is gone: {words}")

    def close(self) -> None:
        """The generation is over: its store's keys are forgotten, and its port is free."""
        if self._listener is None and self._serving and self._holder is not None:
            try:
                self._holder.channel.send(CLOSE)
            except OSError:
                pass  # it has ended, and the store with it
        self._serving = False
        self._close_listener()

    def end(self) -> None:
        """The agent is ending."""
        self.close()
        if self._holder is not None:
            self._end_holder()

    def _start_holder(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                process = self._spares.hand_out(ServeStores(), [theirs.fileno()]) or self._start_cold(theirs)
        except OSError:
            ours.close()
            raise
        self._holder = _Holder(process, ours)
        self._io.watch(ours.fileno(), partial(self._read, process.pid, ours, ours.fileno()))

    def _start_cold(self, channel: socket.socket) -> Process:
        return start_helper([sys.executable, str(HOLDER)], self._environment, channel.fileno())

    def _read(self, pid: int, channel: socket.socket, descriptor: int) -> None:
        """In the io thread."""
        try:
            message = channel.recv(LONGEST_MESSAGE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:  # it ended without reading all that it was sent
            message = b""
        if not message:
            self._io.forget(descriptor)
        self._post(partial(self.handle, pid, message))

    def _hand_over(self, holder: _Holder) -> bool:
        """False when the holder has ended."""
        assert self._listener is not None
        try:
            socket.send_fds(holder.channel, [SERVE], [self._listener.fileno()])
        except OSError:
            return False
        self._close_listener()
        return True

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _end_holder(self) -> int | None:
        """It has nothing to finish. Its return code, if it had one of its own; None when it does not end."""
        assert self._holder is not None
        process = self._holder.process
        os.kill(process.pid, signal.SIGKILL)  # it is our child, and not yet reaped
        self._io.forget(self._holder.channel.fileno(), self._holder.channel.close)
        self._holder = None
        if ends_within(process.pid, KILL_WAIT_S):
            return process.wait()
        self._unkillable.append(process)
        return None
