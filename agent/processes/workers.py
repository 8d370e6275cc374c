"""The worker processes of one generation on this node: start, notice the end, stop, leave nothing behind.

A worker is a *spare* that becomes one (`preloader`), which takes milliseconds, or starts *cold*, through `shim`. Either
way it has its own session and group, dies with the agent and can be stopped with its children. One thread waits on the
workers' pidfds and posts `WorkerExited` within a millisecond of an exit; reaping, signals and all state belong to the
main thread.

A group is *gone* only when every worker is reaped and no process that they started is left, nor any in the cgroup that
the group has where the agent may make one: only then may the next generation start (I1).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..configuration.config import Command
from ..events import Event, WorkerExited
from .guard import Guard, cgroup_members, empty_cgroup, find_processes, remove_cgroup
from .logs import WorkerLogs

log = logging.getLogger(__name__)

SHIM = Path(__file__).with_name("shim.py")
LOCAL_RANK_MACRO = "${local_rank}"

LEFTOVER_PAUSE_S = 0.02
"""Between two looks for processes that a generation has left behind."""


class Process(Protocol):
    """A child of the agent: `subprocess.Popen`, or a spare."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int:
        """Its return code, negative for a signal."""


class Spare(Process, Protocol):
    def become(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Raises OSError when it has ended."""


class Spares(Protocol):
    why_cold: str

    def take(self) -> Spare | None:
        """None where there is none, for the reason `why_cold`."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker as it is to be started."""

    rank: int
    local_rank: int
    environment: Mapping[str, str]
    cpus: tuple[int, ...] = ()
    """Where it may run; empty for wherever the agent may."""
    cold: str = ""
    """Why no spare can be this worker; empty if one can."""


def command_line(command: Command, local_rank: int) -> list[str]:
    """What a worker executes. Arguments may contain torchrun's `${local_rank}`."""
    args = arguments(command, local_rank)
    # Unbuffered, as under torchrun: a killed worker's last words are not lost in a buffer.
    python = [job_python(os.environ), "-u"]
    if command.kind == "script":
        return [*python, command.target, *args]
    if command.kind == "module":
        return [*python, "-m", command.target, *args]
    return [command.target, *args]


def arguments(command: Command, local_rank: int) -> list[str]:
    return [arg.replace(LOCAL_RANK_MACRO, str(local_rank)) for arg in command.args]


def first_on_path(command: Command, cwd: str) -> str:
    """The folder where Python looks first for what a worker imports."""
    return cwd if command.kind == "module" else os.path.dirname(os.path.realpath(command.target))


def job_python(environ: Mapping[str, str]) -> str:
    """The interpreter of the workers; torchrun's variable may name another than ours."""
    return environ.get("PYTHON_EXEC", sys.executable)


def tied(command: Sequence[str], cpus: Sequence[int] = (), cgroup: Path | None = None) -> list[str]:
    """The same command, through the shim: it dies with this process, and with the thread that starts it.

    It runs on these CPUs only, if any are given, and in this cgroup.
    """
    shim = [sys.executable, "-I", "-S", str(SHIM), str(os.getpid())]
    return [*shim, *_place(cpus, cgroup), "--", *command]


def _place(cpus: Sequence[int], cgroup: Path | None) -> tuple[str, str]:
    """As `shim` is told."""
    return ",".join(map(str, cpus)), str(cgroup) if cgroup is not None else ""


class WorkerGroup:
    """See the module's docstring. All methods are for the main thread."""

    def __init__(
        self,
        generation: int,
        incarnation: str,
        guard: Guard,
        logs: WorkerLogs,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        cgroup: Path | None = None,
        strangers: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """`incarnation` is the agent's, by which every process of its workers can be told from others. `cgroup` is
        made by `start`, for this group alone. `strangers` tells whom the agent has adopted of its workers' orphans."""
        self.generation = generation
        self.returncodes: dict[int, int] = {}
        self.ranks: dict[int, int] = {}
        self.stopping = False
        self.cold: dict[int, str] = {}
        """Why, of those that did not start from a spare."""
        self.killed = False
        """Those that were left after the grace were sent SIGKILL."""
        self._incarnation = incarnation
        self._guard = guard
        self._logs = logs
        self._post = post
        self._clock = clock
        self._cgroup = cgroup
        self._strangers = strangers
        self._processes: dict[int, Process] = {}
        self._asked = False
        self._kill_at: float | None = None
        self._behind: set[int] = set()

    def start(self, command: Command, specs: Sequence[WorkerSpec], spares: Spares) -> None:
        """Raises OSError when a process cannot be made; those started before it have ended then."""
        try:
            if self._cgroup is not None:
                self._cgroup.mkdir()
            for spec in specs:
                self._start_one(command, spec, spares)
            pidfds = {os.pidfd_open(process.pid): local for local, process in self._processes.items()}
        except OSError:
            # No thread would ever hear of their end. They have hardly begun: nothing is lost by not asking them first.
            for process in self._unreaped():
                self._signal(process, signal.SIGKILL, group=True)
            for local_rank in self._processes:
                self.reap(local_rank)
            raise
        threading.Thread(target=self._await_exits, args=(pidfds,), name="worker-exits", daemon=True).start()

    def _start_one(self, command: Command, spec: WorkerSpec, spares: Spares) -> None:
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        try:
            process = self._start_warm(command, spec, spares, out_end, err_end)
            if process is None:
                process = self._start_cold(command, spec, out_end, err_end)
        except OSError:
            os.close(out)
            os.close(err)
            raise
        finally:
            os.close(out_end)
            os.close(err_end)
        self._processes[spec.local_rank] = process
        self.ranks[spec.local_rank] = spec.rank
        self._guard.watch(process.pid)
        self._logs.attach(self.generation, spec.rank, out, err)

    def _start_warm(
        self, command: Command, spec: WorkerSpec, spares: Spares, out: int, err: int
    ) -> Process | None:
        """None when no spare can be this worker."""
        if spec.cold:
            self.cold[spec.local_rank] = spec.cold
            return None
        cpus, cgroup = _place(spec.cpus, self._cgroup)
        start = {
            "kind": command.kind,
            "target": command.target,
            "args": arguments(command, spec.local_rank),
            "environment": dict(spec.environment),
            "cwd": os.getcwd(),
        }
        cold = tied(command_line(command, spec.local_rank), spec.cpus, self._cgroup)
        message = {"start": start, "cpus": cpus, "cgroup": cgroup, "cold": cold}
        while spare := spares.take():
            try:
                spare.become(message, [out, err])
            except OSError:  # it has just ended; as an orphan, it is buried
                continue
            return spare
        self.cold[spec.local_rank] = spares.why_cold
        return None

    def _start_cold(self, command: Command, spec: WorkerSpec, out: int, err: int) -> Process:
        return subprocess.Popen(
            tied(command_line(command, spec.local_rank), spec.cpus, self._cgroup),
            env=dict(spec.environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )

    def _await_exits(self, pidfds: dict[int, int]) -> None:
        poll = select.poll()
        for pidfd in pidfds:
            poll.register(pidfd, select.POLLIN)
        while pidfds:
            for pidfd, _ in poll.poll():
                at = self._clock()
                poll.unregister(pidfd)
                os.close(pidfd)
                self._post(WorkerExited(self.generation, pidfds.pop(pidfd), at))

    def reap(self, local_rank: int) -> int:
        """The return code of a worker that has exited: negative for a signal."""
        returncode = self._processes[local_rank].wait()
        self.returncodes[local_rank] = returncode
        return returncode

    @property
    def pids(self) -> Collection[int]:
        """Of all workers, the ended ones too."""
        return [process.pid for process in self._processes.values()]

    @property
    def running(self) -> int:
        return len(self._processes) - len(self.returncodes)

    @property
    def succeeded(self) -> bool:
        return bool(self.returncodes) and not self.running and not any(self.returncodes.values())

    def expect_end(self) -> None:
        """The generation is over, and whoever ends from now on has not failed; nobody is asked to, yet."""
        self.stopping = True

    def stop(self, grace_s: float, *, gently: bool, asking: signal.Signals = signal.SIGTERM) -> None:
        """Ask the workers to end, and kill their groups after `grace_s`. Again with less grace: sooner.

        A gentle stop signals only the workers themselves, not their children: a data loader that dies of the
        same SIGTERM would fail the very checkpoint that the grace is for.
        """
        kill_at = self._clock() + grace_s
        if self._kill_at is None or kill_at < self._kill_at:
            self._kill_at = kill_at
        self.stopping = True
        if not self._asked:
            self._asked = True
            for process in self._unreaped():
                self._signal(process, asking, group=not gently)

    def gone(self) -> bool:
        """Drive the stop on, and say whether nothing of this generation is left on this node."""
        if self.running:
            if self._kill_at is not None and self._clock() >= self._kill_at:
                self.killed = True
                for process in self._unreaped():
                    self._signal(process, signal.SIGKILL, group=True)
                self._kill_at = self._clock() + 1.0
            return False
        sessions = self.pids
        leftovers = find_processes(
            self._incarnation, sessions, generation=self.generation, adopted=self._strangers()
        )
        for pid in leftovers:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        held = cgroup_members(self._cgroup) if self._cgroup is not None else ()
        if (behind := {*leftovers, *held}) and behind != self._behind:
            log.info("generation %d left %d processes behind; killing them", self.generation, len(behind))
        self._behind = behind
        empty = self._cgroup is None or empty_cgroup(self._cgroup)
        if leftovers or not empty:
            return False
        if self._cgroup is not None:
            remove_cgroup(self._cgroup)
        for session in sessions:
            self._guard.forget(session)
        return True

    def wake_at(self) -> float | None:
        """When `gone` next has something to do without an exit."""
        if self.running:
            return self._kill_at
        return self._clock() + LEFTOVER_PAUSE_S

    def _unreaped(self) -> list[Process]:
        return [process for local, process in self._processes.items() if local not in self.returncodes]

    def _signal(self, process: Process, number: signal.Signals, *, group: bool) -> None:
        """Safe: an unreaped process keeps its pid, and its group's id with it."""
        if group:
            try:
                os.killpg(process.pid, number)
                return
            except ProcessLookupError:
                pass  # a spare that has not yet heard what it is to be, and leads no group
        os.kill(process.pid, number)
