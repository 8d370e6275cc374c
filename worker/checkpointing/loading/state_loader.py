"""What a load does whatever the kind of the state, from the checks before it to the claim of the directory after it.

All ranks take the same way through here, whatever goes wrong on one: a rank that left alone would let the others wait.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ...errors import BadCheckpoint, CheckpointError, NotSaved, Unconfirmed
from ...ranks.group import Group, all_did, current_group, together
from ...steps import progress
from ...storage.disk.checkpoint_files import CheckpointFiles, VerifiedCheckpoint
from ...storage.disk.manifests import Manifest
from ...storage.memory.copy_header import Header
from ...storage.memory.slot_memory import SlotMemory
from ...wire.environment import WorkerEnv
from ...wire.messages import MAX_REASON_CHARS, LoadResult, Tier
from .node_sharing import first_ranks
from .offered_copies import copies_in
from .selection import BadState, Offer, Source

logger = logging.getLogger(__name__)

Reasons = tuple[str, ...]
"""What is wrong with checkpoints on disk."""


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What all ranks have loaded: a checkpoint, or a copy in memory; None: there was nothing."""

    what: Manifest | Header | None = None

    @property
    def step(self) -> int:
        return self.what.step if self.what is not None else 0

    @property
    def version(self) -> tuple[int, int] | None:
        """Of a copy in memory."""
        return self.what.version if isinstance(self.what, Header) else None


class StateLoader(ABC):
    """As one rank takes part in it."""

    _is_sharded: ClassVar[bool]

    def __init__(
        self, files: CheckpointFiles, memory: SlotMemory | None, env: WorkerEnv, *, read_only: bool
    ) -> None:
        """`read_only`: training does not go on from what is loaded, so nothing is claimed or reported."""
        self._files = files
        self._memory = memory
        self._env = env
        self._read_only = read_only
        self._report = progress.Silent() if read_only else progress
        self._bad_state = None if read_only else BadState.of(env, files.run.id)
        self._speaks_for_node = not read_only and env.local_rank == 0
        self._first_ranks: list[int] = []
        """By rank, who verifies the files for it."""
        self._began_s = 0.0
        self._step = 0
        """That is being loaded."""
        self._unreadable = False
        """What was chosen cannot be read: that is the state's fault, and no refusal."""

    @abstractmethod
    def _refuse(self) -> None:
        """Raises CheckpointError for parts that cannot be carried."""

    @abstractmethod
    def _bring(self, group: Group) -> LoadedState:
        """Choose a state, bring it here and apply it. Raises CheckpointError, on all ranks."""

    def load(self, finish_last_write: Callable[[], None]) -> LoadedState:
        """Raises what `Checkpointer.load` raises; `finish_last_write` what became of a save that was under way."""
        self._report.loading()
        group, self._began_s = current_group(), time.monotonic()
        self._step, self._unreadable = 0, False
        claim = self._files.claim
        try:
            together(group, lambda: self._prepare(finish_last_write), "nothing loaded")
            self._on_rank_0(group, claim.await_former_run)
            for again in (True, True, False):
                found = self._bring(group)
                if self._claim(group, found, again=again):
                    break
        except CheckpointError:
            claim.release_lock()
            if not self._unreadable:
                self._report.load_refused()
            self._report_load(self._step, "error")
            raise
        if group.rank and self._speaks_for_node:
            claim.share_lock()
        tier: Tier = "memory" if isinstance(found.what, Header) else "local"
        self._report_load(found.step, "none" if found.what is None else "ok", tier)
        return found

    def _prepare(self, finish_last_write: Callable[[], None]) -> None:
        """All parts can be carried, of the saves before none is under way, and no agent holds locks of a past run."""
        self._refuse()
        if self._speaks_for_node:
            self._files.claim.release_former_locks()
        with contextlib.suppress(NotSaved, Unconfirmed):  # the log has it
            finish_last_write()

    def _claim(self, group: Group, found: LoadedState, *, again: bool) -> bool:
        """The directory is this run's from here on, which goes on from `found`. False: load `again`, see `take`."""
        run = found.what.run if found.what is not None else None
        does = group.rank == 0 and not self._read_only
        take = self._files.claim.take
        return all_did(group, lambda: not does or take(found.step, run, again=again), self._files.directory)

    def _on_rank_0(self, group: Group, part: Callable[[], None]) -> None:
        """Let rank 0 do this, and raise on every rank what it raises."""
        does = group.rank == 0 and not self._read_only
        together(group, part if does else lambda: None, self._files.directory)

    def _report_load(self, step: int, result: LoadResult, tier: Tier = "local") -> None:
        self._report.checkpoint_load(step, result, time.monotonic() - self._began_s, tier)

    def _warn_if_set_back(self, what: Manifest | Header) -> None:
        bad = self._bad_state
        if bad is None:
            return
        if bad.covers(what):
            logger.warning("there is no older state to go back to: step=%d bad=%d", what.step, bad.step)
        else:
            logger.warning("going on from an older state: step=%d bad=%d", what.step, bad.step)

    def _offer(self, manifest: Manifest | None, reasons: Reasons) -> Offer:
        env, memory, directory = self._env, self._memory, self._files.directory
        speaks = memory is not None and memory.keeps_common
        return Offer(
            manifest,
            reasons,
            copies_in(env.memory, directory, is_sharded=self._is_sharded) if speaks else (),
            env.node if memory is not None else "",
            env.memory_address,
            self._files.run.id,
            self._is_foreign(manifest),
            memory.noted() if memory is not None and speaks else (),
        )

    # ---------------------------------------------------------------- this rank's directory

    def _is_foreign(self, manifest: Manifest | None) -> bool:
        """Another run's, which this one has not taken over."""
        return manifest is not None and not self._files.claim.is_ours(manifest)

    def _is_unwanted(self, manifest: Manifest) -> bool:
        bad = self._bad_state
        return bad is not None and bad.covers(manifest, foreign=self._is_foreign(manifest))

    def _claimed(self) -> Manifest | None:
        """The newest checkpoint that the directory claims to have."""
        with contextlib.suppress(OSError):
            return self._files.newest_manifest(self._is_unwanted)
        return None

    def _place(self) -> str:
        """Ranks in the same place see the same files: what one has verified the others need not read."""
        return f"{self._env.node}:{self._files.directory}" if self._env.node else ""

    def _look(self, group: Group) -> tuple[VerifiedCheckpoint | None, Reasons]:
        """The newest good checkpoint, and what is wrong with those before it; neither where another rank looks."""
        self._first_ranks = first_ranks([raw.decode() for raw in group.gather(self._place().encode())])
        if self._first_ranks[group.rank] != group.rank:
            return None, ()
        try:
            found, bad = self._files.find(self._is_unwanted)
        except OSError as error:
            return None, (f"{self._files.directory}: {error}"[:MAX_REASON_CHARS],)
        for one in bad:
            warn_of(one)
            self._report_load(one.step, "corrupt")
        return found, tuple(str(one)[:MAX_REASON_CHARS] for one in bad)


def warn_of(bad: BadCheckpoint) -> None:
    logger.warning("checkpoint does not verify, trying the next older one: step=%d reason=%s", bad.step, bad)


def choose_together(
    claimed: Manifest | None,
    exchange: Callable[[Manifest | None, Reasons], list[Offer]],
    choose: Callable[[list[Offer]], Source | None],
    look: Callable[[], tuple[Manifest | None, Reasons]],
    all_can_read: Callable[[Source, list[Offer]], bool] = lambda *_: True,
) -> tuple[Source | None, list[Offer]]:
    """What all ranks load, None where there is nothing, and what each has.

    The disk is looked at only where it could win, as all of a checkpoint is read before it is believed: that takes
    longer than all else. `all_can_read` opens a source in memory. False: some rank cannot, and offers it no more.
    """
    manifest, looked = claimed, False
    reasons: Reasons = ()
    while True:
        offers = exchange(manifest, reasons)
        informed = looked or any(offer.copies for offer in offers)
        source = choose(offers) if informed else None
        if source is not None and isinstance(source.what, Header):
            if all_can_read(source, offers):
                return source, offers
        elif looked:
            return source, offers
        else:
            (manifest, reasons), looked = look(), True
