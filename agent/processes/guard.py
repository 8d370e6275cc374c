"""The guard: a small process that outlives the agent by seconds, to kill what the agent's workers left behind (I9).

A worker dies with the agent by its parent-death signal, but its children do not: data loaders, launchers, daemons.
The guard holds the read end of a pipe whose write end only the agent has. End-of-file means that the agent is gone,
however it went; then the guard kills every process that belongs to the agent's workers until two looks in a row find
none, removes the agent's folders, and exits. It runs as `python -I -S guard.py INCARNATION CGROUP FOLDER...` (CGROUP
may be empty) and reads `session SID` and `forget SID` lines.

A process *belongs* to an incarnation when its environment carries the incarnation's marker, when its session is a
worker's (workers lead their own), or when it descends from such a process. Each rule finds what the others miss: the
first orphans in sessions of their own, the second a scrubbed environment, the third both while the parent lives. What
left all three is found by the living agent, which adopts it (`children`), and after the agent's death only where it has
a cgroup for its workers (`cgroups`): nobody leaves that. A zombie is dead. An agent forgets a session as soon as it is
empty: from then on its number may return as somebody else's.

Invariant: the guard never kills pid 1, the agent or itself, nor a process that it did not just see belong.

This file must start within 20 ms: it imports as little as it can, and `subprocess` only in the agent.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

SWEEP_S = 5.0
"""The guard gives up on processes that do not die (waiting for a dead disk) after this long."""
_PAUSE_S = 0.01


def find_processes(
    incarnation: str,
    sessions: Collection[int] = (),
    *,
    generation: int | None = None,
    adopted: Collection[int] = (),
    proc: str | os.PathLike[str] = "/proc",
) -> tuple[int, ...]:
    """The living processes that belong to this incarnation's workers, or to those of one `generation`.

    Those `adopted` belong, too, whatever they look like. The caller itself and pid 1 are never among them. A process
    that a worker forked without exec has the environment that its program was started with: its generation shows only
    if that program was started for one.
    """
    return tuple(sorted(_find(incarnation, generation, sessions, {1, os.getpid()}, proc, adopted)))


def cgroup_members(cgroup: str | os.PathLike[str]) -> tuple[int, ...]:
    """The living processes in this cgroup and those below it; none when it does not exist."""
    found: set[int] = set()
    for folder, _, _ in os.walk(cgroup):
        try:
            with open(os.path.join(folder, "cgroup.procs")) as file:
                found.update(map(int, file.read().split()))
        except OSError:  # removed meanwhile
            pass
    return tuple(sorted(found - {0}))  # 0: it lives in a pid namespace that is not below ours


def empty_cgroup(cgroup: str | os.PathLike[str]) -> bool:
    """Kill all that lives in this cgroup and below it; True when nothing does any more."""
    if not _populated(cgroup):
        return True
    try:
        with open(os.path.join(cgroup, "cgroup.kill"), "w") as file:
            file.write("1")
    except OSError:  # before Linux 5.14: whoever forks meanwhile is found by the next look
        for pid in cgroup_members(cgroup):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
    return not _populated(cgroup)


def remove_cgroup(cgroup: str | os.PathLike[str]) -> None:
    """With those below it, as far as they are empty."""
    for folder, _, _ in os.walk(cgroup, topdown=False):
        try:
            os.rmdir(folder)
        except OSError:
            pass


def _populated(cgroup: str | os.PathLike[str]) -> bool:
    try:
        with open(os.path.join(cgroup, "cgroup.events")) as file:
            return "populated 1" in file.read().splitlines()
    except OSError:
        return False


class Guard:
    """The agent's end. For one thread. A guard that was killed, or no longer reads, is replaced when next told."""

    def __init__(self) -> None:
        self._incarnation = ""
        self._folders: tuple[str, ...] = ()
        self._cgroup = ""
        self._sessions: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._running.pid

    def start(
        self,
        incarnation: str,
        folders: Iterable[str | os.PathLike[str]] = (),
        cgroup: str | os.PathLike[str] | None = None,
    ) -> None:
        """`folders` are the agent's own, of temporary files, `cgroup` that of all its workers: nobody else can remove
        them after a SIGKILL."""
        self._incarnation = incarnation
        self._folders = tuple(os.fspath(folder) for folder in folders)
        self._cgroup = os.fspath(cgroup) if cgroup is not None else ""
        self._launch()

    def watch(self, sid: int) -> None:
        """A worker leads this session now."""
        self._sessions.add(sid)
        self._tell(f"session {sid}\n")

    def forget(self, sid: int) -> None:
        """No process is left in this session."""
        self._sessions.discard(sid)
        self._tell(f"forget {sid}\n")

    def close(self) -> None:
        """Lets the guard do its work and waits for it: nothing of this agent's workers is left afterwards."""
        import subprocess

        guard = self._running
        os.close(self._pipe)
        try:
            guard.wait(SWEEP_S + 1.0)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the guard is started before it is used"
        return self._process

    def _launch(self) -> None:
        import subprocess

        # No preexec_fn, which would fork this process in Python. The write end is close-on-exec: no worker and no
        # later child of the agent can keep the guard from seeing the end.
        read, self._pipe = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", os.path.abspath(__file__)),
                *(self._incarnation, self._cgroup, *self._folders),
            ],
            stdin=read,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        os.close(read)
        os.set_blocking(self._pipe, False)
        for sid in self._sessions:
            os.write(self._pipe, f"session {sid}\n".encode())

    def _tell(self, line: str) -> None:
        try:
            os.write(self._pipe, line.encode())
        except OSError as error:  # broken: it was killed; would block: it has not read for thousands of lines
            import logging

            dead = self._running
            logging.getLogger(__name__).warning(
                "the guard process %d does not listen (%s); starting another", dead.pid, error.strerror
            )
            dead.kill()
            dead.wait()
            os.close(self._pipe)
            self._launch()


def _find(
    incarnation: str,
    generation: int | None,
    sessions: Collection[int],
    spared: Collection[int],
    proc: str | os.PathLike[str],
    adopted: Collection[int] = (),
) -> dict[int, str]:
    """Pid and start time of what belongs; together they name a process for ever."""
    markers = [f"ELASTIC_AGENT_INCARNATION={incarnation}"]
    if generation is not None:
        markers.append(f"ELASTIC_AGENT_GENERATION={generation}")
    wanted = {marker.encode() for marker in markers}
    starts: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    belonging: list[int] = []
    for pid, parent, session, start in _living(proc):
        starts[pid] = start
        children.setdefault(parent, []).append(pid)
        if pid in adopted or session in sessions or wanted <= _environment(pid, proc):
            belonging.append(pid)
    found: dict[int, str] = {}
    while belonging:
        pid = belonging.pop()
        if pid not in found and pid not in spared:
            found[pid] = starts[pid]
            belonging += children.get(pid, ())
    return found


def _living(proc: str | os.PathLike[str]) -> Iterator[tuple[int, int, int, str]]:
    for name in os.listdir(proc):
        if name.isdecimal() and (stat := _stat(int(name), proc)):
            yield int(name), *stat


def _stat(pid: int, proc: str | os.PathLike[str]) -> tuple[int, int, str] | None:
    """Parent, session and start time; None when the process is gone or a zombie."""
    try:
        with open(os.path.join(proc, str(pid), "stat"), "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return int(fields[1]), int(fields[3]), fields[19].decode()


def _environment(pid: int, proc: str | os.PathLike[str]) -> set[bytes]:
    try:
        with open(os.path.join(proc, str(pid), "environ"), "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:  # gone meanwhile, or another user's, and so no worker
        return set()


def _sweep(incarnation: str, sessions: Collection[int], spared: Collection[int], cgroup: str) -> None:
    deadline = time.monotonic() + SWEEP_S
    killed: set[int] = set()
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        found = _find(incarnation, None, sessions, spared, "/proc")
        for pid, start in found.items():
            # Microseconds lie between the look and the kill; a pid comes back only after all others were used.
            stat = _stat(pid, "/proc")
            if stat is not None and stat[2] == start:
                try:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
                except OSError:
                    pass
        killed.update(cgroup_members(cgroup))
        quiet = quiet + 1 if empty_cgroup(cgroup) and not found else 0
        time.sleep(_PAUSE_S)
    if killed:
        unfinished = "" if quiet == 2 else "; some do not die"
        signal.alarm(1)  # whoever should read this may stand still
        pids = " ".join(map(str, sorted(killed)))
        os.write(
            2,
            f"elastic-agent: the agent has ended; killed what its workers left: {pids}{unfinished}\n".encode(),
        )


def _main(incarnation: str, cgroup: str = "", *folders: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    spared = {1, os.getpid(), os.getppid()}
    sessions: set[int] = set()
    begun = b""
    while data := os.read(0, 65536):
        *lines, begun = (begun + data).split(b"\n")
        for line in lines:
            word, _, sid = line.partition(b" ")
            if word == b"session":
                sessions.add(int(sid))
            elif word == b"forget":
                sessions.discard(int(sid))
    _sweep(incarnation, sessions, spared, cgroup)
    remove_cgroup(cgroup)
    if folders:
        import shutil

        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
