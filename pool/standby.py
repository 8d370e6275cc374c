"""The standby: a process that waits to be the agent of a job, with all that takes long done already.

The daemon starts it while the node is idle, as `elastic-agent --await-job`. It has imported what an agent needs,
and holds a fork server, from which the job's workers will be forked. Everything that the job decides (directory,
environment, console, log level, signals, cgroup) it takes over with the job, as a process does that starts with it.
It ends when the daemon ends: with its socket, and by the signal of its parent's death.

On a socket pair the daemon sends the file for what is printed and `AgentCommand`, maybe before the standby is ready.
That answers `TAKEN` before it does anything for the job. So one that has ended without it has started nothing, and the
job's agent may be started in another way.

A job whose agent could not be like a process that starts with it gets no standby, and starts cold: Python, and what
workers are forked from, have read some of their environment when they started. What is found later to be different, as
a --preload of the job's own, costs the time to preload again and nothing else.

Invariant: a standby that was handed out is never offered again.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __file__ as _package
from ..agent.common.events import ThreadFailed, run_next
from ..agent.common.exits import ExitCode
from ..agent.configuration.rendezvous import STORES
from ..agent.workers.processes.imported import obstacle
from ..codec import Document, Invalid
from ..worker.wire.shared_progress import clock

if TYPE_CHECKING:
    from ..agent.main.assembly import PreparedProcess

log = logging.getLogger(__name__)

TAKEN_WITHIN_S = 10.0
"""One that is ready answers at once; but it may have just been started, on a machine with too much to do. The daemon
waits meanwhile."""
ENDED_WITHIN_S = 5.0
"""After SIGKILL."""

LONGEST = 16 * 2**20
"""Bytes: many times what the kernel takes as a process' arguments and environment."""


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """What the agent of a job is started with: `elastic-agent WORDS...`, in this directory, with this environment and
    no other. A standby that gets it becomes that agent."""

    words: tuple[str, ...]
    environment: dict[str, str]
    directory: str


TAKEN = b"taken"
"""From now on it is the job's agent: how it ends is how that ends."""

_COMMAND = Document(AgentCommand, 1, LONGEST)


def send_job(channel: socket.socket, job: AgentCommand, output: int) -> None:
    """`output` is the file for what is printed. Raises OSError."""
    socket.send_fds(channel, [b"."], [output])
    channel.sendall(_COMMAND.encode(job).encode() + b"\n")


def receive_job(channel: socket.socket) -> tuple[AgentCommand, int] | None:
    """None when the daemon has ended. The file for what is printed is the caller's. Raises Invalid, OSError."""
    data, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if not data:
        return None
    if not descriptors:
        raise Invalid("job without its output")
    os.set_inheritable(descriptors[0], False)
    with channel.makefile("rb") as text:
        line = text.readline(LONGEST).decode(errors="replace")  # cut anywhere where the daemon died
        return _COMMAND.decode(line), descriptors[0]


_PR_SET_PDEATHSIG = 1
DAEMON_ENDED = signal.SIGUSR1
"""The kernel may send it once for each thread of the daemon. A second SIGTERM would cut the workers' grace short."""


def signal_at_daemons_end(number: signal.Signals) -> None:
    """For a child that `start_child` has started: from now on it gets this one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


_PACKAGES_PARENT = str(Path(_package).parents[1])

_RUN_MODULE = f"""\
import sys; sys.path[0] or sys.path.pop(0); sys.path.append(sys.argv.pop(1))
import os, runpy, traceback
try:
    import ctypes
    ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, int(sys.argv.pop(1)))
    if os.getppid() != int(sys.argv.pop(1)): sys.exit("elastic-agent: the daemon has ended; nothing was started")
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
except Exception: traceback.print_exc(); os._exit({ExitCode.AGENT_FAILED:d})
"""
"""As `python -m` does, with four differences. What a job has in its directory is not taken for a part of us. We are
found where this daemon was, also if that is no place where Python looks by itself. It ties itself to the daemon's life:
`preexec_fn` may deadlock beside gRPC's threads. And an agent that cannot begin, as where it is installed badly, is no
failure of the job's workers.
"""


def start_child(command: list[str], at_our_end: signal.Signals, **how: Any) -> subprocess.Popen[bytes]:
    """Runs a module of ours, with its arguments. It gets this signal when this thread ends. Raises OSError."""
    tie = [str(int(at_our_end)), str(os.getpid())]
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _RUN_MODULE, _PACKAGES_PARENT, *tie, *command],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **how,
        )
    except ValueError as error:  # a byte or a letter that no command line and no variable can have
        raise OSError(f"cannot be started: {error}") from error


CALM_S = 20.0
"""The first steps of a job are left alone for so long before a standby is made for the next one."""

RETRY_S = 60.0
"""The pause before a standby that has ended by itself is replaced."""

SEARCH_PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD")


class Standby:
    """For the main thread: what it starts ends with the thread that starts it."""

    def __init__(
        self,
        preloads: Sequence[str],
        store: str,
        environment: Mapping[str, str],
        clock: Callable[[], float],
    ) -> None:
        """Without words of --preload there is none, ever. `store` is the kind of the pool's."""
        self._preloads, self._store = tuple(preloads), store
        self._environment = environment
        self._clock = clock
        self._directory = os.getcwd()
        self._waiting: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        """The process, and this end of its socket."""
        self._start_at = clock()

    def turn(self) -> None:
        """Replace one that is gone."""
        if self._waiting is not None and (code := self._waiting[0].poll()) is not None:
            self._drop(f"it ended with {code}")
        if self._waiting is None and self._preloads and self._clock() >= self._start_at:
            self._start()

    def hand_over(self, job: AgentCommand, output: int) -> subprocess.Popen[bytes] | None:
        """The process that is the job's agent from now on; None where the job must start cold: then none has begun."""
        if self._waiting is None:
            return None
        if why := why_cold(self._environment, job.environment, self._directory, job.directory):
            log.info("the job's agent starts cold: %s", why)
            return None
        process, channel = self._waiting
        channel.settimeout(TAKEN_WITHIN_S)
        try:
            send_job(channel, job, output)
            taken = channel.recv(len(TAKEN)) == TAKEN
        except OSError:  # its end, or its silence
            taken = False
        if not taken:
            self._drop("it has not taken its job")
            return None
        channel.close()
        self._waiting, self._start_at = None, self._clock() + CALM_S
        return process

    def idle(self) -> None:
        """The node has nothing to do: no reason to wait any longer."""
        self._start_at = self._clock()

    def close(self) -> None:
        """Ends the one that waits: it has nothing to finish. If SIGKILL does not end it, it is left."""
        if self._waiting is None:
            return
        (process, channel), self._waiting = self._waiting, None
        channel.close()
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDED_WITHIN_S)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = start_child(
                    [
                        *("elastic_agent", "--await-job"),
                        *(str(theirs.fileno()), ",".join(self._preloads), self._store),
                    ],
                    signal.SIGKILL,
                    env=dict(self._environment),
                    pass_fds=(theirs.fileno(),),
                )
        except OSError as error:
            ours.close()
            self._drop(f"it cannot be started: {error}")
            return
        self._waiting = process, ours

    def _drop(self, why: str) -> None:
        self.close()
        self._start_at = self._clock() + RETRY_S
        log.warning("the process that waits for the next job is gone: %s; another in %g s", why, RETRY_S)


def why_cold(environment: Mapping[str, str], of_job: Mapping[str, str], directory: str, of_its: str) -> str:
    """Why a process that was started in this environment and directory cannot be what the job's would be."""
    if different := obstacle(environment, of_job):
        return different
    for name in SEARCH_PATHS if directory != of_its else ():
        if not all(entry.startswith("/") for entry in of_job.get(name, "/").split(":")):
            return f"{name} is {of_job[name]!r}, which depends on the directory"
    return ""


LONGEST_TURN_S = 60.0


def await_job(
    descriptor: int, preloads: Sequence[str], store: str
) -> tuple[tuple[str, ...], PreparedProcess] | None:
    """The words of the job's agent, which this process is from now on; None when the daemon has ended.

    `descriptor` is that of the daemon's socket, `preloads` the words of --preload, `store` the kind of the pool's.
    """
    from ..agent.main.assembly import preload, prepare_process  # a daemon needs none of it

    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    prepared = prepare_process()
    STORES[store].load()
    try:
        prepared = preload(prepared, preloads, os.environ)
        _wait(channel, prepared)
        received = receive_job(channel)
        if received is None:
            return None
        job, output = received
        os.chdir(job.directory)
        signal_at_daemons_end(DAEMON_ENDED)
        channel.send(TAKEN)
    except (OSError, Invalid) as error:
        log.warning("no job of the daemon can be taken: %s", error)
        return None
    channel.close()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(job.environment)
    time.tzset()
    return job.words, prepared


def _wait(channel: socket.socket, prepared: PreparedProcess) -> None:
    """Until the daemon speaks, or has ended. What is preloaded is served meanwhile."""
    spares, events, spoke = prepared.spares, prepared.events, threading.Event()

    def tell_once() -> None:
        prepared.io.forget(channel.fileno())
        events.put(spoke.set)

    prepared.io.watch(channel.fileno(), tell_once)
    while not spoke.is_set():
        due_at = spares.turn(clock()) if spares is not None else None
        until_s = LONGEST_TURN_S if due_at is None else min(LONGEST_TURN_S, max(0.0, due_at - clock()))
        run_next(events, until_s, _fail)


def _fail(event: object) -> None:
    if isinstance(event, ThreadFailed):
        raise SystemExit(event.reason)
