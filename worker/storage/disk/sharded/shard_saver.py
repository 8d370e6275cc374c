"""A rank's way to a durable checkpoint of a sharded state: every rank writes its part, and rank 0 commits.

    all ranks      save = ShardedSave(step, attempt, ...)      rank 0 has named the attempt (`new_attempt`) to all
    in background  saver.expect(save); saver.promise(step)
                   saver.begin(slots, held)                    when the copy is sealed; else saver.refuse(step, error)
                   outcome = saver.finish()                    at the next save: all ranks, before any collective
    while all wait saver.write_now(save, layout, ...)          each rank; all gather whether it went well
                   saver.commit_now(save)                      rank 0

Each rank orders its own slot of the disk writer of its node, rank 0 also the commit, with DCP's index as an open file:
so both outlive the ranks that gave the orders. Where the writer cannot be asked, dies, or is too late, a rank does in
`finish` what its writer should have done: it writes its part, rank 0 commits. A rank whose part cannot be written says
so in the directory of the attempt, and the others need not wait for it.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass

from ....errors import CheckpointError, SaveFailed
from ....state.sharding.layout import ShardLayout
from ....wire.messages import CommitOrder, ShardOrder, Tier, WriteOutcome
from ...memory.shard_memory import header_of_shards
from ...memory.slot_memory import RankPlace
from ...memory.slots import HeldSlot, Slots
from ..async_save import LEAST_S, SLOWEST_BYTES_PER_S, BackgroundSaver
from ..background_write import outcome_of
from .commit import Commit, commit
from .parts import Part, refuse_part, write_held, write_part

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardedSave:
    """One save, as one rank takes part in it.

    `most_bytes` is what the ranks of one node write, of that node which writes most. `twin_of`: a lower rank that has
    the same shards, and no twin itself. `metadata` are the bytes of DCP's index: of rank 0.
    """

    step: int
    attempt: str
    rank: int
    world_size: int
    most_bytes: int
    twin_of: int | None = None
    metadata: bytes = b""

    @property
    def within_s(self) -> float:
        """For which parts are waited for."""
        return max(LEAST_S, self.most_bytes / SLOWEST_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class _Commit:
    save: ShardedSave
    connection: socket.socket | None
    """None: the writer could not be asked."""
    deadline: float


class ShardSaver(BackgroundSaver):
    """The checkpoint directory, as one rank of one generation writes its part to it."""

    tier: Tier = "part"
    _expected: ShardedSave | None = None
    _writing: ShardedSave | None = None
    _committing: _Commit | None = None

    def expect(self, save: ShardedSave) -> None:
        """The next copy that is begun to be written, or left to the writer, is for this save."""
        self._expected = save

    def begin(self, slots: Slots, held: HeldSlot) -> None:
        save = self._writing = self._next(held)
        if save.rank == 0:
            assert self._committing is None, "one write at a time"
            connection = self._ask_commit(save)
            # The writer gives up by itself first, and says what was missing.
            self._committing = _Commit(save, connection, self.clock() + save.within_s + LEAST_S)
        super().begin(slots, held)

    def leave_to_writer(self, slots: Slots, held: HeldSlot) -> None:
        save = self._next(held)
        connection = self._ask_commit(save) if save.rank == 0 and slots.shows(held) else None
        if connection is not None:
            connection.close()
        super().leave_to_writer(slots, held)

    def finish(self, lost: str = "") -> WriteOutcome | None:
        """Wait for the end of the newest write, and as rank 0 for that of its commit, of which then is the outcome."""
        outcome = super().finish(lost)
        committing, self._committing = self._committing, None
        if committing is not None:
            return self._end_commit(committing)
        if lost and outcome is not None:
            self._refuse_part(outcome.step, SaveFailed(outcome.reason))
        return outcome

    def refuse(self, step: int, error: Exception) -> None:
        """This rank's part of that step cannot begin to be written: `finish` says so, and no commit waits for it."""
        logger.warning("a part of a checkpoint is not brought to disk: step=%d reason=%s", step, error)
        self._due, self._outcome = None, outcome_of(step, error, self.files.directory)
        self._refuse_part(step, error)

    def _refuse_part(self, step: int, error: Exception) -> None:
        save = self._expected
        if save is not None and save.step == step:
            refuse_part(self.files, save.attempt, save.rank, error)

    # ---------------------------------------------------------------- while all wait

    def write_now(self, save: ShardedSave, layout: ShardLayout, resumed_from: int, *, common: bool) -> int:
        """Write this rank's part: what `layout` says, with what is `common` or without; its size.

        Raises OSError, CheckpointError.
        """
        env = self.env
        place = RankPlace(
            env.node, env.generation, save.rank, env.local_rank, save.world_size, self.files.run.id
        )
        header = header_of_shards(layout, place, save.step, resumed_from, common=common)
        assert save.twin_of is None, "what is poured are the shards, too"
        self.wrote(save.step, durable=False)
        try:
            return write_part(
                self.files, self._part(save), header, layout.pour, self.permission()
            ).header.size
        except (CheckpointError, OSError, ValueError) as error:
            refuse_part(self.files, save.attempt, save.rank, error)
            raise

    def commit_now(self, save: ShardedSave) -> int:
        """Rank 0, when all have written: make a checkpoint of it; the size of all parts. Raises as `write_now`."""
        size = self._commit(save)
        self.wrote(save.step, durable=True)
        self.files.trust(save.step)
        return size

    # ---------------------------------------------------------------- what is ordered

    def order(self, slots: Slots, held: HeldSlot) -> ShardOrder:
        save = self._next(held)
        return ShardOrder(
            slots.memory,
            self.files.directory,
            os.path.basename(slots.folder),
            held.name,
            held.header.step,
            held.header.generation,
            self.env.generation,
            self.files.run.id,
            save.attempt,
            save.rank,
            save.twin_of,
        )

    def write(self, slots: Slots, held: HeldSlot) -> int:
        save = self._writing
        assert save is not None
        try:
            return write_held(self.files, self._part(save), slots, held, self.permission())
        except (CheckpointError, OSError, ValueError) as error:
            refuse_part(self.files, save.attempt, save.rank, error)
            raise

    def patience_s(self, held: HeldSlot) -> float:
        return self._next(held).within_s

    def succeeded(self, step: int) -> None:
        if self._committing is None:
            super().succeeded(step)

    def _next(self, held: HeldSlot) -> ShardedSave:
        save = self._expected
        assert save is not None, "expect() comes first"
        assert save.step == held.header.step, "the copy is of another step"
        return save

    def _part(self, save: ShardedSave) -> Part:
        return Part(save.attempt, self.env.generation, save.twin_of)

    # ---------------------------------------------------------------- the commit

    def _ask_commit(self, save: ShardedSave) -> socket.socket | None:
        order = CommitOrder(
            self.files.directory,
            save.step,
            self.env.generation,
            self.files.run.id,
            save.attempt,
            save.world_size,
            self.files.keep,
            tuple(sorted(self.files.good)),
            save.within_s,
            tuple(sorted(self.files.claim.bad_steps)),
        )
        with open(os.memfd_create("elastic-agent-metadata", os.MFD_CLOEXEC), "wb") as file:
            file.write(save.metadata)
            file.flush()
            return self.ask(save.step, order, file.fileno())

    def _end_commit(self, committing: _Commit) -> WriteOutcome:
        save = committing.save
        outcome = self.answer(save.step, committing.connection, committing.deadline)
        if committing.connection is not None:
            committing.connection.close()
        if outcome is None:
            outcome = self.do_here(save.step, lambda: self._commit(save), "local")
        if not outcome.error:
            self.wrote(save.step, durable=True)
            self.files.trust(save.step)
        return outcome

    def _commit(self, save: ShardedSave) -> int:
        order = Commit(
            save.attempt, save.step, self.env.generation, save.world_size, save.metadata, save.within_s
        )
        return commit(self.files, order, self.permission()).size
