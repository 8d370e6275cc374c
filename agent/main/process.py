"""What an agent does to its own process: its environment, its log, its signals, and an end without the main loop."""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
from collections.abc import Callable, Collection, Mapping

from ..common.events import Event, Signalled, ThreadFailed
from ..common.exits import ENDINGS, TIME_IS_OVER, WARNINGS, ExitCode, lack_in
from ..configuration.config import LogConfig
from ..configuration.options import SECRET_VARIABLES
from ..configuration.stopping import StopConfig, leaves_in_s
from ..output.console import Console, ConsoleHandler
from ..output.log_lines import JsonLines, TextLines
from ..workers.processes.guard import Guard
from .error_file import VARIABLE as ERROR_FILE
from .error_file import write_error_file

log = logging.getLogger(__name__)


def take_environment() -> Mapping[str, str]:
    """What the workers inherit; then this process changes its own."""
    for secret in SECRET_VARIABLES:
        os.environ.pop(secret, None)  # neither the guard nor any worker inherits it (I15)
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


def end_in_time(stop: StopConfig) -> None:
    """Sets the timer that warns this agent before its job's end."""
    if stop.job_ends_at is not None:
        in_s = leaves_in_s(stop.job_ends_at - time.time(), stop.grace_s)
        log.info("leaving the job in %.0f s, before its end (--job-ends-at)", in_s)
        signal.setitimer(signal.ITIMER_REAL, max(in_s, 0.001))  # 0 would set none


def catch_signals(events: queue.SimpleQueue[Event], more: Collection[signal.Signals]) -> None:
    """A handler runs between any two bytecodes: it may only put an event, which SimpleQueue allows at any moment.

    A signal that this process was started to ignore stays ignored: `nohup` and a shell's `trap '' USR1` mean it.
    """
    for number in {*ENDINGS, *WARNINGS, TIME_IS_OVER, *more}:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: events.put(Signalled(number)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)  # blocked since the process began


def thread_failed(events: queue.SimpleQueue[Event], name: str, error: BaseException) -> None:
    if lack := lack_in(error):
        events.put(ThreadFailed(name, lack, ExitCode.NOT_HERE))
        return
    events.put(ThreadFailed(name, repr(error)))
    log.error("the thread %s has failed", name, exc_info=error)
