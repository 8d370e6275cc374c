"""The worker processes of one generation on this node: start, notice the end, stop, leave nothing behind.

A worker is a *spare* that becomes one (`spares`), which takes milliseconds, or starts *cold*, through `shim`. Either
way it has its own session and group, dies with the agent and can be stopped with its children. The io thread waits on
the workers' pidfds and posts that within a millisecond of an exit; reaping, signals and all state belong to the main
thread.

A group is *gone* only when every worker is reaped and no process that they started is left: only then may the next
generation start (I1).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ....rendezvous.text import counted
from ...common.events import Event, IoThread
from ...configuration.config import Command
from ...output.worker_logs import OutputRoute, WorkerLogs
from .guard import Guard
from .helper import cpus_word, end, job_python, tied
from .proc import find_processes, has_ended, kill
from .spare_wire import BecomeWorker
from .spares import Spares

if TYPE_CHECKING:
    from .proc import Child

log = logging.getLogger(__name__)

LOCAL_RANK_MACRO = "${local_rank}"

STANDARD_INPUT = 0
"""The agent's, which reads nothing from it: all its workers share it, as they do under torchrun."""

LEFTOVER_PAUSE_S = 0.02
"""Between two looks for processes that a generation has left behind."""

LEFTOVER_LONGEST_PAUSE_S = 1.0
"""Between two looks for some that do not die: a look reads all of /proc."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker as it is to be started."""

    rank: int
    local_rank: int
    environment: Mapping[str, str]
    cpus: tuple[int, ...] = ()
    """Where it may run; empty for wherever the agent may."""
    routes: tuple[OutputRoute, OutputRoute] = (OutputRoute(), OutputRoute())
    """Of stdout and stderr."""


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


class WorkerGroup:
    """All methods are for the main thread."""

    def __init__(
        self,
        generation: int,
        guard: Guard,
        logs: WorkerLogs,
        io: IoThread,
        exited: Callable[[int, int, float], object],
        post: Callable[[Event], None],
        clock: Callable[[], float],
        unknown_children: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """`unknown_children()` are orphans of its workers, adopted by the agent.

        `exited` gets generation, local rank and instant, in the main loop, when a process has ended and can be reaped.
        """
        self.generation = generation
        self.returncodes: dict[int, int] = {}
        self.ranks: dict[int, int] = {}
        self.stopping = False
        self.cold: dict[int, str] = {}
        """Why, of those that did not start from a spare."""
        self.killed = False
        """Those that were left after the grace, or after a start that failed, were sent SIGKILL."""
        self._guard = guard
        self._logs = logs
        self._io = io
        self._on_exit = exited
        self._post = post
        self._clock = clock
        self._unknown_children = unknown_children
        self._processes: dict[int, Child] = {}
        self._asked = False
        self._kill_at: float | None = None
        self._kills_since: float | None = None
        """When something here was first sent SIGKILL."""
        self._behind: set[int] = set()

    def start(self, command: Command, specs: Sequence[WorkerSpec], spares: Spares) -> None:
        """Raises OSError when a process cannot be made, or watched. Those started before it are killed then."""
        try:
            for spec in specs:
                self._start_one(command, spec, spares)
        except OSError:
            self.stopping = True
            self._kill()
            raise

    def _start_one(self, command: Command, spec: WorkerSpec, spares: Spares) -> None:
        cold = tied(command_line(command, spec.local_rank), spec.cpus)
        process: Child | None = None
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            out, out_end, err, err_end = pipes
            if command.kind != "binary":
                start = BecomeWorker(
                    "module" if command.kind == "module" else "script",
                    command.target,
                    tuple(arguments(command, spec.local_rank)),
                    dict(spec.environment),
                    os.getcwd(),
                    cpus_word(spec.cpus),
                    tuple(cold),
                )
                process = spares.hand_out(start, (STANDARD_INPUT, out_end, err_end))
            why_cold = ""
            if process is None:
                why_cold = spares.why_cold
                process = subprocess.Popen(
                    cold,
                    env=dict(spec.environment),
                    stdin=STANDARD_INPUT,
                    stdout=out_end,
                    stderr=err_end,
                    start_new_session=True,
                )
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            if process is not None:
                end(process)
            for descriptor in pipes:
                os.close(descriptor)
            raise
        os.close(out_end)
        os.close(err_end)
        self._io.watch(pidfd, partial(self._exited, pidfd, spec.local_rank))
        self._processes[spec.local_rank] = process
        self.ranks[spec.local_rank] = spec.rank
        if why_cold:
            self.cold[spec.local_rank] = why_cold
        self._logs.attach(self.generation, spec.rank, (out, err), spec.routes)
        self._guard.watch(process.pid)

    def _exited(self, pidfd: int, local_rank: int) -> None:
        """In the io thread."""
        at = self._clock()
        self._io.forget(pidfd)
        os.close(pidfd)
        self._post(partial(self._on_exit, self.generation, local_rank, at))

    def reap(self, local_rank: int) -> int:
        """The return code of a worker that has exited: negative for a signal."""
        returncode = self._processes[local_rank].wait()
        self.returncodes[local_rank] = returncode
        return returncode

    @property
    def pids(self) -> Collection[int]:
        """Of all workers, the ended ones too."""
        return [process.pid for process in self._processes.values()]

    def pid(self, local_rank: int) -> int:
        """Also the number of its session."""
        return self._processes[local_rank].pid

    @property
    def running(self) -> int:
        return len(self._processes) - len(self.returncodes)

    @property
    def succeeded(self) -> bool:
        return bool(self.returncodes) and not self.running and not any(self.returncodes.values())

    def expect_end(self) -> None:
        """The generation is over, and a worker that ends from now on has not failed; none is asked to, yet."""
        self.stopping = True

    def stop(
        self,
        grace_s: float,
        *,
        gently: bool,
        asking: signal.Signals = signal.SIGTERM,
        at_once: Collection[int] = (),
    ) -> None:
        """Ask the workers to end, and kill their groups after `grace_s`. Again with less grace: sooner.

        Those `at_once` are local ranks that get SIGKILL in place of a signal that they leave to the agent.

        A gentle stop signals only the workers themselves, not their children: a data loader that dies of the
        same SIGTERM would fail the very checkpoint that the grace is for.
        """
        kill_at = self._clock() + grace_s
        if self._kill_at is None or kill_at < self._kill_at:
            self._kill_at = kill_at
        self.stopping = True
        if not self._asked:
            self._asked = True
            unasked = {self._processes[local_rank].pid for local_rank in at_once}
            for process in self._unreaped():
                number = signal.SIGKILL if process.pid in unasked else asking
                self._signal(process, number, group=not gently)

    def gone(self) -> bool:
        """Drive the stop on. Whether nothing of this generation is left on this node."""
        if self.running:
            if self._kill_at is not None and self._clock() >= self._kill_at:
                self._kill()
            return False
        sessions = self.pids
        leftovers = find_processes(sessions, others=self._unknown_children())
        for pid in leftovers:
            kill(pid)
        if leftovers and set(leftovers) != self._behind:
            log.info(
                "generation %d left %s behind; killing them",
                self.generation,
                counted(len(leftovers), "process"),
            )
        self._behind = set(leftovers)
        # Asked again: a parent that ended before /proc was listed has left a child that was not yet ours before.
        if leftovers or self._unknown_children():
            self._count_from_now()
            return False
        for session in sessions:
            self._guard.forget(session)
        return True

    @property
    def kill_at(self) -> float | None:
        """When those that still run are killed; None when that is not known, or there are none."""
        return self._kill_at if self.running else None

    def wake_at(self) -> float | None:
        """When `gone` next has something to do without an exit."""
        if self.running:
            return self._kill_at
        kill_elapsed_s = self.kill_elapsed_s()
        return self._clock() + min(max(LEFTOVER_PAUSE_S, kill_elapsed_s / 10), LEFTOVER_LONGEST_PAUSE_S)

    def kill_elapsed_s(self) -> float:
        """How long ago the first SIGKILL was sent here; 0 when none was."""
        return self._clock() - self._kills_since if self._kills_since is not None else 0.0

    def unkillable(self) -> Collection[int]:
        """What is left after SIGKILL and has not ended, as far as it is known."""
        return {*(process.pid for process in self._unreaped() if not has_ended(process.pid)), *self._behind}

    def _kill(self) -> None:
        """All workers that are left, and again after a second."""
        self.killed = True
        self._count_from_now()
        for process in self._unreaped():
            self._signal(process, signal.SIGKILL, group=True)
        self._kill_at = self._clock() + 1.0

    def _count_from_now(self) -> None:
        if self._kills_since is None:
            self._kills_since = self._clock()

    def _unreaped(self) -> list[Child]:
        return [process for local, process in self._processes.items() if local not in self.returncodes]

    def _signal(self, process: Child, number: signal.Signals, *, group: bool) -> None:
        """Safe: an unreaped process keeps its pid, and its group's id with it."""
        if group:
            try:
                os.killpg(process.pid, number)
                return
            except ProcessLookupError:
                pass  # a spare that does not know yet what it is to be, and leads no group
        os.kill(process.pid, number)
