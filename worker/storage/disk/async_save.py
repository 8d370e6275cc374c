"""A rank's way to a durable checkpoint while training goes on: of what lies in memory, by the agent's disk writer.

    saver.promise(save)         a save has begun whose copy comes to the disk: from here on `finish` has an outcome
    saver.begin(slots, held)    the copy is sealed: in any thread; or `refuse`, where it cannot be
    outcome = saver.finish()    at the next save: wait for the end, once

The outcome is a Future. A thread waits for the writer's answers; it holds the slot until it knows them, so that no
later copy takes it. The writer belongs to the agent and goes on when this process dies. If the writer dies, cannot be
reached, stands still, or is not done after a time that any disk would do, that thread takes the write back and does it
itself.

What is to be written is a `Save` (see `sharded_save`): one `Task` or more.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ....codec import Checked, Invalid
from ...errors import CheckpointError, SaveFailed
from ...steps import progress
from ...wire.channel import receive, send
from ...wire.environment import WorkerEnv
from ...wire.messages import (
    MAX_REASON_CHARS,
    WRITE_OUTCOMES,
    CancelWrite,
    SaveResult,
    Tier,
    WriteOutcome,
)
from ..memory.slots import HeldSlot, Slots
from .checkpoint_files import CheckpointFiles
from .commit_permission import CommitPermission
from .parts import outcome_of

logger = logging.getLogger(__name__)

LEAST_S = 60.0
SLOWEST_BYTES_PER_S = 10e6
"""Of a disk that works. A write that takes longer than both allow is taken back."""
ASKING_S = 5.0
"""How long the writer may take for an order, which it also takes while it writes."""


@dataclass(frozen=True, slots=True)
class Task:
    """An order to the disk writer, and how this process does the same: `here` returns a size.

    `here` raises CheckpointError, OSError, ValueError. `within_s` is how long the writer may take. `content` goes along
    as an open file.
    """

    order: Checked
    here: Callable[[], int]
    within_s: float
    tier: Tier = "local"
    content: bytes | None = None


class Save(ABC):
    """What one rank writes of one checkpoint."""

    step: int

    @property
    @abstractmethod
    def tier(self) -> Tier:
        """What it is that is written, for the agent."""

    @abstractmethod
    def tasks(self, disk: DiskSaver, slots: Slots, held: HeldSlot) -> Sequence[Task]:
        """In their order; the first one alone needs the copy. The outcome of the last is the save's."""

    def refuse(self, disk: DiskSaver, error: Exception) -> None:  # noqa: B027  # most have nobody to tell
        """It will not come: tell others who wait for it."""


class DiskSaver:
    """The checkpoint directory, as one rank of one generation lets copies of its slots be written to it."""

    def __init__(
        self,
        files: CheckpointFiles,
        env: WorkerEnv,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files = files
        self.is_leaving = False
        """This process ends for a planned change: the next generation brings to disk what is not there."""
        self.env = env
        self._writer = env.writes
        self.clock = clock
        self._save: Save | None = None
        """That was promised last."""
        self._outcome: Future[WriteOutcome] | None = None
        """Of that save, until it is asked for."""
        self._newest: int | None = None
        self._durable: int | None = None
        self._promised_by = 0
        """The process whose thread ends that write: no fork of it has that thread."""
        atexit.register(self.end)

    @property
    def has_writer(self) -> bool:
        """Whether a process of the agent can write while training goes on."""
        return bool(self._writer)

    @property
    def is_durable(self) -> bool:
        """Whether the newest step that was to be written is on disk; True when there was none."""
        return self._newest == self._durable

    @property
    def ends_at_once(self) -> bool:
        """This process ends, and waits for nothing: its script ended in an error, or at a planned change."""
        return self.is_leaving or getattr(sys, "last_value", None) is not None

    # ---------------------------------------------------------------- a save in the background

    def wake(self) -> None:
        """Copies will be ordered: let the writer be there by then. The agent starts it at the first connection, and
        while it starts it would hold the first copy, and with that keep others from being made."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            connection.connect(self._writer)

    def promise(self, save: Save) -> None:
        """It is to be written: `begin` follows, or `refuse`, or `finish` says that it did not."""
        assert self._outcome is None or self._outcome.done(), "one write at a time"
        self._save, self._newest, self._outcome = save, save.step, Future()
        self._promised_by = os.getpid()

    def begin(self, slots: Slots, held: HeldSlot) -> None:
        """Let the writer bring this copy, of the promised save, to the disk. `held` is closed when that is done."""
        save, outcome = self._save, self._outcome
        assert save is not None, "promise() comes first"
        assert outcome is not None, "promise() comes first"
        asked = self._ask_all(save, slots, held)
        outcome.set_running_or_notify_cancel()
        thread = threading.Thread(
            target=self._complete, args=(outcome, asked, slots, held), name="disk-save", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no thread can be started now: training waits instead
            self._complete(outcome, asked, slots, held)

    def leave_to_writer(self, save: Save, slots: Slots, held: HeldSlot) -> None:
        """Let the writer bring this copy to the disk after what it has to do, and do not wait for the outcome."""
        with held:
            if slots.shows(held):
                for one in self._ask_all(save, slots, held):
                    one.close()

    def refuse(self, step: int, error: Exception, save: Save | None) -> None:
        """This save of that step cannot begin, or None could be made: `finish` says so."""
        logger.warning("a copy is not brought to disk: step=%d reason=%s", step, error)
        self._newest, self._outcome = step, Future()
        self._outcome.set_result(outcome_of(step, error, self.files.directory))
        if save is not None:
            save.refuse(self, error)

    def finish(self, lost: str = "") -> WriteOutcome | None:
        """Wait for the end of the newest write. What became of it, once; None: there was none.

        `lost` is why a copy that was promised to the disk may never have come here.
        """
        outcome, self._outcome = self._outcome, None
        if outcome is None or (not outcome.done() and os.getpid() != self._promised_by):
            return None
        if not outcome.cancel():
            return outcome.result()
        save = self._save
        assert save is not None
        reason = (lost or f"step {save.step} never came to be written")[:MAX_REASON_CHARS]
        save.refuse(self, SaveFailed(reason))
        progress.checkpoint_save(save.step, "error", 0.0, 0, tier=save.tier, directory=self.files.directory)
        return WriteOutcome(save.step, error=SaveFailed.__name__, reason=reason)

    def wrote(self, step: int, *, durable: bool) -> None:
        """This process has begun to write that step itself, while all wait, or is done."""
        self._outcome, self._newest = None, step
        if durable:
            self._durable = step
            self.files.trust(step)

    def end(self, lost: str = "") -> None:
        """The script is done, with this or at all: what was saved last is durable before the job can count as ended.

        `lost`: see `finish`.
        """
        atexit.unregister(self.end)
        if self.ends_at_once:
            return
        outcome = self.finish(lost)
        if outcome is not None and outcome.error:
            logger.error("the newest save is not on disk: step=%d reason=%s", outcome.step, outcome.reason)

    def permission(self) -> Callable[[], None]:
        return CommitPermission(
            self.env.socket, self.env.generation, has_agent=bool(self.env.incarnation)
        ).check

    # ---------------------------------------------------------------- its thread

    def _complete(
        self, outcome: Future[WriteOutcome], asked: Sequence[_Asked], slots: Slots, held: HeldSlot
    ) -> None:
        try:
            first, *others = asked
            was_done_here = False
            with held:
                found = self._answer(first)
                if found is None or (found.error and not slots.shows(held)):
                    found = self._do_here(first)
                    was_done_here = not found.error
            for one in others:
                answer = self._answer(one)
                # One that the writer has refused may have lacked what is here by now.
                found = self._do_here(one) if answer is None or (answer.error and was_done_here) else answer
            if not found.error:
                self._durable = found.step
                if asked[-1].task.tier == "local":
                    self.files.trust(found.step)
            outcome.set_result(found)
        except BaseException as error:
            outcome.set_exception(error)

    def _ask_all(self, save: Save, slots: Slots, held: HeldSlot) -> list[_Asked]:
        found: list[_Asked] = []
        for task in save.tasks(self, slots, held):
            asks = bool(found) or slots.shows(held)
            connection = self._ask(save.step, task) if asks else None
            found.append(_Asked(save.step, task, connection, self.clock() + task.within_s))
        return found

    def _ask(self, step: int, task: Task) -> socket.socket | None:
        """Where the answer of the disk writer will come; None, and the log says why, when it cannot be asked."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(ASKING_S)
            connection.connect(self._writer)
            if task.content is None:
                send(connection, task.order, ASKING_S)
            else:
                with open(os.memfd_create("elastic-agent-order", os.MFD_CLOEXEC), "wb") as file:
                    file.write(task.content)
                    file.flush()
                    send(connection, task.order, ASKING_S, file.fileno())
        except OSError as error:
            logger.warning("the disk writer cannot be asked: step=%d reason=%s", step, error)
            connection.close()
            return None
        return connection

    def _answer(self, asked: _Asked) -> WriteOutcome | None:
        """The writer's; None: there will be none, and it changes nothing any more."""
        connection = asked.connection
        if connection is None:
            return None
        with connection:
            try:
                while not _has_come(connection, ASKING_S) and self.clock() < asked.deadline:
                    self._look_for_writer()
                return receive(connection, WRITE_OUTCOMES, asked.deadline - self.clock())
            except (OSError, Invalid) as error:
                logger.warning("the disk writer has not done its work: step=%d reason=%s", asked.step, error)
                with contextlib.suppress(OSError):  # it is gone already
                    send(connection, CancelWrite(), ASKING_S)
                return None

    def _look_for_writer(self) -> None:
        """Raises OSError where its process takes no order: it was stopped, or does not get to run."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ASKING_S)
            connection.connect(self._writer)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)

    def _do_here(self, asked: _Asked) -> WriteOutcome:
        """What the writer should have done."""
        step, where = asked.step, self.files.directory
        logger.warning("this process writes its checkpoint itself: step=%d", step)
        started_s, size, refusal = self.clock(), 0, None
        try:
            size = asked.task.here()
        except (CheckpointError, OSError, ValueError) as error:
            refusal = outcome_of(step, error, where)
        took_s = self.clock() - started_s
        result: SaveResult = "error" if refusal else "ok"
        progress.checkpoint_save(step, result, took_s, size, tier=asked.task.tier, directory=where)
        return refusal or WriteOutcome(step, size)


@dataclass(frozen=True, slots=True)
class _Asked:
    step: int
    task: Task
    connection: socket.socket | None
    """None: the writer could not be asked."""
    deadline: float

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


def _has_come(connection: socket.socket, within_s: float = 0.0) -> bool:
    """Whether there is something to read, or the end. select would refuse descriptors from 1024 on."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
