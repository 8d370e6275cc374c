"""The command `elastic-agent`, and `python -m elastic_agent`."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys


def start() -> None:
    """Ends the process without waiting for threads: one that hangs in a dead store's connection must not delay or
    change the exit code, and everything that has to be closed was closed by `main`."""
    # A scheduler's warning would end this process. It waits until `run` has handlers; the imports take a while.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    from .agent.common.exits import ExitCode
    from .agent.main.process import fork_below_pid1
    from .cli import main

    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of jobs, where the terminal lacks a letter
    fork_below_pid1()
    try:
        code = main()
    except BrokenPipeError:
        code = ExitCode.OUTPUT_CLOSED
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads our output any more: no reason for another code
            stream.flush()
    os._exit(code)


def _open_closed_streams() -> None:
    """A shell's `>&-` closes one: what is opened next would take its number, and be written to like a log."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # at the lowest number that is free
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


if __name__ == "__main__":
    start()
