"""What the agent's workers leave behind ends with their generation, or with the agent (I9).

A worker dies with the agent by its parent-death signal, but its children do not: data loaders, launchers, daemons.
Two things know how to find these. While the agent lives, it adopts them; after its death the guard kills them.

*The guard* is a small process that outlives the agent by seconds. It holds the read end of a pipe whose write end only
the agent has. End-of-file means that the agent is gone, however it went; then the guard kills every process that
belongs to the agent's workers until two searches in a row find none, removes the agent's folders, and exits. It reads
`session SID` and `forget SID` lines.

A process *belongs* to an incarnation when its session is a worker's (workers lead their own), when it is an orphan
whose environment carries the incarnation's marker, or when it descends from such a process. Each rule finds what the
others miss: the first a scrubbed environment, the second those in sessions of their own, the third both while the
parent lives. What has left all three is found by the living agent only, and after its death by what started it: systemd
ends all that is in its unit, a container all that is in it. A zombie is dead. An agent forgets a session as soon as it
is empty: from then on its number may return as another session's.

*Adoption.* The kernel gives an orphan to the nearest ancestor that asked for it, a *subreaper*, else to process 1. The
agent asks: so the forks of the fork server become its own children, whose exit status it can wait for, and so does what
a worker leaves behind, also what has left the worker's session and forgotten its environment. An *unknown* child of the
agent is one that no other part of it has registered. Only these are reaped: to wait for any child would take the exit
status away from its owner. An orphan always comes to the agent's main thread, and this code runs there: a child that
another thread starts is never mistaken for one, and one of the main thread's own is known before the next look.

Invariants: the guard never kills pid 1, the agent or itself, nor a process that it did not just see belong. Without the
kernel's list of a thread's children (CONFIG_PROC_CHILDREN) the agent adopts no orphans: it could not tell them from its
own children. And where the process had children before it was an agent (`sidecar & exec elastic-agent`), an orphan may
be theirs: then it is reaped when it ends, and not listed.

The guard must start within 20 ms: this file imports as little as it can, and `subprocess` only in the agent. To read an
environment may hang in the kernel: threads do that, and this process goes on and ends without them.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable

from .proc import (
    KILL_WAIT_S,
    find_processes,
    kill,
    living,
    living_since,
    orphans_with,
    read,
    reap_within,
    say,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""By this process: a service manager may signal all that it started, while workers in their grace go on."""

MARKED_WITHIN_S = 0.5
"""What has not been found by its environment until then is found by the next look, if at all."""
COMPLETE_WITHIN_S = 2.0
"""Until then only a search that has read all environments counts as one that has found none."""
SWEEP_S = 5.0
"""The guard gives up on processes that do not die (waiting for a dead disk) after this long."""
_PAUSE_S = 0.01

_ROOT = os.path.abspath(__file__).rsplit("/", len(__name__.split(".")))[0]
PROGRAM = f"import sys; sys.path.insert(0, {_ROOT!r}); from {__name__} import main; main(*sys.argv[1:])"


class Guard:
    """The agent's end. For one thread. A guard that was killed, or does not read, is replaced by the next `check`."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._sessions: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._missing = False
        """It has ended, and no other could be started yet."""

    @property
    def pid(self) -> int:
        return self._running.pid

    def start(self, incarnation: str, folders: Iterable[str | os.PathLike[str]] = ()) -> None:
        """`folders` are the agent's own, of temporary files: no other process can remove them after a SIGKILL."""
        self._arguments = [incarnation, *(os.fspath(path) for path in folders)]
        self._launch()

    def watch(self, sid: int) -> None:
        """A worker leads this session now."""
        self._sessions.add(sid)
        self._send(f"session {sid}\n")

    def forget(self, sid: int) -> None:
        """No process is left in this session."""
        self._sessions.discard(sid)
        self._send(f"forget {sid}\n")

    def check(self) -> None:
        """Replace it if it has ended; again at the next call where that cannot be."""
        dead, pipe = self._running, self._pipe
        if dead.poll() is None:
            return
        if not self._missing:
            import logging

            log = logging.getLogger(__name__)
            log.warning("the guard process %d ended with %s; starting another", dead.pid, dead.returncode)
        self._missing = True
        try:
            self._launch()
        except OSError:
            return
        self._missing = False
        os.close(pipe)

    def release(self) -> None:
        """Lets the guard do its work, from whatever thread: this agent ends now, though its threads may not."""
        os.close(self._pipe)

    def close(self) -> None:
        """Lets the guard do its work and waits for it: nothing of this agent's workers is left afterwards."""
        guard = self._running
        self.release()
        _end(guard, SWEEP_S + 1.0)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the guard is started before it is used"
        return self._process

    def _launch(self) -> None:
        """Raises OSError, and then nothing is changed."""
        import subprocess

        # The write end is close-on-exec: no worker and no later child of the agent can keep the guard from seeing the
        # end.
        read, pipe = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", PROGRAM, *self._arguments],
                stdin=read,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            os.close(pipe)
            raise
        finally:
            os.close(read)
        os.set_blocking(pipe, False)
        try:
            for sid in self._sessions:
                os.write(pipe, f"session {sid}\n".encode())
        except OSError:  # it has ended at once
            os.close(pipe)
            _end(process)
            raise
        self._process, self._pipe = process, pipe

    def _send(self, line: str) -> None:
        try:
            os.write(self._pipe, line.encode())
        except BlockingIOError:  # it lives, and does not read: it would not know this session
            self._running.kill()
        except OSError:
            pass  # it was killed: the next one is told of all sessions


def _end(guard: subprocess.Popen[bytes], within_s: float = 0.0) -> None:
    if reap_within(guard, within_s) is None:
        guard.kill()
        reap_within(guard, KILL_WAIT_S)


# --- Adoption, by the living agent

PR_SET_CHILD_SUBREAPER = 36

REAP_EVERY_S = 1.0
"""A zombie costs nothing but its number."""


def adopt_orphans() -> str:
    """From now on. Why it cannot be; empty if it is so."""
    if not os.path.exists(_list_of_children()):
        return "this kernel does not list a process' children (CONFIG_PROC_CHILDREN)"
    import ctypes

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


# --- The guard's process


def main(incarnation: str, *folders: str) -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    agent = os.getppid()
    since = living_since(agent) or "0"  # it may have just ended
    sessions: set[int] = set()
    begun = b""
    while data := os.read(0, 65536):
        *lines, begun = (begun + data).split(b"\n")
        for line in lines:
            word, session = line.split()
            if word == b"session":
                sessions.add(int(session))
            else:
                sessions.discard(int(session))
    report = _sweep(incarnation, sessions, agent, since)
    if folders:
        import shutil

        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    if report:
        signal.alarm(1)  # ends this process where the reader of its stderr has stopped reading
        say(report)


def _sweep(incarnation: str, sessions: Collection[int], agent: int, since: str) -> str:
    """Kills what belongs, and returns the words for stderr; empty when nothing was left."""
    begun = time.monotonic()
    killed: set[int] = set()
    quiet = 0
    while quiet < 2 and time.monotonic() < begun + SWEEP_S:
        marked, complete = _marked_orphans(incarnation, since)
        found = find_processes(sessions, others=marked, spared={agent})
        for pid, start in found.items():
            # Microseconds lie between the look and the kill; a pid comes back only after all others were used.
            if living_since(pid) == start and kill(pid):
                killed.add(pid)
        complete = complete or time.monotonic() > begun + COMPLETE_WITHIN_S
        quiet = quiet + 1 if complete and not found else 0
        time.sleep(_PAUSE_S)
    if not killed:
        return ""
    unfinished = "" if quiet == 2 else "; some do not die"
    pids = " ".join(map(str, sorted(killed)))
    return f"the agent has ended; killed what its workers left: {pids}{unfinished}"


def _marked_orphans(incarnation: str, since: str) -> tuple[list[int], bool]:
    """Those whose environment carries the incarnation's marker, as far as a thread finds them in time, and whether
    that was all."""
    found: list[int] = []
    searching = _thread.allocate_lock()
    searching.acquire()

    def search() -> None:
        for pid in orphans_with(f"ELASTIC_AGENT_INCARNATION={incarnation}", since):
            found.append(pid)
        searching.release()

    try:
        _thread.start_new_thread(search, ())
    except RuntimeError:  # no thread can be made now
        return [], False
    complete = searching.acquire(timeout=MARKED_WITHIN_S)
    return found[:], complete
