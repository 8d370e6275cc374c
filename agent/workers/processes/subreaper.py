"""The agent as a subreaper: it adopts its workers' orphans, reaps those that end, and lists those that live.

The kernel gives an orphan to the nearest ancestor that asked for it, a *subreaper*, else to process 1. The agent asks:
so the forks of the fork server become its own children, whose exit status it can wait for, and so does what a worker
leaves behind, also what has left the worker's session and forgotten its environment (`guard`).

An *unknown* child of the agent is one that no other part of it has registered. Only these are reaped here: to wait for
any child would take the exit status away from its owner. An orphan always comes to the agent's main thread, and this
code runs there: a child that another thread starts is never mistaken for one, and one of the main thread's own is known
before the next look.

Invariants: without the kernel's list of a thread's children (CONFIG_PROC_CHILDREN) the agent adopts no orphans: it
could not tell them from its own children. And where the process had children before it was an agent (`sidecar & exec
elastic-agent`), an orphan may be theirs: then it is reaped when it ends, and not listed.

The first process of a PID namespace gets orphans anyway, and a signal that it has no handler for does nothing to it.
So an agent that finds itself to be process 1 of a container goes on in a child process, where all is as on any machine
(`fork_below_pid1`); what stays behind passes signals on, reaps orphans, and ends as the agent ends. Then the kernel
kills all that is left in the container.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Collection

from .proc import living, read

PR_SET_CHILD_SUBREAPER = 36

REAP_EVERY_S = 1.0
"""A zombie costs nothing but its number."""

FIRST_PID = 1


def adopt_orphans() -> str:
    """From now on. Why it cannot be; empty if it is so."""
    if not os.path.exists(_list_of_children()):
        return "this kernel does not list a process' children (CONFIG_PROC_CHILDREN)"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        return f"this process cannot adopt orphans: {os.strerror(ctypes.get_errno())}"
    return ""


class Subreaper:
    """For the main thread, after `adopt_orphans`."""

    def __init__(self) -> None:
        """To be made before this process has started any other."""
        self._known: list[Callable[[], Collection[int]]] = []
        self._expected: Callable[[], Collection[int]] = tuple
        before = tuple(self._unknown())
        self._had_children = bool(before)
        self.add_known(lambda: before)
        self._reap_at = 0.0

    def add_known(self, pids: Callable[[], Collection[int]]) -> None:
        """These, whenever they are asked for, have an owner that waits for them."""
        self._known.append(pids)

    def expect_sessions(self, sessions: Callable[[], Collection[int]]) -> None:
        """Children from these sessions will be known soon, and are no orphans of a worker."""
        self._expected = sessions

    def unknown_children(self) -> tuple[int, ...]:
        """Those that live. A zombie is dead."""
        if self._had_children:
            return ()
        expected = set(self._expected())
        stats = ((pid, living(pid)) for pid in self._unknown())
        found = tuple(pid for pid, stat in stats if stat is not None and stat.session not in expected)
        if found:
            self._reap_at = 0.0  # they are to be killed
        return found

    def reap(self, now: float) -> None:
        """Those that have ended; at most every REAP_EVERY_S."""
        if now < self._reap_at:
            return
        self._reap_at = now + REAP_EVERY_S
        for pid in self._unknown():
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # no child of ours: it was one a moment ago
                pass

    def _unknown(self) -> list[int]:
        children = map(int, read(_list_of_children()).split())  # empty without the kernel's list
        known = {pid for pids in self._known for pid in pids()}
        return [pid for pid in children if pid not in known]


def _list_of_children() -> str:
    """Of the main thread, whose number is the process' own."""
    return f"/proc/self/task/{os.getpid()}/children"


# --- As process 1 of a container


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
