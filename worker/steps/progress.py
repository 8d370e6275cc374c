"""What this process reports to its node's agent as it trains, and what happens between two steps.

A step goes into the page that both share (`shared_progress`): two words are written and two are read, no system call.
Saves and loads are rare, and their reports longer: they are sent to the agent's socket, if that costs no waiting, and
are lost without a word otherwise. So may a lent lock be, but its owner knows (`lend` returns False), and lends it
again at its next save or load.

Nothing here may ever disturb training: without the variables (torchrun, plain python) nothing is sent. Only one
process speaks for a worker: data loaders and other children inherit the variables and stay silent.

No torch here: a script that only calls `step` need not have it.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import index

from ...codec import Invalid
from ..wire.channel import Reporter
from ..wire.environment import WorkerEnv, own_environment
from ..wire.messages import (
    MOST_DIRECTORY_CHARS,
    LentLock,
    LoadReport,
    LoadResult,
    SaveReport,
    SaveResult,
    Tier,
)
from ..wire.shared_progress import (
    ALL_SIGNALLED,
    ATTACHED,
    CHOSEN_STEP,
    FIRST_AT,
    FIRST_STEP,
    KEPT_TIMES,
    LEAVES_SIGTERM,
    LOAD_AT,
    LOADED_AT,
    LOADED_STEP,
    NO_STEP,
    OWN_COUNT,
    OWN_TIMES,
    PENDING,
    POLLED_AT,
    SAVING,
    STEP,
    STEPPED_AT,
    SharedProgress,
    SharedProgressError,
    clock_ns,
    private_words,
    register_stacks,
)
from .drain import Checkpointers, DrainSaver, between_steps, end_of_step
from .torch_workarounds import (
    Waits,
    leave_nothing_to_agent,
    leave_sigterm_to_agent,
    leave_warnings_to_agent,
    leave_when_failed,
    watch_waits,
)

logger = logging.getLogger(__name__)

_now_ns = clock_ns


class Stage(enum.IntEnum):
    """The order of the listeners of one step."""

    POSITION = 1
    """Where in the data this step has ended is put down."""
    STATE = 2
    """The whole state, with that position, is copied."""


@dataclass(frozen=True, slots=True)
class _Listener:
    stage: Stage
    every: int
    callback: Callable[[int], None]


def _ask_agent(step: int) -> None:
    end_of_step(step, checkpointers.all())


on_pending: Callable[[int], None] = _ask_agent
"""Called at the end of a step while a planned change waits for this worker; may raise, which ends the worker."""

checkpointers = Checkpointers()
"""This process's."""

_listeners: tuple[_Listener, ...] = ()
_words: memoryview | None = None
"""Of the page, or private ones. None: this process has not asked for its page yet."""
_waits: Waits | None = None
"""What this process waits for other ranks; None: the script has not asked to measure that."""
_waited_ns = -1
"""Of these, until the newest step; -1: no step has ended since the measure began."""
_refused = False
"""A step was no step, and that was said."""


def step(step: int) -> None:
    """Tell the agent that optimizer step number `step` has just finished.

    Call it once per optimizer step, on every rank. It costs a microsecond, waits for no other process, and warns once
    of a step that is no whole number, in place of raising. A planned change (a node joins or leaves) takes place here,
    between two steps.

        for step in range(start, total_steps):
            train_one(batch)
            elastic_agent.worker.step(step + 1)
    """
    words = _words
    if words is None:
        words = _attach()
    now = _now_ns()
    before, before_at = words[STEP], words[STEPPED_AT]
    try:
        number = index(step)
        if number < 0:
            raise ValueError("steps count from 0")
        if not words[FIRST_AT]:
            words[FIRST_STEP] = number
            words[FIRST_AT] = now
        if _waits is not None:
            _note_own_time(words, now - before_at)
        words[STEPPED_AT] = now
        words[STEP] = number
    except (TypeError, ValueError) as error:
        _refuse(step, error)
        return
    if number < before:
        _begin_another_training(number, before, before_at)
    for listener in _listeners:
        if number % listener.every == 0:
            listener.callback(number)
    if words[PENDING]:
        on_pending(number)


def _begin_another_training(number: int, before: int, before_at: int) -> None:
    for directory in checkpointers.begin_another_training(before_at):
        logger.warning(
            "step %d comes after step %d, so another training has begun: the Checkpointer of %s keeps no step of it, "
            "unless it is loaded or saved again",
            number,
            before,
            directory,
        )


def newest_step() -> int:
    """The newest finished one, or NO_STEP."""
    return _own_words()[STEP]


def newest_step_at() -> int:
    """On the clock of all processes, in ns; 0: there was no step yet."""
    return _own_words()[STEPPED_AT]


def loaded_since_newest_step() -> tuple[DrainSaver, ...]:
    """The Checkpointers with whose states training is about to begin, or to go on."""
    return checkpointers.all(newest_step_at())


def measure_own_time() -> None:
    """From now on measure how long this rank itself is at work in each step, so that a slower rank is named.

    Call it on every rank, on the thread that trains, when the process group is there. It replaces three functions of
    torch by ones that take the time (see `torch_workarounds`), so frames of this library stand in the traceback of a
    collective that fails. With NCCL the device waits, not the process: there it shows nothing.
    """
    global _waits, _waited_ns
    _own_words()
    # Without torch.distributed all of a step is this rank's own.
    _waits = _waits or watch_waits() or Waits(threading.get_ident())
    _waited_ns = -1


def _note_own_time(words: memoryview, step_ns: int) -> None:
    """Of the step that has just ended; nothing of the one in which the measure began."""
    global _waited_ns
    assert _waits is not None
    before, _waited_ns = _waited_ns, _waits.total_ns
    if before >= 0:
        count = words[OWN_COUNT]
        words[OWN_TIMES + count % KEPT_TIMES] = max(step_ns - (_waited_ns - before), 0)
        words[OWN_COUNT] = count + 1


def on_step(
    callback: Callable[[int], None], *, every: int = 1, stage: Stage = Stage.STATE
) -> Callable[[], None]:
    """Let `step(n)` call `callback(n)` when n is a multiple of `every`; returns what ends that.

    Those of an earlier stage come first, and those of one stage in the order of their registration. What a callback
    raises leaves `step`.
    """
    if every < 1:
        raise ValueError(f"every is {every}, expected at least 1")
    listener = _Listener(stage, every, callback)

    def end() -> None:
        global _listeners
        _listeners = tuple(each for each in _listeners if each is not listener)

    global _listeners
    _listeners = tuple(sorted((*_listeners, listener), key=lambda each: each.stage))
    return end


def poll() -> None:
    """For whatever takes long between two steps, as an evaluation does: end here if a planned change waits for it.

    Call it at places where the process could end, on every rank that is at work there; not between the beginning of a
    step and its `step()`. It costs less than a microsecond when no change waits. Raises Drained.
    """
    if _words is not None:
        _words[POLLED_AT] = _now_ns()
    step = awaited_between_steps()
    if step is not None:
        between_steps(step, checkpointers.all())


def awaited_between_steps() -> int | None:
    """The newest finished step, if a planned change waits for this worker; else None."""
    words = _words
    if words is None or not words[PENDING] or words[STEP] == NO_STEP:
        return None
    return words[STEP]


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """The agent knows that this worker saves, which may take longer than any step."""
    words = _words
    if words is None:
        yield
        return
    words[SAVING] = 1
    try:
        yield
    finally:
        words[SAVING] = 0


def loading() -> None:
    """Tell the agent that a load has begun."""
    words = _own_words()
    if not words[LOAD_AT]:
        words[LOAD_AT] = _now_ns()


def load_chosen(step: int) -> None:
    """Tell the agent which step's state is about to be loaded: that may end this process."""
    _own_words()[CHOSEN_STEP] = step


def load_refused() -> None:
    """Tell the agent that nothing was loaded, for a reason that is not the state: another one fares no better."""
    _own_words()[CHOSEN_STEP] = NO_STEP


def checkpoint_load(step: int, result: LoadResult, duration_s: float, tier: Tier = "local") -> None:
    """Tell the agent how a load, or one file of it, ended."""
    if result in ("ok", "none"):
        words = _own_words()
        words[LOADED_STEP] = step
        words[LOADED_AT] = _now_ns()
    _reporting().send(lambda g, r: LoadReport(g, r, step, result, duration_s, tier))


class Silent:
    """In the place of this module for a load from which training does not go on: the agent gets no reports of it."""

    def loading(self) -> None: ...

    def load_chosen(self, step: int) -> None: ...

    def load_refused(self) -> None: ...

    def checkpoint_load(
        self, step: int, result: LoadResult, duration_s: float, tier: Tier = "local"
    ) -> None: ...


def checkpoint_save(
    step: int,
    result: SaveResult,
    duration_s: float,
    size: int,
    *,
    tier: Tier = "local",
    blocked_s: float = 0.0,
    directory: str = "",
) -> None:
    """Tell the agent how a save to disk (rank 0 only) or a copy to memory (local rank 0) ended.

    Until a later save to the same directory goes well, one that was refused makes the job's success one that is not on
    disk.
    """
    where = directory[-MOST_DIRECTORY_CHARS:]
    _reporting().send(lambda g, r: SaveReport(g, r, step, result, duration_s, size, tier, blocked_s, where))


def lend(run: str, *descriptors: int) -> bool:
    """Let the agent hold this open lock file until it ends, and none of another run; False when it did not get it."""
    return _reporting().send(lambda g, r: LentLock(g, r, run), *descriptors)


def _refuse(step: object, error: Exception) -> None:
    # The caller's mistake, but a wrong progress report must not end a training run.
    global _refused
    if not _refused:
        _refused = True
        logger.warning("a step that is none is not counted (said once): step=%r reason=%s", step, error)


# ---------------------------------------------------------------- the page


def _own_words() -> memoryview:
    return _words if _words is not None else _attach()


def _attach() -> memoryview:
    # Not at import: spares are forked from a process that has imported this module already.
    global _words
    _words = _words_of(own_environment())
    return _words


def _words_of(environ: Mapping[str, str]) -> memoryview:
    """The words of this worker's page; private ones where there is none, or another process speaks for the worker."""
    try:
        env = WorkerEnv.of(environ)
        if env.stacks:  # where this worker is no fork of the agent's, nothing has done that yet
            register_stacks(env.stacks)
        if not env.page:
            return private_words()
        words = SharedProgress.attach(env.page, env.generation).words
    except (Invalid, OSError, SharedProgressError) as error:
        logger.warning("the agent cannot see this worker's steps: reason=%r", error)
        return private_words()
    speaker = words[ATTACHED]
    if speaker not in (0, os.getpid()) and _lives(speaker):
        return private_words()
    words[ATTACHED] = os.getpid()
    leave_warnings_to_agent()
    leave_when_failed()
    if words[ALL_SIGNALLED] and leave_sigterm_to_agent():
        words[LEAVES_SIGTERM] = 1
    return words


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _forked() -> None:
    """A child of a worker is none. A spare becomes one, but only after it was forked."""
    global _words, _listeners
    checkpointers.clear()
    if _words is not None:
        leave_nothing_to_agent()
        _words, _listeners = private_words(), ()


os.register_at_fork(after_in_child=_forked)


# ---------------------------------------------------------------- reports


_reporter: Reporter | None = None


def _reporting() -> Reporter:
    global _reporter
    _reporter = _reporter or Reporter(own_environment())
    return _reporter
