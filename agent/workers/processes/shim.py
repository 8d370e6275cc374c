"""What a worker process runs first: `python -I -S shim.py AGENT_PID CPUS -- COMMAND...` gets ready and execs.

With `--helper` in the place of `--` the command is a process of the agent's own: it ignores `IGNORED`,
which the agent has blocked until then.

It ties the worker's life to the agent's (the kernel kills it when the thread that started it ends: start workers
from the agent's main thread), keeps it to CPUS, like 0,4,8 (empty: the agent's own), and gives the command the signal
mask and dispositions that the agent was started with, whatever the agent or this interpreter have set since. That
cannot be done between fork and exec in the agent, where Python code may deadlock beside gRPC's threads.

Exit codes as a shell's: 127 the command was not found, 126 it cannot be run; 1 the agent ended before the tie held, or
none of the CPUs can be used.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""By processes of the agent's own: a service manager may signal all that it started, while workers in their grace go
on. As in `guard`."""

STAY_IGNORED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What was ignored when the agent was started, as by nohup, its workers ignore, too: under torchrun they do."""


def main(agent_pid: int, cpus: str, command: list[str], *, helper: bool) -> int:
    """Returns only when the command could not be started."""
    if problem := tie(agent_pid) or keep_to(cpus):
        return _refuse(f"{problem}; not starting {command[0]!r}", 1)
    if helper:
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return _become(command)
    # Python ignores SIGPIPE and SIGXFSZ, and what is ignored stays so through exec; handlers do not.
    for number in signal.valid_signals():
        if signal.getsignal(number) == signal.SIG_IGN and number not in STAY_IGNORED:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return _become(command)


def _become(command: list[str]) -> int:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        code = 127 if isinstance(error, (FileNotFoundError, NotADirectoryError)) else 126
        return _refuse(f"cannot run {command[0]!r}: {error.strerror}", code)


def tie(agent_pid: int) -> str:
    """From now on this child of the agent dies with it. Why that cannot be; empty if it is so."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        return f"cannot be tied to the agent's life: {os.strerror(ctypes.get_errno())}"
    if os.getppid() != agent_pid:  # it died before the line above: the signal will never come
        return f"agent {agent_pid} is gone"
    return ""


def keep_to(cpus: str) -> str:
    """This process runs on these CPUs only. Why that cannot be; empty if it is so."""
    if cpus:
        try:
            os.sched_setaffinity(0, map(int, cpus.split(",")))
        except OSError as error:
            advice = "were they taken away since the agent began? Start it again, or use --affinity none"
            return f"cannot run on the CPUs {cpus} ({error.strerror}): {advice}"
    return ""


def _refuse(problem: str, code: int) -> int:
    print(f"elastic-agent: {problem}", file=sys.stderr)
    return code


if __name__ == "__main__":
    pid, cpus, kind, *command = sys.argv[1:]
    sys.exit(main(int(pid), cpus, command, helper=kind == "--helper"))
