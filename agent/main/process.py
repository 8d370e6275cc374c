"""What an agent does to its own process: its environment, its log, its signals, an end without the main loop, a fork
where it is process 1 of a container, and what it tells the service manager that started it.

Its own error file is where schedulers that start torchrun read why a job failed (TORCHELASTIC_ERROR_FILE). It has the
form that torch's `@record` writes on torchrun: the first failed worker's error, or else the agent's own.

`ServiceManager` speaks systemd's notify protocol. READY is sent once everything that this node alone can refuse is
checked, its HTTP server answers and signals are handled: not later, because the store may be away for long, and that is
no reason to kill the start of a unit. WATCHDOG comes from the main thread alone, from the turns of the loop, and before
there is one from the wait for the store: an agent whose main thread is stuck falls silent, and is killed and started
again. Sending never blocks, and never fails the agent. What could not be sent is lost; but READY, without which the
manager kills the agent, is sent again.

The first process of a PID namespace gets the orphans of all others, also those of a shell that a user opened in the
container, and a signal that it has no handler for does nothing to it. So an agent that finds itself to be process 1
goes on in a child process, where all is as on any machine (`fork_below_pid1`); what stays behind passes signals on,
reaps orphans, and ends as the agent ends. Then the kernel kills all that is left in the container.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping
from functools import partial
from typing import Any

from ...rendezvous.records import Failure
from ...threads import Thread
from ..common.events import Event, Signalled, ThreadFailed
from ..common.exits import ENDINGS, WARNINGS, ExitCode, lack_in
from ..configuration.config import LogConfig
from ..output.console import Console, ConsoleHandler, JsonLines, TextLines
from ..workers.processes.guard import Guard

log = logging.getLogger(__name__)


def take_environment() -> Mapping[str, str]:
    """What the workers inherit; then this process changes its own."""
    # The error file is this process's own; each worker has another one.
    environment = {name: value for name, value in os.environ.items() if name != ERROR_FILE}
    # A store that ends makes torch write pages of C++ frames; our log has what happened in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return environment


def log_to(console: Console, name: str, logs: LogConfig, generation: Callable[[], int] = lambda: 0) -> None:
    """`generation`: the newest generation of this node's workers; 0: none."""
    handler = ConsoleHandler(console)
    handler.setFormatter(JsonLines(name, generation) if logs.format == "json" else TextLines(name))
    root = logging.getLogger("elastic_agent")
    root.handlers[:] = [handler]
    root.setLevel(logs.level)
    root.propagate = False


def end_stuck(problem: str, guard: Guard, console: Console) -> None:
    """In the thread that watches the main one, which can do none of this any more."""
    guard.release()
    log.critical("%s\nended with exit code %d", problem, ExitCode.LOOP_STUCK)
    # Its disk may be what holds the main thread.
    write_error_file(os.environ, ExitCode.LOOP_STUCK, problem, None, time.time())
    console.close()
    os._exit(ExitCode.LOOP_STUCK)


def catch_signals(events: queue.SimpleQueue[Event], more: Collection[signal.Signals]) -> None:
    """A handler runs between any two bytecodes: it may only put an event, which SimpleQueue allows at any moment.

    A signal that this process was started to ignore stays ignored: `nohup` and a shell's `trap '' USR1` mean it.
    """
    for number in {*ENDINGS, *WARNINGS, *more}:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: events.put(Signalled(number)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)  # blocked since the process began


def thread_failed(events: queue.SimpleQueue[Event], name: str, error: BaseException) -> None:
    if lack := lack_in(error):
        events.put(ThreadFailed(name, lack, ExitCode.NOT_HERE))
        return
    events.put(ThreadFailed(name, repr(error)))
    log.error("the thread %s has failed", name, exc_info=error)


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

WITHIN_S = 5.0
"""A disk that does not answer keeps the agent from its end no longer than this."""


def write_error_file(
    environ: Mapping[str, str], code: int, reason: str, failure: Failure | None, at_s: float
) -> None:
    """To the file that the variable names, if it does. `at_s` is the time of day."""
    path = environ.get(ERROR_FILE)
    if not path:
        return
    write = partial(_write, path, json.dumps(error_report(code, reason, failure, at_s)))
    writing = Thread(write, "error-file", otherwise=write)
    writing.start()
    writing.join(WITHIN_S)
    if writing.is_alive():
        log.warning("the error file %s (%s) is not written within %g s", path, ERROR_FILE, WITHIN_S)


def _write(path: str, text: str) -> None:
    scratch = f"{path}.{os.getpid()}"
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(scratch, path)  # who waits for the file never reads half of it
    except OSError as error:
        log.warning("the error file %s (%s) is not written: %s", path, ERROR_FILE, error)
        with contextlib.suppress(OSError):
            os.unlink(scratch)


def error_report(code: int, reason: str, failure: Failure | None, at_s: float) -> dict[str, Any]:
    """`code` and `reason` are the agent's."""
    if failure is None or failure.local_rank is None:
        extra = {"py_callstack": "", "timestamp": str(int(at_s))}
        return {"message": {"message": reason, "extraInfo": extra, "errorCode": code}}
    extra = {
        "py_callstack": failure.traceback or "\n".join(failure.log_tail),
        "timestamp": str(int(at_s)),
        "rank": str(failure.rank),
        "node": failure.node,
    }
    message = failure.exception or failure.summary
    return {"message": {"message": message, "extraInfo": extra, "errorCode": failure.returncode}}


NOTIFY_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""Addressed to one process alone: a worker that inherited them could send in the agent's name."""

NOTIFY_EVERY_S = 0.5
LONGEST_STATUS = 300


class ServiceManager:
    """For the main thread. Where `environ` names none, nothing is sent."""

    def __init__(self, environ: MutableMapping[str, str], clock: Callable[[], float]) -> None:
        """Takes the variables out of `environ`: no child may inherit them. The address is a path, or a name in the
        abstract namespace that begins with `@`."""
        given = [environ.pop(name, "") for name in NOTIFY_VARIABLES]
        self._address = given[0].replace("@", "\0", 1) if given[0].startswith("@") else given[0]
        self._clock = clock
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if self._address else None
        self._owed = ""
        """READY, until it is sent."""
        self._next_at = float("-inf")
        self._unreachable = False

    def ready(self) -> None:
        self._owed = "READY=1\n"
        self._send("")

    def turn(self, status: str) -> None:
        """The main thread goes on. To be called at least every second."""
        now = self._clock()
        if self._owed or now >= self._next_at:
            self._next_at = now + NOTIFY_EVERY_S
            self._send("WATCHDOG=1\n", status)

    def stopping(self, status: str) -> None:
        """From now on the agent only ends. May be called again with a newer status."""
        self._send("STOPPING=1\n", status)

    def _send(self, lines: str, status: str = "") -> None:
        if self._socket is None:
            return
        message = f"{self._owed}{lines}STATUS={' '.join(status.split())[:LONGEST_STATUS]}"
        try:
            self._socket.sendto(message.encode(errors="replace"), socket.MSG_DONTWAIT, self._address)
        except OSError as error:
            if not self._unreachable:
                log.warning("the service manager cannot be reached at NOTIFY_SOCKET: %s", error.strerror)
            self._unreachable = True
        else:
            self._owed, self._unreachable = "", False


# --- As process 1 of a container

FIRST_PID = 1


def fork_below_pid1() -> None:
    """Returns at once where this is not process 1; otherwise in a child process, which is the agent from now on.

    To be called while the process has one thread, and knows no signal handlers of its own.
    """
    if os.getpid() != FIRST_PID:
        return
    # Blocked before the fork: a signal that comes from now on waits until one of the two takes it.
    inherited = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    agent = os.fork()
    if agent == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, inherited)
        return
    os._exit(_serve(agent))


def _serve(agent: int) -> int:
    """Until the agent has ended: its exit code, or 128 and the signal that ended it, as a shell says it."""
    while True:
        received = signal.sigwaitinfo(signal.valid_signals())
        if received.si_signo == signal.SIGCHLD:
            ended = _reap_all().get(agent)
            if ended is not None:
                code = os.waitstatus_to_exitcode(ended)
                return code if code >= 0 else 128 - code
        elif received.si_code <= 0:  # sent by a process; what a terminal sends, it sends to the agent, too
            os.kill(agent, received.si_signo)


def _reap_all() -> dict[int, int]:
    """Of all children that have ended, the wait status: several ends may be one SIGCHLD."""
    ended = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    except ChildProcessError:  # the last one
        pass
    return ended
