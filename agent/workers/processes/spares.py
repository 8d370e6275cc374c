"""Warm starts: a fork server, and its forks, the *spares*, which become workers or serve the workers' store.

The fork server (`fork_server`) is started with the agent, and imports in the background what workers import. Spares are
forked when workers are about to be started: as soon as those before them are asked to end, so that they are mostly
ready when they are needed. Each has its own socket to the agent and is the agent's child. Without a spare workers start
cold, for the reason `why_cold`.

torchrun keeps one store for all restarts of the workers, and on torch 2.13 the second process group finds the first
one's keys and hangs. Here the master node serves a new store (`WorkerStore`) on a listening socket bound when it
joined: no other process can take the port in between, and a worker that connects before the store is up waits in the
backlog instead of failing and retrying half a second later. Importing torch costs two seconds and 150 MB, so another
process serves it: a spare, or else a process of its own. The socket is its standard input, and closed here then. If it
ends before its generation does, that fails.

Invariants: no start waits for a fork server or for spares any longer than is declared here. A spare receives one
message. A listening socket is open only while a store is served on it or soon will be: workers of a store that has
ended are refused, never left to wait.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ....codec import Invalid
from ....rendezvous.text import clean
from ...common.events import Event, IoThread
from . import spare_wire as wire
from .helper import Helper, job_python, tied
from .imported import ONE_THREAD, ROOM, obstacle
from .proc import KILL_WAIT_S, MemoryFile, reap_within

log = logging.getLogger(__name__)

LOADING_S = 60.0
"""For the imports workers wait so long: a cold start beside them would import the same on the same cores and from the
same disk."""

FORKING_S = 5.0
"""From the request for spares to the last of them. A fork takes some 10 ms, many on a machine with too much to do. The
main thread waits for what is left of it."""

RETRY_S = 15.0
"""Before a fork server that has ended or hung is replaced: its imports need the cores of the workers."""

ENDING_S = 1.0
"""A fork server that has closed its socket, as one of its modules may do, is waited for to end."""

ROOM_FOR_WORDS = 4096
"""In the command line that ps shows of a worker, see `show_process`."""


class Spare:
    """A forked process that has become what it was sent."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel
        self._ended: int | None = None

    def wait(self) -> int:
        """Its return code, as `subprocess` counts it."""
        if self._ended is None:
            _, status = os.waitpid(self.pid, 0)
            self._ended = os.waitstatus_to_exitcode(status)
        return self._ended


@dataclass(slots=True, eq=False)
class _ForkServer:
    """What is known of one."""

    channel: socket.socket
    printed: MemoryFile
    since: float
    loaded: bool = False
    reads: frozenset[str] = frozenset()
    """Variables that its modules have read."""
    coming: list[socket.socket] = field(default_factory=list)
    """Of each spare that was asked for: it will be ready, or close its own end."""


class Spares:
    """The fork server and its spares. For the main thread: what it starts dies with the thread that starts it."""

    def __init__(
        self,
        environment: Mapping[str, str],
        names: Sequence[str],
        io: IoThread,
        post: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        """With the modules of these `names`, for workers that inherit this environment. Nothing is preloaded before
        `start`: every start is cold."""
        self.why_cold = "nothing is preloaded"
        """Where there is no spare."""
        self._environment = environment
        self._names = tuple(names)
        self._io = io
        self._post = post
        self._clock = clock
        self._process = Helper(io, lambda: post(self._ended))
        self._server: _ForkServer | None = None
        self._asked_at = 0.0
        """When spares were asked for last."""
        self._retry_at: float | None = None

    def start(self) -> None:
        """Failures are logged."""
        ours, theirs = wire.pair()
        words = [str(os.getpid()), ",".join(self._names), " " * ROOM_FOR_WORDS]
        try:
            with theirs:
                printed = MemoryFile("fork-server")
                process = subprocess.Popen(
                    tied([job_python(self._environment), "-u", wire.FORK_SERVER, *words]),
                    env={**self._environment, **ONE_THREAD, **ROOM},
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=printed.fd,
                    start_new_session=True,
                )
                self._process.watch(process)
        except OSError as error:
            ours.close()
            self._failed(f"it cannot be started: {error}")
            return
        ours.setblocking(False)
        self._server = server = _ForkServer(ours, printed, self._clock())
        self._watch(ours, partial(self._read, server))
        self.why_cold = "the fork server has not yet done its imports"

    def adopt(self, environment: Mapping[str, str], names: Sequence[str]) -> str:
        """From now on for workers like these, with what is preloaded already. Why that cannot be; empty if it is so.

        The fork server was started before its job was known."""
        server, base = self._server, {**self._environment, **ONE_THREAD}
        if server is None:
            return self.why_cold
        if tuple(names) != self._names:
            return f"--preload is {','.join(names)}, and was {','.join(self._names)}"
        if not server.loaded and environment != self._environment:
            return "the job has variables of its own, and its imports are not done yet"
        if problem := obstacle(base, environment, server.reads):
            return problem
        self._environment = environment
        return ""

    def close(self) -> None:
        """The agent is ending. Spares are waited for: the guard would tell of them."""
        self._retry_at = None
        self._process.end()
        for channel in self._server.coming if self._server is not None else ():
            channel.settimeout(KILL_WAIT_S)
            with suppress(OSError, Invalid):
                received = wire.receive(channel)
                channel.close()
                if received is not None and isinstance(ready := received[0], wire.Ready):
                    reap_within(Spare(ready.pid, channel), KILL_WAIT_S)
        self._end()

    @property
    def sessions(self) -> tuple[int, ...]:
        """Of fork servers, which are waited for here: the sessions from which spares come."""
        return self._process.pids

    @property
    def loaded(self) -> bool:
        """Whether there is nothing to wait for any more: it is ready, or takes too long, or is gone."""
        server = self._server
        return server is None or server.loaded or self._clock() >= server.since + LOADING_S

    # --- What the agent asks for

    def prepared(self, count: int) -> bool:
        """Whether so many processes may be started now, warm or cold. If not: again after an event, or a second."""
        self.fork(count)
        return self.loaded

    def fork(self, count: int) -> None:
        """So many will be needed soon."""
        server = self._server
        missing = count - len(server.coming) if server is not None and server.loaded else 0
        if server is None or missing <= 0:
            return
        pairs = [wire.pair() for _ in range(min(missing, wire.MOST_DESCRIPTORS))]
        try:
            wire.send(server.channel, wire.Fork(), [theirs.fileno() for _, theirs in pairs])
        except OSError:
            pass  # it has ended, as its socket will show, or does not read any more
        for ours, theirs in pairs:
            theirs.close()
            server.coming.append(ours)
        self._asked_at = self._clock()

    def hand_out(
        self, message: wire.BecomeWorker | wire.ServeStore, descriptors: Sequence[int]
    ) -> Spare | None:
        """A spare that becomes this; None where there is none, for the reason `why_cold`."""
        self.fork(1)
        while (server := self._server) is not None and server.coming:
            channel = server.coming.pop(0)
            try:
                channel.settimeout(max(0.0, self._asked_at + FORKING_S - self._clock()))
                received = wire.receive(channel)
                if received is not None and isinstance(ready := received[0], wire.Ready):
                    wire.send(channel, message, descriptors)
                    spare = Spare(ready.pid, channel)
                    self._watch(channel, partial(self._read_worker, spare))
                    return spare
            except (TimeoutError, BlockingIOError):
                channel.close()
                self._failed(f"it has not forked all spares within {FORKING_S:g} s")
                return None
            except (OSError, Invalid):
                pass  # it has just ended, and is reaped as an orphan
            channel.close()
        return None

    def turn(self, now: float) -> float | None:
        """Start another fork server in the place of one that is gone, when that is due; the instant of the next one."""
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self.start()
        return self._retry_at

    # --- The fork server

    def _read(self, server: _ForkServer) -> None:
        """A message of the fork server."""
        if server is not self._server:
            return  # it was ended meanwhile
        try:
            received = wire.receive(server.channel)
        except BlockingIOError:  # `_ended` has looked
            self._watch(server.channel, partial(self._read, server))
            return
        except (OSError, Invalid) as error:
            self._failed(f"it has sent an invalid message: {error}")
            return
        if received is None:  # mostly it is ending, and `_ended` will know how
            self._io.later(ENDING_S, partial(self._post, partial(self._closed, server)))
            return
        message = received[0]
        if isinstance(message, wire.CannotFork):
            self._end()
            self.why_cold = f"the fork server cannot be forked: {message.text}"
            log.warning("workers start cold from now on: %s", self.why_cold)
            return
        if isinstance(message, wire.Preloaded):
            server.loaded, server.reads = True, frozenset(message.reads)
            self.why_cold = "no process could be forked"
            log.info("preloaded %d modules in %.1f s", message.modules, self._clock() - server.since)
            for name, why in message.skipped.items():
                log.warning("not preloaded: %s (%s); workers import it themselves", name, why)
        self._watch(server.channel, partial(self._read, server))

    def _closed(self, server: _ForkServer) -> None:
        if server is self._server:
            self._failed("it has closed its socket, and has not ended")

    def _ended(self) -> None:
        if self._server is not None:
            self._read(self._server)  # it may have said why
        if (server := self._server) is not None and (how := self._process.reap()):
            words = clean(server.printed.last_line)
            self._failed(f"{how}: {words}" if words else how)

    def _failed(self, why: str) -> None:
        """It is not there any more; another one will be, after a pause."""
        self._end()
        self._retry_at = self._clock() + RETRY_S
        self.why_cold = f"there is no fork server: {why}"
        log.warning("the fork server is gone: %s; starting another in %g s", why, RETRY_S)

    def _end(self) -> None:
        """It has nothing to finish."""
        if (server := self._server) is not None:
            self._server = None
            self._io.forget(server.channel.fileno(), server.channel.close)
            for channel in server.coming:
                channel.close()  # then that spare ends, and is reaped as any orphan
        self._process.end()

    # --- Sockets

    def _read_worker(self, spare: Spare) -> None:
        """Why it starts cold, if it does; else it has closed its end."""
        try:
            received = wire.receive(spare.channel)
        except (OSError, Invalid):
            received = None
        if received is not None and isinstance(problem := received[0], wire.CannotFork):
            log.warning("worker process %d is no fork: %s", spare.pid, problem.text)
        spare.channel.close()

    def _watch(self, channel: socket.socket, then: Callable[[], None]) -> None:
        """In the main loop, when there is something to read; once."""

        def readable() -> None:
            self._io.forget(descriptor)
            self._post(then)

        descriptor = channel.fileno()
        self._io.watch(descriptor, readable)


# --- The workers' store


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
        self._printed: MemoryFile | None = None
        """What the server writes to its stderr."""
        self.on_failure: Callable[[str], object] = lambda problem: None
        """Called with the reason when the store that is to be served is not."""

    @property
    def pids(self) -> tuple[int, ...]:
        return self._server.pids

    def serve(self, listener: socket.socket) -> None:
        """Takes over `listener`, until `close`. Raises OSError when no server can be started."""
        self.close()
        with listener:
            printed = self._printed = MemoryFile("store")
            spare = self._spares.hand_out(wire.ServeStore(), [listener.fileno(), printed.fd])
            if spare is not None:
                self._server.watch(spare)
            else:
                command = [sys.executable, wire.FORK_SERVER, wire.STORE]
                self._server.start(command, self._environment, listener.fileno(), stderr=printed.fd)

    def close(self) -> None:
        """The generation is over: its store's keys are forgotten, and its port is free."""
        self._server.end("; the port of the workers' store is not free")

    def _ended(self) -> None:
        if how := self._server.reap():
            words = clean(self._printed.last_line) if self._printed is not None else ""
            said = f": {words}" if words else ""
            self.on_failure(f"the workers' store is gone: the process that served it ended: {how}{said}")
