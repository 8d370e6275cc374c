"""A planned change, seen from a worker: it ends after the step that all have agreed on, and its state is kept.

While a change waits (the flag in the worker's page is up), `progress.step` asks the agent at the end of each step
whether that was the last one. So may `progress.poll`, anywhere between two steps: an evaluation loop calls it now and
then, else the change waits until the evaluation is over. When it was the last one, every Checkpointer that was loaded
keeps its state, and `Drained` is raised. Nothing has to catch it: it ends the process as `sys.exit` would, with a code
that the agent knows. Where there is no Checkpointer the agent does not learn whether the state is kept: the script has
to do that, and an exception that ends it is a failure.

An agent that gives no answer is not waited for: this worker goes on, and asks again after the next step. No torch here.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ..errors import CheckpointError
from ..wire.channel import ask
from ..wire.environment import WorkerEnv
from ..wire.messages import STEP_ANSWERS, StepAnswer, StepEnded, StepStatus, Verdict
from ..wire.shared_progress import clock_ns
from .torch_workarounds import leave, script_handles_sigterm

logger = logging.getLogger(__name__)

DRAINED = 83
"""The exit code of a worker that has ended for a planned change."""
FAILED = 1
"""That of one that an exception has ended after that: its own save has failed, or what else it did."""

ANSWER_S = 5.0
"""How long the agent may take, and with it the store that it asks. The others wait for this rank meanwhile."""

THREADS_S = 2.0
"""How long the end of a worker waits for threads of the script. Its state is kept, and the other nodes wait for it."""


class Drained(SystemExit):
    """This process has done its last step, and each Checkpointer has kept its state: the next generation goes on there.

    A SystemExit, so that it passes `except Exception`. A script that catches it may clean up, and must end soon.
    """

    def __init__(self, step: int) -> None:
        super().__init__(DRAINED)
        self.step = step


_left_to_script = False
"""The script's own handler of SIGTERM was called: it ends the process when it has saved."""


def end_of_step(step: int, savers: Sequence[DrainSaver]) -> None:
    """A change waits, and `step` has just been finished. Raises Drained if that was the last one."""
    _ask(step, savers, StepStatus.FINISHED)


def between_steps(step: int, savers: Sequence[DrainSaver]) -> None:
    """A change waits, and the step after `step` has not been begun. Raises Drained if `step` was the last one.

    Other ranks may be in a collective, and never come here. Where the state is kept by all ranks together, which a
    script without a Checkpointer may do, the change waits for the next step.
    """
    alone = bool(savers) and all(saver.saves_alone for saver in savers)
    _ask(step, savers, StepStatus.PAUSING if alone else StepStatus.FINISHED)


def _ask(step: int, savers: Sequence[DrainSaver], status: StepStatus) -> None:
    if _left_to_script:
        return
    try:
        reporter = _StepReporter(os.environ)
        answer = reporter.report(step, status)
    except (KeyError, ValueError, OSError) as error:
        logger.warning(
            "the agent gave no answer whether step %d is the last one, going on: reason=%s", step, error
        )
        return
    if answer.verdict is not Verdict.GO_ON:
        _end(step, savers, reporter, alone=answer.verdict is Verdict.END_ALONE, leaves=answer.leaves)


def _end(
    step: int, savers: Sequence[DrainSaver], reporter: _StepReporter, *, alone: bool, leaves: bool
) -> None:
    """Keep the state and raise Drained; or, where only the script can keep it, let the script do as for a SIGTERM."""
    if not savers and script_handles_sigterm():
        global _left_to_script
        _left_to_script = True
        logger.info("step %d is the last one: calling the script's handler of SIGTERM", step)
        signal.raise_signal(signal.SIGTERM)
        return
    if savers and _keep(step, savers, alone=alone, leaves=leaves):
        try:
            reporter.report(step, StepStatus.KEPT)
        except (ValueError, OSError) as error:
            logger.warning("the agent does not know that step %d is kept: reason=%s", step, error)
    _leave_at_exit()
    raise Drained(step)


def _keep(step: int, savers: Sequence[DrainSaver], *, alone: bool, leaves: bool) -> bool:
    """Whether every Checkpointer that takes part keeps its state."""
    if not alone:
        try:
            answers = [
                saver.save_last_step(step, leaves=leaves) for saver in savers
            ]  # the other ranks wait in each
        except CheckpointError:
            give_up(step, savers)
            raise
        if not all(answers):
            give_up(step, savers)
            return False
        for saver in savers:
            saver.order_write(step)
        return True
    kept = all(saver.save_last_step_alone(step) for saver in savers)
    if not kept:
        logger.warning("step %d is not kept: there is no room for all that belongs to it", step)
        give_up(step, savers)
    return kept


def _leave_at_exit() -> None:
    """From now on this process ends without the interpreter's own end, and does not wait for the script's threads.

    A function of atexit that hangs is ended by the agent's SIGKILL alone.
    """
    end = os.getpid(), _uncaught()
    # Before it calls atexit's functions Python waits for all threads that are no daemons, without a limit. What is
    # registered there is called before that; there is no public way to it.
    try:
        threading._register_atexit(_wait_no_longer, *end)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        atexit.register(_leave, *end)


def _wait_no_longer(pid: int, before: BaseException | None) -> None:
    """Called in the main thread, which goes on to wait for the others, and can be interrupted there by a signal."""
    if os.getpid() != pid:
        return
    atexit.register(
        _leave, pid, before
    )  # the last is called first, and calls all others: each is called once

    def leave_now(_number: int, _frame: object) -> None:
        main = threading.main_thread()
        names = [thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon]
        logger.warning(
            "ending without these threads of the script, which still run after %g s and are no daemons: %s; "
            "all other workers wait for this process: end them, or make them daemons",
            THREADS_S,
            ", ".join(names),
        )
        _leave(pid, before)

    signal.signal(signal.SIGALRM, leave_now)
    signal.setitimer(signal.ITIMER_REAL, THREADS_S)


def _leave(pid: int, before: BaseException | None) -> None:
    if os.getpid() != pid:
        return
    signal.setitimer(
        signal.ITIMER_REAL, 0
    )  # the threads have ended: what is registered takes the time that it needs
    leave(DRAINED if _uncaught() is before else FAILED, _leave)


def _uncaught() -> BaseException | None:
    """The exception that has ended the script, if one has; an interactive console may have shown others before."""
    return getattr(sys, "last_value", None)


class _StepReporter:
    """Says one thing after the other. Raises KeyError and ValueError where the variables are not an agent's."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._env = WorkerEnv.of(environ)
        self._rank = int(environ["RANK"])

    def report(self, step: int, status: StepStatus) -> StepAnswer:
        """The agent's answer. Raises OSError and Invalid."""
        ended = StepEnded(self._env.generation, self._rank, self._env.local_rank, step, status)
        return ask(self._env.socket, ended, STEP_ANSWERS, ANSWER_S)


# ---------------------------------------------------------------- the Checkpointers of this process
#
# A script may have several, and the last step of a generation is kept in the memory of each. Where one of them finds no
# room, the others give that step up, too. The copy that was made of it may have taken the place of a newer one than
# what is left elsewhere: so all go back to the newest copy that all have, or to the disk where there is none.

NO_COPY = (-1, -1)
"""Older than every copy."""


class DrainSaver(Protocol):
    """What a Checkpointer that takes part in training can do for a planned change."""

    @property
    def saves_alone(self) -> bool:
        """Whether it could do so without the other ranks."""

    def save_last_step(self, step: int, *, leaves: bool) -> bool:
        """Make the state after this step survive this process, and this node where that `leaves`. Every rank calls it,
        and waits there for the others.

        False: it does not, which the log has."""

    def order_write(self, step: int) -> None:
        """All Checkpointers have kept this step: let the disk writer have what is only in memory."""

    def save_last_step_alone(self, step: int) -> bool:
        """The same without the others; False when this node has no room for it."""

    def give_up(self, step: int) -> None:
        """Drop the copy of this generation's `step`."""

    def versions(self, step: int) -> frozenset[tuple[int, int]] | None:
        """Generation and step of each copy. None: it has no part in this step."""

    def go_back(self, step: int, version: tuple[int, int]) -> None:
        """Drop all copies newer than that one, if it has a part in this step."""


class Checkpointers:
    """Those of a process that take part in training, in the order in which every rank has let them."""

    def __init__(self) -> None:
        self._owners: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
        """By the real path of its directory, each Checkpointer that writes there, as long as the script has it."""
        self._by_directory: dict[str, tuple[DrainSaver, int]] = {}
        """With the instant since when it takes part."""
        self._durable: set[str] = set()
        """The real paths where this process has seen a save become durable."""

    def claim(self, directory: str, owner: object) -> bool:
        """Until it is released, or collected. Raises CheckpointError where another one has the directory.

        True: what an earlier one has saved there in this process is durable."""
        path = os.path.realpath(directory)
        if self._owners.setdefault(path, owner) is not owner:
            gc.collect()  # the script may have dropped it within a reference cycle
            if self._owners.setdefault(path, owner) is not owner:
                raise CheckpointError(
                    f"this process has a Checkpointer of {directory} already, and each would load what the other one "
                    "has saved: give each a directory, or put both parts into one Checkpointer, or close() the first"
                )
        return path in self._durable

    def saved(self, directory: str) -> None:
        """Every rank: what was saved there is durable."""
        self._durable.add(os.path.realpath(directory))

    def release(self, directory: str, owner: object) -> None:
        """Another Checkpointer may have its directory."""
        path = os.path.realpath(directory)
        if self._owners.get(path) is owner:
            del self._owners[path]

    def add(self, directory: str, saver: DrainSaver) -> None:
        """Its state is kept in planned changes from now on."""
        self._by_directory[directory] = saver, clock_ns()

    def remove(self, saver: DrainSaver) -> None:
        for directory, (one, _) in list(self._by_directory.items()):
            if one is saver:
                del self._by_directory[directory]

    def all(self, since_ns: int = 0) -> tuple[DrainSaver, ...]:
        """Those that take part since then. All are kept at one step, or none is."""
        return tuple(saver for saver, since in list(self._by_directory.values()) if since >= since_ns)

    def begin_another_training(self, since_ns: int) -> list[str]:
        """Only those take part in it that were loaded since then; the directories of the others."""
        over = [directory for directory, (_, since) in self._by_directory.items() if since < since_ns]
        for directory in over:
            del self._by_directory[directory]
        return over

    def clear(self) -> None:
        """A child process has none."""
        self._owners.clear()
        self._durable.clear()
        self._by_directory.clear()


def give_up(step: int, owners: Iterable[DrainSaver]) -> None:
    """Not all of these have kept `step`."""
    owners = tuple(owners)
    for owner in owners:
        owner.give_up(step)
    versions = [versions for owner in owners if (versions := owner.versions(step)) is not None]
    newest = max(frozenset[tuple[int, int]]().union(*versions).intersection(*versions), default=NO_COPY)
    for owner in owners:
        owner.go_back(step, newest)
