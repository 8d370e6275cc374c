"""The agent's end of warm starts: keeps a fork server and its spares, and hands spares out to become workers.

The fork server (`fork_server`) is started with the agent, imports in the background, and forks spares on demand; each
has its own socket to the agent and is the agent's child. Without a spare workers start cold, for the reason `why_cold`.

The io thread waits for all sockets and posts `read`; the main thread, which has all state, reads them.

Words: a spare is *ready* when it has reported so, and *coming* from the moment it was asked for.

Invariants: no start waits for a fork server or for spares any longer than is declared here. A spare that was
taken is never offered again, and one that was not taken receives nothing. Spares that were forked live on when the
fork server ends.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ....codec import Invalid
from ...common.events import Event, IoThread
from ...common.exits import describe_exit
from ..processes import spare_wire as wire
from ..processes.proc import KILL_WAIT_S, reap_within
from ..processes.workers import tied
from .imported import ONE_THREAD, ROOM, obstacle

log = logging.getLogger(__name__)

FORK_SERVER = Path(__file__).with_name("fork_server.py")

LOADING_S = 60.0
"""For the imports: a cold start beside them would import the same on the same cores and from the same disk."""

FORKING_S = 5.0
"""From the request for spares to the last of them. A fork takes some 10 ms, many on a machine with too much to do."""

CALM_S = 2.0
"""A generation is left alone for so long before spares are made for its successor: its start needs the cores."""

RETRY_S = 15.0
"""Before a fork server that has ended or hung is replaced: its imports need the cores of the workers."""

ROOM_FOR_WORDS = 4096
"""In the command line that ps shows of a worker, see `show_process`."""

ENDING_S = 0.5
"""How long the end of a process may take whose socket is closed already, before it is helped."""


class Spare:
    """One forked process that waits, or has become what it was sent."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.pid = 0
        """Known when it is ready."""
        self.taken = False
        self._ended: int | None = None

    def become(self, message: wire.BecomeWorker | wire.ServeStore, descriptors: Sequence[int] = ()) -> None:
        """Raises OSError when it has ended."""
        wire.send(self.channel, message, descriptors)

    def wait(self) -> int:
        """Its return code, as `subprocess` counts it."""
        if self._ended is None:
            _, status = os.waitpid(self.pid, 0)
            self._ended = os.waitstatus_to_exitcode(status)
        return self._ended


@dataclass(slots=True, eq=False)
class _ForkServer:
    """The process, and what is known of it."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    since: float
    loaded: bool = False
    reads: frozenset[str] = frozenset()
    """Variables that its modules have read."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What workers start with."""

    python: str
    """The job's, which need not be the agent's."""
    environment: Mapping[str, str]
    """What they inherit, with the mark of this agent."""


class Spares:
    """The fork server and its spares. For the main thread: what it starts dies with the thread that starts it."""

    def __init__(
        self,
        interpreter: Interpreter,
        names: Sequence[str],
        wanted: int,
        io: IoThread,
        post: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        """So many spares are `wanted`, with the modules of these `names`. Nothing is preloaded before `start`: every
        start is cold."""
        self.why_cold = "nothing is preloaded"
        """Where there is no spare."""
        self._interpreter = interpreter
        self._names = tuple(names)
        self._wanted = wanted
        self._io = io
        self._post = post
        self._clock = clock
        self._server: _ForkServer | None = None
        self._spares: list[Spare] = []
        self._asked_at = 0.0
        """When the first of those coming were asked for."""
        self._fork_failed = False
        """Some of those that were asked for last have ended before they were ready."""
        self._retry_at: float | None = None
        self._calm_at = 0.0
        self._ending: list[subprocess.Popen[bytes]] = []
        self._owners: dict[int, _ForkServer | Spare] = {}

    def start(self) -> None:
        self._server = self._launch(self._clock())

    def adopt(self, interpreter: Interpreter, names: Sequence[str], wanted: int) -> str:
        """From now on for workers like these, with what is preloaded already. Why that cannot be; empty if it is so.

        The fork server was started before its job was known, with `wanted` 0."""
        server, base = self._server, {**self._interpreter.environment, **ONE_THREAD}
        if server is None:
            return self.why_cold
        if tuple(names) != self._names:
            return f"--preload is {','.join(names)}, and was {','.join(self._names)}"
        if interpreter.python != self._interpreter.python:
            return f"workers run {interpreter.python}, and not {self._interpreter.python}"
        if not server.loaded and interpreter.environment != self._interpreter.environment:
            return "the job has variables of its own, and its imports are not done yet"
        if problem := obstacle(base, interpreter.environment, server.reads):
            return problem
        self._interpreter, self._wanted = interpreter, wanted
        return ""

    def close(self) -> None:
        """The agent is ending."""
        self._retry_at = None
        if self._server is not None:
            self._end(self._server)
        ready = [spare for spare in self._spares if spare.pid]
        self._drop_all()
        for spare in ready:
            reap_within(spare, KILL_WAIT_S)
        for process in self._ending:
            reap_within(process, KILL_WAIT_S)

    # --- What there is

    @property
    def pids(self) -> Collection[int]:
        """All processes that are waited for here."""
        return [*self.sessions, *(spare.pid for spare in self._spares if spare.pid)]

    @property
    def sessions(self) -> Collection[int]:
        """Of fork servers: the sessions from which spares come."""
        living = [self._server.process] if self._server is not None else []
        return [process.pid for process in (*living, *self._ending)]

    @property
    def ready(self) -> int:
        return sum(1 for spare in self._spares if spare.pid)

    @property
    def loaded(self) -> bool:
        """Whether there is nothing to wait for any more: it is ready, or gone, and then for an unknown time."""
        return self._server is None or self._server.loaded

    # --- What the agent asks for

    def prepared(self, count: int, now: float) -> bool:
        """Whether so many processes may be started now, warm or cold. If not: again after an event, or `turn`'s
        instant."""
        self._replace_if_overdue(now)
        if self._server is None or self.ready >= count:
            return True
        if not self._server.loaded:
            return False
        if self._fork_failed:
            return True
        self._ask_for(count - len(self._spares), now)
        return False

    def take(self) -> Spare | None:
        """A spare for the caller alone; None where there is none, for the reason `why_cold`."""
        spare = next((spare for spare in self._spares if spare.pid), None)
        if spare is not None:
            self._spares.remove(spare)
            spare.taken = True
        return spare

    def hand_out(
        self, message: wire.BecomeWorker | wire.ServeStore, descriptors: Sequence[int]
    ) -> Spare | None:
        while spare := self.take():
            try:
                spare.become(message, descriptors)
            except OSError:  # it has just ended, and is reaped as an orphan
                continue
            return spare
        return None

    def workers_started(self, now: float) -> None:
        """They need the cores now."""
        self._calm_at = now + CALM_S

    def turn(self, now: float) -> float | None:
        """Do what is due; the instant at which there is more to do."""
        self._ending = [process for process in self._ending if process.poll() is None]
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self._server = self._launch(now)
        self._replace_if_overdue(now)
        if self._server is not None and self._server.loaded and now >= self._calm_at:
            self._ask_for(self._wanted - len(self._spares), now)
        instants = [self._retry_at, self._due_at, self._calm_at if now < self._calm_at else None]
        return min((at for at in instants if at is not None), default=None)

    def read(self, descriptor: int) -> None:
        """The socket of the fork server, or of a spare, can be read: a message, or its end."""
        now, owner = self._clock(), self._owners.get(descriptor)
        if owner is None:
            return  # it was closed meanwhile
        try:
            received = wire.receive(owner.channel)
        except BlockingIOError:
            self._await(descriptor)
            return
        except (OSError, Invalid) as error:
            log.warning("a spare or the fork server has sent an invalid message: %s", error)
            received = None
        message = received[0] if received is not None else None
        if message is not None:
            self._await(descriptor)
        if isinstance(owner, Spare):
            self._on_spare_message(owner, message, now)
        else:
            self._on_server_message(owner, message, now)

    # --- The fork server

    def _launch(self, now: float) -> _ForkServer | None:
        """None when that failed, which is logged."""
        ours, theirs = wire.pair()
        job = self._interpreter
        words = [str(os.getpid()), ",".join(self._names), " " * ROOM_FOR_WORDS]
        try:
            with theirs:
                process = subprocess.Popen(
                    tied([job.python, "-u", str(FORK_SERVER), *words]),
                    env={**job.environment, **ONE_THREAD, **ROOM},
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            self._failed(f"it cannot be started: {error}", now)
            return None
        server = _ForkServer(process, ours, now)
        self._watch(ours, server)
        self.why_cold = "the fork server has not yet done its imports"
        return server

    def _on_server_message(self, server: _ForkServer, message: wire.Message | None, now: float) -> None:
        if message is None:
            returncode = reap_within(server.process, ENDING_S)
            self._end(server)
            ended = "it has closed its socket" if returncode is None else describe_exit(returncode)
            self._failed(ended, now)
        elif isinstance(message, wire.Loaded):
            server.loaded, server.reads = True, frozenset(message.reads)
            self.why_cold = "no spare was ready"
            log.info("preloaded %d modules in %.1f s", message.modules, now - server.since)
            for name, why in message.skipped.items():
                log.warning("not preloaded: %s (%s); workers import it themselves", name, why)
        elif isinstance(message, wire.Problem):
            self._end(server)
            self._drop_all()
            self.why_cold = f"the fork server cannot be forked: {message.text}"
            log.warning("workers start cold from now on: %s", self.why_cold)

    def _failed(self, why: str, now: float) -> None:
        """It is not there any more; another one will be, after a pause."""
        self._retry_at = now + RETRY_S
        self.why_cold = f"there is no fork server: {why}"
        log.warning("the fork server is gone: %s; starting another in %g s", why, RETRY_S)

    @property
    def _due_at(self) -> float | None:
        """When the fork server must be taken to hang."""
        if self._server is None:
            return None
        if not self._server.loaded:
            return self._server.since + LOADING_S
        return self._asked_at + FORKING_S if len(self._spares) > self.ready else None

    def _replace_if_overdue(self, now: float) -> None:
        if self._due_at is not None and now >= self._due_at:
            # Its messages may have come long ago, while this process stood still or had not begun to read.
            for descriptor in list(self._owners):
                self.read(descriptor)
        server = self._server
        if server is None or self._due_at is None or now < self._due_at:
            return
        problem = (
            f"it has not forked all spares within {FORKING_S:g} s"
            if server.loaded
            else f"it has not done its imports within {LOADING_S:g} s"
        )
        self._end(server)
        self._failed(problem, now)

    def _end(self, server: _ForkServer) -> None:
        """It has nothing to finish. There is no wait for its end, which a dead disk may delay."""
        self._close(server.channel)
        self._ending.append(server.process)
        server.process.kill()
        self._server = None
        for coming in [spare for spare in self._spares if not spare.pid]:
            self._discard(coming)

    # --- Spares

    def _ask_for(self, count: int, now: float) -> None:
        """Of the fork server, which has loaded; nothing if none are missing."""
        if count <= 0:
            return
        assert self._server is not None
        pairs = [wire.pair() for _ in range(min(count, wire.MOST_DESCRIPTORS))]
        try:
            wire.send(self._server.channel, wire.Fork(), [theirs.fileno() for _, theirs in pairs])
        except OSError:
            pass  # it has ended, as its socket will show, or does not read any more, and will be overdue
        if len(self._spares) == self.ready:
            self._asked_at, self._fork_failed = now, False
        for ours, theirs in pairs:
            theirs.close()
            spare = Spare(ours)
            self._spares.append(spare)
            self._watch(ours, spare)

    def _on_spare_message(self, spare: Spare, message: wire.Message | None, now: float) -> None:
        if message is None:
            if spare.taken:
                self._close(spare.channel)  # it has become a worker, or serves the store
            else:
                self._fork_failed |= not spare.pid
                self._discard(spare)
                self._calm_at = max(self._calm_at, now + CALM_S)  # whatever ends them may do so again
        elif isinstance(message, wire.Ready):
            spare.pid = message.pid
        elif isinstance(message, wire.Problem):
            log.warning("worker process %d is no fork: %s", spare.pid, message.text)

    def _discard(self, spare: Spare) -> None:
        """It has nothing to finish, and is reaped as any orphan."""
        if spare in self._spares:
            self._spares.remove(spare)
        self._close(spare.channel)
        if spare.pid:
            os.kill(spare.pid, signal.SIGKILL)  # it is our child, and not yet reaped

    def _drop_all(self) -> None:
        for spare in list(self._spares):
            self._discard(spare)

    # --- Sockets

    def _watch(self, channel: socket.socket, owner: _ForkServer | Spare) -> None:
        channel.setblocking(False)
        self._owners[channel.fileno()] = owner
        self._await(channel.fileno())

    def _close(self, channel: socket.socket) -> None:
        if self._owners.pop(channel.fileno(), None) is not None:
            self._io.forget(channel.fileno(), channel.close)

    def _await(self, descriptor: int) -> None:
        self._io.watch(descriptor, partial(self._readable, descriptor))

    def _readable(self, descriptor: int) -> None:
        """In the io thread: once, until the main thread has read."""
        self._io.forget(descriptor)
        self._post(partial(self.read, descriptor))
