"""Process 1 of a container: passes signals on to the agent, reaps orphans, and ends as the agent ends.

The kernel makes two demands on the first process of a PID namespace. Every orphan becomes its child, and stays a
zombie until its exit status is asked for. And a signal that it has no handler for does nothing to it. An agent
that met them itself would have to tell orphans from its own children, whose exit statuses it must not lose. So when the
agent finds itself to be process 1, it goes on in a child process, where all is as on any machine; what stays behind
has one child and no other work.

When process 1 ends, the kernel kills all that is left in the container.
"""

from __future__ import annotations

import os
import signal

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
