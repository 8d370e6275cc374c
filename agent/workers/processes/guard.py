"""The guard: a small process that outlives the agent by seconds, to kill what the agent's workers left behind (I9).

A worker dies with the agent by its parent-death signal, but its children do not: data loaders, launchers, daemons.
The guard holds the read end of a pipe whose write end only the agent has. End-of-file means that the agent is gone,
however it went; then the guard kills every process that belongs to the agent's workers until two searches in a row find
none, removes the agent's folders, and exits. It reads `session SID` and `forget SID` lines.

A process *belongs* to an incarnation when its session is a worker's (workers lead their own), when it is an orphan
whose environment carries the incarnation's marker, or when it descends from such a process. Each rule finds what the
others miss: the first a scrubbed environment, the second those in sessions of their own, the third both while the
parent lives. What left all three is found by the living agent, which adopts it (`subreaper`; not where the agent had
children before it began, or the kernel has no CONFIG_PROC_CHILDREN), and after the agent's death only by what started
it: systemd ends all that is in its unit, a container all that is in it. A zombie is dead. An agent forgets a session as
soon as it is empty: from then on its number may return as another session's.

Invariant: the guard never kills pid 1, the agent or itself, nor a process that it did not just see belong.

It must start within 20 ms: this file imports as little as it can, and `subprocess` only in the agent. To read an
environment may hang in the kernel: threads do that, and this process goes on and ends without them.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable

from .proc import (
    KILL_WAIT_S,
    find_processes,
    kill,
    living_since,
    orphans_with,
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


# --- The process


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
