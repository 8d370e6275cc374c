"""Loads the newest state of which every shard is somewhere: in the memory of this node or of others, or on disk.

All ranks choose the same (`selection`). Each then reads what it needs of it, and nothing changes before all have
read. A rank whose place in the world, and whose part of the state, are those of an old rank maps that rank's copy.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...errors import BadCheckpoint, CheckpointError, CheckpointMismatch
from ...ranks.group import Group, because, raise_together, together
from ...state import rng
from ...state.sharding.parts import Prepared
from ...state.sharding.reading import OpenCopy
from ...state.sharding.table import RANDOM_STATE
from ...state.state_dicts import refuse_code
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.disk.manifests import Manifest
from ...storage.memory.slot_memory import SlotMemory
from ...wire.environment import WorkerEnv
from ..loading.offered_copies import offers_of_standbys
from ..loading.selection import (
    CopyName,
    Offer,
    Source,
    choose_source,
    unusable,
    without,
)
from ..loading.state_loader import LoadedState, Reasons, StateLoader, choose_together, warn_of
from .contents import ShardContents
from .open_copies import CopiesInMemory, CopiesOnDisk, CopiesUnusable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unread:
    """What one rank could not read of the chosen version: the checkpoint on disk, or these copies in memory."""

    on_disk: bool = False
    copies: tuple[CopyName, ...] = ()


class ShardLoading(StateLoader):
    _is_sharded = True

    def __init__(
        self,
        files: CheckpointFiles,
        contents: ShardContents,
        memory: SlotMemory | None,
        env: WorkerEnv,
        *,
        read_only: bool,
    ) -> None:
        super().__init__(files, memory, env, read_only=read_only)
        self._contents = contents
        self._left_out: set[CopyName] = set()
        """Copies that some rank could not read; the same on all ranks."""

    def _refuse(self) -> None:
        self._contents.refuse()
        if not self._read_only:
            refuse_code(self._contents.given)

    def _bring(self, group: Group) -> LoadedState:
        while True:
            source = self._choose(group)
            if source is None:
                break
            self._step = source.what.step
            self._report.load_chosen(self._step)
            self._unreadable = True
            if self._take(group, source):
                break
        self._unreadable = False
        return LoadedState(source.what if source is not None else None)

    # ---------------------------------------------------------------- choosing

    def _choose(self, group: Group) -> Source | None:
        """Raises NoUsableCheckpoint."""
        standbys = offers_of_standbys(self._env, self._files.directory, group)

        def exchange(manifest: Manifest | None, reasons: Reasons) -> list[Offer]:
            of_ranks = group.exchange(self._offer(manifest, reasons))
            return [without(offer, self._left_out) for offer in (*of_ranks, *standbys)]

        def look() -> tuple[Manifest | None, Reasons]:
            found, reasons = self._look(group)
            if found is None:
                return None, reasons
            found.stream.close()
            return found.manifest, reasons

        source, offers = choose_together(
            self._claimed(), exchange, lambda offers: choose_source(offers, self._bad_state), look
        )
        if group.rank == 0:
            for one in unusable(offers, source, self._bad_state):
                logger.warning("%s", one.reason)
            if source is not None:
                self._warn_if_set_back(source.what)
        return source

    # ---------------------------------------------------------------- taking

    def _take(self, group: Group, source: Source) -> bool:
        """Bring the chosen state here and apply it. False, on all ranks: it cannot be read, choose another."""
        step = source.what.step
        together(group, self._contents.parts.begin_load, f"step {step} cannot be loaded")
        with contextlib.ExitStack() as stack:
            prepared, error = self._read(group, source, stack)
            if self._leave_out(group, source, error):
                return False
            raise_together(group, error)
            assert prepared is not None
            together(group, prepared.apply, f"step {step} cannot be loaded")
            if not self._read_only:
                self._restore_random_state(group, source, prepared)
            if self._memory is not None and not isinstance(source.what, Manifest):
                self._memory.abandon_newer(source.version)
        return True

    def _leave_out(self, group: Group, source: Source, error: CheckpointError | None) -> bool:
        """Whether some rank could not read what it needs: then it is not chosen again."""
        bad = error if isinstance(error, BadCheckpoint) else None
        places = error.places if isinstance(error, CopiesUnusable) else ()
        unread = group.exchange(Unread(bad is not None, tuple(place.name for place in places)))
        if places:
            logger.warning("a version in memory is left aside: step=%d reason=%s", source.what.step, error)
        lost = {name for one in unread for name in one.copies}
        self._left_out |= lost
        if any(one.on_disk for one in unread):
            assert isinstance(source.what, Manifest)
            self._files.reject(
                source.what,
                bad or BadCheckpoint(source.what.step, source.what.file, "another rank says so"),
            )
            if bad is not None:
                warn_of(bad)
            return True
        return bool(lost)

    def _read(
        self, group: Group, source: Source, stack: contextlib.ExitStack
    ) -> tuple[Prepared | None, CheckpointError | None]:
        """All that this rank needs, or why not; nothing has changed yet."""
        step = source.what.step
        try:
            copies = self._opener(source, stack)
            if source.world_size == group.world_size:
                with contextlib.suppress(CheckpointMismatch):  # another mesh has other pieces
                    return self._prepared(copies.of_rank(group.rank), group, source), None
            return self._prepared(copies.of_all(), group, source), None
        except CheckpointError as refusal:
            return None, refusal
        except Exception as failure:
            return None, because(CheckpointError, f"step {step} cannot be loaded: {failure!r}", failure)

    def _prepared(self, copies: Mapping[int, OpenCopy], group: Group, source: Source) -> Prepared:
        return self._contents.parts.prepare(
            copies, group.rank, group.world_size, source.world_size, some=self._read_only
        )

    def _opener(self, source: Source, stack: contextlib.ExitStack) -> CopiesOnDisk | CopiesInMemory:
        if isinstance(source.what, Manifest):
            if not source.what.is_sharded:
                raise CheckpointMismatch(
                    f"step {source.what.step} in {self._files.directory} is of a state that was the same on all ranks: "
                    "give this script another directory, and load the file into its model and optimizer first"
                )
            return CopiesOnDisk(self._files, source.what, stack)
        return CopiesInMemory(self._env, self._memory, source, stack)

    def _restore_random_state(self, group: Group, source: Source, prepared: Prepared) -> None:
        state = prepared.own.get(RANDOM_STATE)
        if source.world_size != group.world_size:
            logger.warning(
                "random numbers start anew, the world size changed: step=%d saved=%d now=%d",
                source.what.step,
                source.world_size,
                group.world_size,
            )
        elif isinstance(state, torch.Tensor):
            rng.restore(state.numpy().tobytes())
        elif self._memory is not None and (
            noted := self._memory.records(source.version, source.world_size).get(group.rank)
        ):
            rng.restore(noted)
        else:
            logger.warning(
                "random state not restored, no rank has kept it: step=%d rank=%d",
                source.what.step,
                group.rank,
            )
