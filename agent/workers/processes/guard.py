"""The guard: a small process that outlives the agent by seconds, to kill what the agent's workers left behind (I9).

A worker dies with the agent by its parent-death signal, but its children do not: data loaders, launchers, daemons.
The guard holds the read end of a pipe whose write end only the agent has. End-of-file means that the agent is gone,
however it went; then the guard kills every process that belongs to the agent's workers until two looks in a row find
none, removes the agent's folders, and exits. It runs as `python -I -S guard.py INCARNATION CGROUP REMAINS JOB NODE
FOLDER...` (CGROUP and REMAINS may be empty) and reads `session SID RANK` and `forget SID` lines.

What does not die is written down in the file REMAINS, for the agents that come after: see `remains`.

A process *belongs* to an incarnation when its environment carries the incarnation's marker, when its session is a
worker's (workers lead their own), or when it descends from such a process. Each rule finds what the others miss: the
first orphans in sessions of their own, the second a scrubbed environment, the third both while the parent lives. What
left all three is found by the living agent, which adopts it (`children`), and after the agent's death only where it has
a cgroup for its workers (`cgroups`): no process leaves that. A zombie is dead. An agent forgets a session as soon as it
is empty: from then on its number may return as another session's.

Invariant: the guard never kills pid 1, the agent or itself, nor a process that it did not just see belong.

This file must start within 20 ms: it imports as little as it can, and `subprocess` only in the agent.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""By this process: a service manager may signal all that it started, while workers in their grace go on."""

SWEEP_S = 5.0
"""The guard gives up on processes that do not die (waiting for a dead disk) after this long."""
REMAINS_AFTER_S = 1.0
"""What lives so long after its SIGKILL is written down: early, as a service manager may kill the guard, too."""
MOST_REMAINS = 100
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


def living_since(pid: int, proc: str | os.PathLike[str] = "/proc") -> str:
    """Its start time, which with the pid names it until the machine starts anew; empty when it has ended."""
    stat = _stat(pid, proc)
    return stat[2] if stat is not None else ""


def boot_id() -> str:
    """Of this life of the machine; empty where the kernel does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """By its inode; 0 where the kernel does not tell. A pid names a process in one namespace only."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


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
    except OSError:  # before Linux 5.14: children forked meanwhile are found by the next look
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
    """The agent's end. For one thread. A guard that was killed is replaced at the next look, one that no longer reads
    when it is next told."""

    def __init__(self) -> None:
        self._incarnation = ""
        self._folders: tuple[str, ...] = ()
        self._cgroup = ""
        self._remains: tuple[str, str, str] = ("", "", "")
        self._sessions: dict[int, int] = {}
        """With the rank of the worker that leads each."""
        self._process: subprocess.Popen[bytes] | None = None
        self._missing = False
        """It has ended, and no other could be started yet."""

    @property
    def pid(self) -> int:
        return self._running.pid

    def start(
        self,
        incarnation: str,
        folders: Iterable[str | os.PathLike[str]] = (),
        cgroup: str | os.PathLike[str] | None = None,
        remains: tuple[str | os.PathLike[str], str, str] = ("", "", ""),
    ) -> None:
        """`folders` are the agent's own, of temporary files, `cgroup` that of all its workers: no other process can
        remove them after a SIGKILL. `remains`: the file for what does not die, and the job and the node that stand
        there."""
        self._incarnation = incarnation
        self._folders = tuple(os.fspath(folder) for folder in folders)
        self._cgroup = os.fspath(cgroup) if cgroup is not None else ""
        file, job, node = remains
        self._remains = os.fspath(file), job, node
        self._launch()

    def watch(self, sid: int, rank: int) -> None:
        """The worker of this rank leads this session now."""
        self._sessions[sid] = rank
        self._send(f"session {sid} {rank}\n")

    def forget(self, sid: int) -> None:
        """No process is left in this session."""
        self._sessions.pop(sid, None)
        self._send(f"forget {sid}\n")

    def check(self) -> None:
        """Whether it still lives."""
        if self._running.poll() is not None:
            self._replace(f"ended with {self._running.returncode}")

    def release(self) -> None:
        """Lets the guard do its work, from whatever thread: this agent ends now, though its threads may not."""
        os.close(self._pipe)

    def close(self) -> None:
        """Lets the guard do its work and waits for it: nothing of this agent's workers is left afterwards."""
        guard = self._running
        self.release()
        _wait_or_leave(guard, SWEEP_S + 1.0)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the guard is started before it is used"
        return self._process

    def _launch(self) -> None:
        """Raises OSError, and then nothing is changed."""
        import subprocess

        # No preexec_fn, which would fork this process in Python. The write end is close-on-exec: no worker and no
        # later child of the agent can keep the guard from seeing the end.
        read, pipe = os.pipe()
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", os.path.abspath(__file__)),
                    *(self._incarnation, self._cgroup, *self._remains, *self._folders),
                ],
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
            for sid, rank in self._sessions.items():
                os.write(pipe, f"session {sid} {rank}\n".encode())
        except OSError:  # it has ended at once
            os.close(pipe)
            _wait_or_leave(process, 0.0)
            raise
        self._process, self._pipe = process, pipe

    def _send(self, line: str) -> None:
        try:
            os.write(self._pipe, line.encode())
        except OSError as error:  # broken: it was killed; would block: it has not read for thousands of lines
            self._replace(f"does not listen ({error.strerror})")

    def _replace(self, why: str) -> None:
        import logging

        dead, log = self._running, logging.getLogger(__name__)
        if not self._missing:
            log.warning("the guard process %d %s; starting another", dead.pid, why)
        _wait_or_leave(dead, 0.0)
        pipe = self._pipe
        try:
            self._launch()
        except OSError as error:
            if not self._missing:
                log.warning("no other guard process can be started now, trying again: %s", error)
            self._missing = True
            return
        self._missing = False
        os.close(pipe)  # only now: else, where no other can be started, the number would be closed twice


def _wait_or_leave(guard: subprocess.Popen[bytes], within_s: float) -> None:
    """It may hang in the kernel, as what it is to kill: then it is left behind."""
    import subprocess

    try:
        guard.wait(within_s)
    except subprocess.TimeoutExpired:
        guard.kill()
        try:
            guard.wait(1.0)
        except subprocess.TimeoutExpired:
            pass


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
    """Parent, session and start time; None when the process is gone or a zombie.

    One whose first thread has ended while another hangs in the kernel looks like a zombie, and is none.
    """
    try:
        with open(os.path.join(proc, str(pid), "stat"), "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
    except OSError:
        return None
    if fields[0] in (b"Z", b"X") and not _threads_live(pid, proc):
        return None
    return int(fields[1]), int(fields[3]), fields[19].decode()


def _threads_live(pid: int, proc: str | os.PathLike[str]) -> bool:
    tasks = os.path.join(proc, str(pid), "task")
    try:
        others = [task for task in os.listdir(tasks) if task != str(pid)]
    except OSError:
        return False
    for task in others:
        try:
            with open(os.path.join(tasks, task, "stat"), "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                    return True
        except OSError:
            pass
    return False


def _environment(pid: int, proc: str | os.PathLike[str]) -> set[bytes]:
    try:
        with open(os.path.join(proc, str(pid), "environ"), "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:  # gone meanwhile, or another user's, and so no worker
        return set()


def _sweep(
    incarnation: str,
    sessions: Mapping[int, int],
    spared: Collection[int],
    cgroup: str,
    remains: tuple[str, str, str],
) -> str:
    """Kills what belongs, and returns what is to be said of that; empty when nothing was left."""
    begun = time.monotonic()
    killed: set[int] = set()
    quiet, written = 0, False
    while quiet < 2 and time.monotonic() < begun + SWEEP_S:
        found = _find(incarnation, None, sessions, spared, "/proc")
        for pid, start in found.items():
            # Microseconds lie between the look and the kill; a pid comes back only after all others were used.
            if living_since(pid) == start:
                try:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
                except OSError:
                    pass
        held = cgroup_members(cgroup)
        killed.update(held)
        quiet = quiet + 1 if empty_cgroup(cgroup) and not found else 0
        if not quiet and not written and time.monotonic() > begun + REMAINS_AFTER_S:
            _write_unkillable(remains, {*found, *held}, sessions)
            written = True
        time.sleep(_PAUSE_S)
    if quiet == 2 and written:
        _remove(remains[0])
    if not killed:
        return ""
    unfinished = "" if quiet == 2 else "; some do not die"
    pids = " ".join(map(str, sorted(killed)))
    return f"elastic-agent: the agent has ended; killed what its workers left: {pids}{unfinished}\n"


def _print(text: str) -> None:
    """Ends this process, if it must, a second after the reader of its stderr has stopped reading."""
    signal.alarm(1)
    try:
        os.write(2, text.encode())
    except OSError:
        pass


def _write_unkillable(
    remains: tuple[str, str, str], pids: Collection[int], sessions: Mapping[int, int]
) -> None:
    """As `remains` reads it."""
    file, job, node = remains
    if not file:
        return
    import json

    processes = []
    for pid in sorted(pids)[:MOST_REMAINS]:
        stat = _stat(pid, "/proc")
        if stat is not None:
            processes.append({"pid": pid, "start": stat[2], "rank": sessions.get(stat[1])})
    where = {"boot": boot_id(), "pid_namespace": pid_namespace()}
    text = json.dumps({"v": 2, "job": job, "node": node, **where, "processes": processes}).encode()
    begun = file + ".begun"
    try:
        fd = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError:
        return
    try:
        whole = os.write(fd, text) == len(text)
    except OSError:
        whole = False
    finally:
        os.close(fd)
    try:
        if whole:
            os.rename(begun, file)
            return
    except OSError:
        pass
    _remove(begun)


def _remove(file: str) -> None:
    try:
        os.unlink(file)
    except OSError:
        pass


def _main(
    incarnation: str, cgroup: str = "", remains: str = "", job: str = "", node: str = "", *folders: str
) -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    spared = {1, os.getpid(), os.getppid()}
    sessions: dict[int, int] = {}
    begun = b""
    while data := os.read(0, 65536):
        *lines, begun = (begun + data).split(b"\n")
        for line in lines:
            word, *numbers = line.split()
            if word == b"session":
                sessions[int(numbers[0])] = int(numbers[1])
            elif word == b"forget":
                sessions.pop(int(numbers[0]), None)
    said = _sweep(incarnation, sessions, spared, cgroup, (remains, job, node))
    remove_cgroup(cgroup)
    if folders:
        import shutil

        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    if said:
        _print(said)  # last: it may end this process


if __name__ == "__main__":
    _main(*sys.argv[1:])
