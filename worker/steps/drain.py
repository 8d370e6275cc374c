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
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence

from ..errors import CheckpointError
from ..wire.channel import ask
from ..wire.environment import WorkerEnv
from ..wire.messages import STEP_ANSWERS, StepAnswer, StepEnded, StepStatus, Verdict
from .registry import DrainSaver, give_up
from .signals import script_handles_sigterm
from .torch_workarounds import leave

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
