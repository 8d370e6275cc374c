"""Rank 0's way to a durable checkpoint: in the background where the state is in memory, and else while all wait.

One write at a time is under way. The slot that is written is held by this process until it knows the outcome, so that
no later copy takes it. The writer belongs to the agent and goes on when this process dies. If the writer dies, cannot
be reached, or is not done after a time that any disk would do, this process takes the write back and does it itself.
"""

from __future__ import annotations

import atexit
import logging
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from ....codec import Invalid
from ...errors import CheckpointError, SaveFailed
from ...steps import progress
from ...wire.channel import receive, send
from ...wire.environment import WorkerEnv
from ...wire.messages import MAX_REASON_CHARS, WRITE_OUTCOMES, CancelWrite, WriteOrder, WriteOutcome
from ..memory.slots import HeldSlot, Slots
from .background_write import outcome_of, write_copy
from .checkpoint_files import CheckpointFiles
from .commit_permission import CommitPermission
from .manifests import Manifest

logger = logging.getLogger(__name__)

LEAST_S = 60.0
SLOWEST_BYTES_PER_S = 10e6
"""Of a disk that works. A write that takes longer than both allow is taken back."""
ASKING_S = 5.0


@dataclass(frozen=True, slots=True)
class _UnderWay:
    slots: Slots
    held: HeldSlot
    connection: socket.socket | None
    """None: the writer could not be asked."""
    deadline: float


class AsyncSaver:
    """The checkpoint directory, as rank 0 of one generation writes to it."""

    def __init__(
        self,
        files: CheckpointFiles,
        env: WorkerEnv,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files = files
        self.is_leaving = False
        """This process ends for a planned change: the next generation brings to disk what is not there."""
        self._env = env
        self._writer = env.writes
        self._clock = clock
        self._under_way: _UnderWay | None = None
        self._outcome: WriteOutcome | None = None
        """Of a write that has ended, until it is asked for."""
        self._due: int | None = None
        """A step that was promised, and that has not been begun to be written."""
        self._newest: int | None = None
        self._durable: int | None = None
        atexit.register(self._finish_at_exit)

    @property
    def has_writer(self) -> bool:
        """Whether a process of the agent can write while training goes on."""
        return bool(self._writer)

    @property
    def is_durable(self) -> bool:
        """Whether the newest step that was to be written is on disk; True when there was none."""
        return self._newest == self._durable

    def promise(self, step: int) -> None:
        """This step is to be written: `begin` follows, or `finish` says that it did not."""
        self._due = self._newest = step

    def commit(
        self,
        step: int,
        world_size: int,
        serialize: Callable[[BinaryIO], object],
        prove: Callable[[Manifest], None],
    ) -> int:
        """Make a checkpoint of what `serialize` writes, now. Returns its size.

        Raises OSError, and what `prove` and `CommitPermission.check` raise.
        """
        self._due, self._newest = None, step
        may_change = self._permission()
        manifest = self.files.write(
            step,
            generation=self._env.generation,
            world_size=world_size,
            serialize=serialize,
            may_change=may_change,
        )
        try:
            prove(manifest)
        except BaseException:
            self.files.discard(manifest)
            raise
        self.files.publish(manifest, may_change)
        self._durable = step
        return manifest.size

    def begin(self, slots: Slots, held: HeldSlot) -> None:
        """Let the writer bring this copy to the disk. `held` is closed when the outcome is known, see `finish`."""
        assert self._under_way is None, "one write at a time"
        self._due, self._newest = None, held.header.step
        patience_s = max(LEAST_S, held.header.size / SLOWEST_BYTES_PER_S)
        connection = self._ask(slots, held) if slots.shows(held) else None
        self._under_way = _UnderWay(slots, held, connection, self._clock() + patience_s)

    def hand_over(self, slots: Slots, held: HeldSlot) -> None:
        """Let the writer bring this copy to the disk after what it has to do, and do not wait for the outcome."""
        with held:
            connection = self._ask(slots, held) if slots.shows(held) else None
            if connection is not None:
                connection.close()

    def take_note(self) -> None:
        """Take note of the end of a write, if it has ended. Does not wait, unless this process must write."""
        write = self._under_way
        if write is not None and (
            write.connection is None or self._clock() >= write.deadline or _has_come(write.connection)
        ):
            self._outcome = self.finish()

    def finish(self, lost: str = "") -> WriteOutcome | None:
        """Wait for the end of the newest write. What became of it, once; None: there was none.

        `lost` is why a copy that was promised to the disk may never have come here.
        """
        write, outcome, due = self._under_way, self._outcome, self._due
        self._outcome = self._due = None
        if write is None:
            if outcome is None and due is not None:
                return WriteOutcome(
                    due,
                    error=SaveFailed.__name__,
                    reason=(lost or f"step {due} never came to be written")[:MAX_REASON_CHARS],
                )
            return outcome
        outcome = self._receive(write)
        if outcome is None or (outcome.error and not write.slots.shows(write.held)):
            outcome = self._write_here(write)
        if not outcome.error:
            self._durable = outcome.step
            self.files.trust(outcome.step)
        self._under_way = None
        with write.held:
            if write.connection is not None:
                write.connection.close()
        return outcome

    def _finish_at_exit(self) -> None:
        """The script is done: what was saved last is durable before the job can count as ended.

        Where it ends in an error the process ends at once.
        """
        if self.is_leaving or getattr(sys, "last_value", None) is not None:
            return
        outcome = self.finish()
        if outcome is not None and outcome.error:
            logger.error("the newest save is not on disk: step=%d reason=%s", outcome.step, outcome.reason)

    def _ask(self, slots: Slots, held: HeldSlot) -> socket.socket | None:
        order = WriteOrder(
            slots.memory,
            self.files.directory,
            held.name,
            held.header.step,
            held.header.generation,
            self._env.generation,
            self.files.keep,
            tuple(sorted(self.files.good)),
            self.files.run.id,
        )
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(ASKING_S)
            connection.connect(self._writer)
            send(connection, order, ASKING_S)
        except OSError as error:
            logger.warning("the disk writer cannot be asked: step=%d reason=%s", order.step, error)
            connection.close()
            return None
        return connection

    def _receive(self, write: _UnderWay) -> WriteOutcome | None:
        """None: the writer will not do it."""
        if write.connection is None:
            return None
        try:
            return receive(write.connection, WRITE_OUTCOMES, write.deadline - self._clock())
        except (OSError, Invalid) as error:
            logger.warning(
                "the disk writer has not done its work: step=%d reason=%s", write.held.header.step, error
            )
            return None

    def _write_here(self, write: _UnderWay) -> WriteOutcome:
        header = write.held.header
        logger.warning("training waits while this process writes its checkpoint itself: step=%d", header.step)
        if write.connection is not None:
            try:
                send(write.connection, CancelWrite(), ASKING_S)
            except OSError:
                pass  # it is gone already
        started_s, size, refusal = self._clock(), 0, None
        try:
            size = write_copy(
                self.files, write.slots, write.held, self._env.generation, self._permission()
            ).size
        except (CheckpointError, OSError, ValueError) as error:
            refusal = outcome_of(header.step, error, self.files.directory)
        took_s = self._clock() - started_s
        progress.checkpoint_save(header.step, "error" if refusal else "ok", took_s, size, blocked_s=took_s)
        return refusal or WriteOutcome(header.step, size)

    def _permission(self) -> Callable[[], None]:
        return CommitPermission(
            self._env.socket, self._env.generation, has_agent=bool(self._env.incarnation)
        ).check


def _has_come(connection: socket.socket) -> bool:
    """Whether there is something to read, or the end. select would refuse descriptors from 1024 on."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))
