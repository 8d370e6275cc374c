"""What a worker does with the signals that a scheduler sends to its agent and to all other processes of a job alike.

Each would end the worker, while its agent makes a planned change of it. A script's own handlers stay. Only the main
thread may set handlers: a worker whose main thread does not call the library keeps the defaults.
"""

from __future__ import annotations

import contextlib
import signal


def leave_warnings_to_agent() -> None:
    """Slurm's "your end is near" may go to all processes. What the script starts from now on ignores it, too."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            with contextlib.suppress(ValueError):
                signal.signal(number, signal.SIG_IGN)


def leave_sigterm_to_agent() -> bool:
    """Whether a SIGTERM does nothing to this process from now on.

    The agent must know: it sends SIGKILL then where it would have sent SIGTERM, which would have ended this process
    just so. By a handler that does nothing, and not by SIG_IGN, which programs that the script starts would inherit.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, _nothing)
            signal.siginterrupt(signal.SIGTERM, False)
            return True
    return False


def leave_nothing_to_agent() -> None:
    """In a child of a worker, which has no agent."""
    if signal.getsignal(signal.SIGTERM) is _nothing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def script_handles_sigterm() -> bool:
    handler = signal.getsignal(signal.SIGTERM)
    return callable(handler) and handler is not _nothing


def _nothing(_number: int, _frame: object) -> None:
    pass
