"""A rank's way to a durable checkpoint: in the background where the state is in memory, and else while all wait.

`AsyncSaver` is rank 0's for a state that is the same on all ranks; for a sharded one see `sharded/shard_saver`.

One write at a time is under way. The slot that is written is held by this process until it knows the outcome, so that
no later copy takes it. The writer belongs to the agent and goes on when this process dies. If the writer dies, cannot
be reached, stands still, or is not done after a time that any disk would do, this process takes the write back and does
it itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import select
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from ....codec import Checked, Invalid
from ...errors import CheckpointError, SaveFailed
from ...steps import progress
from ...wire.channel import receive, send
from ...wire.environment import WorkerEnv
from ...wire.messages import MAX_REASON_CHARS, WRITE_OUTCOMES, CancelWrite, Tier, WriteOrder, WriteOutcome
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
"""How long the writer may take for an order, which it also takes while it writes."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    slots: Slots
    held: HeldSlot
    connection: socket.socket | None
    """None: the writer could not be asked."""
    deadline: float


class BackgroundSaver(ABC):
    """The checkpoint directory, as one rank of one generation lets copies of its slots be written to it."""

    tier: Tier = "local"
    """What it is that was written, for the agent."""

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
        self._under_way: UnderWay | None = None
        self._outcome: WriteOutcome | None = None
        """Of a write that has ended, until it is asked for."""
        self._due: int | None = None
        """A step that was promised, and that has not been begun to be written."""
        self._newest: int | None = None
        self._durable: int | None = None
        atexit.register(self.end)

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

    def wrote(self, step: int, *, durable: bool) -> None:
        """This process has begun to write that step itself, or is done."""
        self._due, self._newest = None, step
        if durable:
            self._durable = step

    def begin(self, slots: Slots, held: HeldSlot) -> None:
        """Let the writer bring this copy to the disk. `held` is closed when the outcome is known, see `finish`."""
        assert self._under_way is None, "one write at a time"
        self._due, self._newest = None, held.header.step
        connection = self._ask(slots, held) if slots.shows(held) else None
        self._under_way = UnderWay(slots, held, connection, self.clock() + self.patience_s(held))

    def leave_to_writer(self, slots: Slots, held: HeldSlot) -> None:
        """Let the writer bring this copy to the disk after what it has to do, and do not wait for the outcome."""
        with held:
            connection = self._ask(slots, held) if slots.shows(held) else None
            if connection is not None:
                connection.close()

    def take_note(self) -> None:
        """Take note of the end of a write, if it has ended. Does not wait, unless this process must write."""
        write = self._under_way
        if write is not None and (
            write.connection is None or self.clock() >= write.deadline or _has_come(write.connection)
        ):
            self._outcome = self._end(write)

    def finish(self, lost: str = "") -> WriteOutcome | None:
        """Wait for the end of the newest write. What became of it, once; None: there was none.

        `lost` is why a copy that was promised to the disk may never have come here.
        """
        write, outcome, due = self._under_way, self._outcome, self._due
        self._outcome = self._due = None
        if write is None:
            if outcome is None and due is not None:
                progress.checkpoint_save(due, "error", 0.0, 0, tier=self.tier, directory=self.files.directory)
                return WriteOutcome(
                    due,
                    error=SaveFailed.__name__,
                    reason=(lost or f"step {due} never came to be written")[:MAX_REASON_CHARS],
                )
            return outcome
        return self._end(write)

    def _end(self, write: UnderWay) -> WriteOutcome:
        outcome = self._receive(write)
        if outcome is None or (outcome.error and not write.slots.shows(write.held)):
            outcome = self._write_here(write)
        if not outcome.error:
            self.succeeded(outcome.step)
        self._under_way = None
        with write.held:
            if write.connection is not None:
                write.connection.close()
        return outcome

    @property
    def ends_at_once(self) -> bool:
        """This process ends, and waits for nothing: its script ended in an error, or at a planned change."""
        return self.is_leaving or getattr(sys, "last_value", None) is not None

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

    # ---------------------------------------------------------------- what is ordered

    @abstractmethod
    def order(self, slots: Slots, held: HeldSlot) -> Checked:
        """For the disk writer, which writes this copy and answers by a WriteOutcome."""

    @abstractmethod
    def write(self, slots: Slots, held: HeldSlot) -> int:
        """What the order says, by this process; the size. Raises CheckpointError, OSError, ValueError."""

    @abstractmethod
    def patience_s(self, held: HeldSlot) -> float:
        """How long the writer may take for that."""

    def succeeded(self, step: int) -> None:
        """What was ordered for that step is done."""
        self._durable = step

    # ---------------------------------------------------------------- effects

    def _ask(self, slots: Slots, held: HeldSlot) -> socket.socket | None:
        return self.ask(held.header.step, self.order(slots, held))

    def ask(self, step: int, order: Checked, *descriptors: int) -> socket.socket | None:
        """Where the answer of the disk writer will come; None, and the log says why, when it cannot be asked."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(ASKING_S)
            connection.connect(self._writer)
            send(connection, order, ASKING_S, *descriptors)
        except OSError as error:
            logger.warning("the disk writer cannot be asked: step=%d reason=%s", step, error)
            connection.close()
            return None
        return connection

    def _receive(self, write: UnderWay) -> WriteOutcome | None:
        """None: the writer will not do it."""
        return self.answer(write.held.header.step, write.connection, write.deadline)

    def answer(self, step: int, connection: socket.socket | None, deadline: float) -> WriteOutcome | None:
        """The writer's answer to `ask`; None: there will be none, and it changes nothing any more."""
        if connection is None:
            return None
        try:
            while not _has_come(connection, ASKING_S) and self.clock() < deadline:
                self._look_for_writer()
            return receive(connection, WRITE_OUTCOMES, deadline - self.clock())
        except (OSError, Invalid) as error:
            logger.warning("the disk writer has not done its work: step=%d reason=%s", step, error)
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

    def _write_here(self, write: UnderWay) -> WriteOutcome:
        return self.do_here(write.held.header.step, lambda: self.write(write.slots, write.held), self.tier)

    def do_here(self, step: int, part: Callable[[], int], tier: Tier) -> WriteOutcome:
        """What the writer should have done; `part` returns a size."""
        logger.warning("training waits while this process writes its checkpoint itself: step=%d", step)
        started_s, size, refusal = self.clock(), 0, None
        try:
            size = part()
        except (CheckpointError, OSError, ValueError) as error:
            refusal = outcome_of(step, error, self.files.directory)
        took_s = self.clock() - started_s
        progress.checkpoint_save(
            step,
            "error" if refusal else "ok",
            took_s,
            size,
            tier=tier,
            blocked_s=took_s,
            directory=self.files.directory,
        )
        return refusal or WriteOutcome(step, size)

    def permission(self) -> Callable[[], None]:
        return CommitPermission(
            self.env.socket, self.env.generation, has_agent=bool(self.env.incarnation)
        ).check


class AsyncSaver(BackgroundSaver):
    """Rank 0's, for a state that is the same on all ranks."""

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
        self.wrote(step, durable=False)
        may_change = self.permission()
        manifest = self.files.write(
            step,
            generation=self.env.generation,
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
        self.wrote(step, durable=True)
        return manifest.size

    def order(self, slots: Slots, held: HeldSlot) -> WriteOrder:
        return WriteOrder(
            slots.memory,
            self.files.directory,
            held.name,
            held.header.step,
            held.header.generation,
            self.env.generation,
            self.files.keep,
            tuple(sorted(self.files.good)),
            self.files.run.id,
            tuple(sorted(self.files.claim.bad_steps)),
        )

    def write(self, slots: Slots, held: HeldSlot) -> int:
        return write_copy(self.files, slots, held, self.env.generation, self.permission()).size

    def patience_s(self, held: HeldSlot) -> float:
        return max(LEAST_S, held.header.size / SLOWEST_BYTES_PER_S)

    def succeeded(self, step: int) -> None:
        super().succeeded(step)
        self.files.trust(step)


def _has_come(connection: socket.socket, within_s: float = 0.0) -> bool:
    """Whether there is something to read, or the end. select would refuse descriptors from 1024 on."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
