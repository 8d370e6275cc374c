"""Loads the newest state of which every shard is somewhere: in the memory of this node or of others, or on disk.

All ranks choose the same (`shard_selection`). Each then reads what it needs of it, and nothing changes before all have
read. A rank whose place in the world, and whose part of the state, are those of an old rank maps that rank's copy.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ...errors import BadCheckpoint, CheckpointError, CheckpointMismatch, NotSaved, Unconfirmed
from ...ranks.group import Group, current_group
from ...ranks.refusals import because, raise_together, together
from ...state import rng
from ...state.sharding.parts import Prepared
from ...state.sharding.reading import OpenCopy
from ...steps import progress
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.disk.manifests import Manifest
from ...storage.disk.ownership import MOST_STEPS, Former
from ...storage.memory.shard_memory import ShardMemory
from ...wire.environment import WorkerEnv
from ...wire.messages import MAX_REASON_CHARS, LoadResult, Tier
from ..loading.checkpoint_selection import BadState
from ..loading.node_sharing import first_ranks
from ..loading.shard_copies import shard_copies_in
from ..loading.shard_selection import (
    CopyName,
    ShardOffer,
    ShardSource,
    choose_shards,
    unusable,
    without,
)
from .contents import RANDOM_STATE, ShardContents
from .open_copies import CopiesInMemory, CopiesOnDisk, CopiesUnusable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unread:
    """What one rank could not read of the chosen version: the checkpoint on disk, or these copies in memory."""

    on_disk: bool = False
    copies: tuple[CopyName, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedShards:
    """`version` is that of the copies in memory; None: it came from disk, or there was nothing, and step is 0."""

    step: int
    version: tuple[int, int] | None = None


class ShardLoading:
    """As one rank takes part in it."""

    def __init__(
        self,
        files: CheckpointFiles,
        contents: ShardContents,
        memory: ShardMemory | None,
        env: WorkerEnv,
        *,
        read_only: bool,
    ) -> None:
        """`read_only`: training does not go on from what is loaded, so nothing is claimed or reported."""
        self._files = files
        self._contents = contents
        self._memory = memory
        self._env = env
        self._read_only = read_only
        self._report = progress.Silent() if read_only else progress
        self._bad_state = None if read_only else BadState.of(env, files.run.id)
        self._left_out: set[CopyName] = set()
        """Copies that some rank could not read; the same on all ranks."""
        self._speaks_for_node = not read_only and env.local_rank == 0

    def load(self, finish_last_write: Callable[[], None]) -> LoadedShards:
        """Raises what `Checkpointer.load` raises; `finish_last_write` what became of a save that was under way."""
        self._report.loading()
        group, started_s = current_group(), time.monotonic()

        def report(step: int, result: LoadResult, tier: Tier = "local") -> None:
            self._report.checkpoint_load(step, result, time.monotonic() - started_s, tier)

        step, unreadable = 0, False
        try:
            together(group, lambda: self._prepare(finish_last_write), "nothing loaded")
            self._on_rank_0(group, self._files.claim.await_former_run)
            while True:
                source, offers = self._choose(group, report)
                if source is None:
                    break
                step = source.what.step
                self._report.load_chosen(step)
                unreadable = True
                if self._take(group, source):
                    break
            unreadable = False
            runs = {copy.header.run for offer in offers for copy in offer.copies}
            related = tuple(Former(run, MOST_STEPS) for run in sorted(runs))
            in_memory = source is not None and not isinstance(source.what, Manifest)
            self._on_rank_0(group, lambda: self._files.claim.take(step, related, elsewhere=in_memory))
        except CheckpointError:
            self._files.claim.release_lock()
            if not unreadable:
                self._report.load_refused()
            report(step, "error")
            raise
        if group.rank and self._speaks_for_node:
            self._files.claim.share_lock()
        report(step, "none" if source is None else "ok", "memory" if in_memory else "local")
        return LoadedShards(step, source.version if source is not None and in_memory else None)

    def _prepare(self, finish_last_write: Callable[[], None]) -> None:
        """All parts can be carried, of the saves before none is under way, and no agent holds locks of a past run."""
        self._contents.refuse()
        if self._speaks_for_node:
            self._files.claim.release_former_locks()
        with contextlib.suppress(NotSaved, Unconfirmed):  # the log has it
            finish_last_write()

    def _on_rank_0(self, group: Group, part: Callable[[], None]) -> None:
        """Let rank 0 do this, and raise on every rank what it raises."""
        does = group.rank == 0 and not self._read_only
        together(group, part if does else lambda: None, self._files.directory)

    # ---------------------------------------------------------------- choosing

    def _choose(
        self, group: Group, report: Callable[[int, LoadResult], None]
    ) -> tuple[ShardSource | None, list[ShardOffer]]:
        """The disk is looked at only where it could win: that takes longer than all else. Raises NoUsableCheckpoint."""
        manifest: Manifest | None = None
        with contextlib.suppress(OSError):
            manifest = self._files.newest_manifest(self._unwanted)
        looked = False
        reasons: tuple[str, ...] = ()
        while True:
            offers = [
                without(offer, self._left_out) for offer in group.exchange(self._offer(manifest, reasons))
            ]
            source = None
            if looked or any(offer.copies for offer in offers):
                source = choose_shards(offers, self._bad_state)
            if looked or (source is not None and not isinstance(source.what, Manifest)):
                break
            place = f"{self._env.node}:{self._files.directory}" if self._env.node else ""
            first = first_ranks([raw.decode() for raw in group.gather(place.encode())])
            manifest, reasons = self._look(report) if first[group.rank] == group.rank else (None, ())
            looked = True
        if group.rank == 0:
            for one in unusable(offers, source, self._bad_state):
                logger.warning("%s", one.reason)
            self._warn_if_set_back(source)
        return source, offers

    def _unwanted(self, manifest: Manifest) -> bool:
        bad = self._bad_state
        return bad is not None and bad.covers(manifest, foreign=not self._files.claim.is_ours(manifest))

    def _offer(self, manifest: Manifest | None, reasons: tuple[str, ...]) -> ShardOffer:
        foreign = manifest is not None and not self._files.claim.is_ours(manifest)
        env = self._env
        has_some = env.memory and self._speaks_for_node
        copies = shard_copies_in(env.memory, self._files.directory) if has_some else ()
        return ShardOffer(
            manifest, reasons, copies, env.node, env.memory_address, self._files.run.id, foreign
        )

    def _look(self, report: Callable[[int, LoadResult], None]) -> tuple[Manifest | None, tuple[str, ...]]:
        """The newest good checkpoint on disk, and what is wrong with those before it."""
        try:
            found, bad = self._files.find(self._unwanted)
        except OSError as error:
            return None, (f"{self._files.directory}: {error}"[:MAX_REASON_CHARS],)
        for one in bad:
            self._warn_of(one)
            report(one.step, "corrupt")
        if found is not None:
            found.stream.close()
        return found.manifest if found is not None else None, tuple(
            str(one)[:MAX_REASON_CHARS] for one in bad
        )

    @staticmethod
    def _warn_of(bad: BadCheckpoint) -> None:
        logger.warning(
            "checkpoint does not verify, trying the next older one: step=%d reason=%s", bad.step, bad
        )

    def _warn_if_set_back(self, source: ShardSource | None) -> None:
        bad = self._bad_state
        if bad is None or source is None:
            return
        if bad.covers(source.what):
            logger.warning(
                "there is no older state to go back to: step=%d bad=%d", source.what.step, bad.step
            )
        else:
            logger.warning("going on from an older state: step=%d bad=%d", source.what.step, bad.step)

    # ---------------------------------------------------------------- taking

    def _take(self, group: Group, source: ShardSource) -> bool:
        """Bring the chosen state here and apply it. False, on all ranks: it cannot be read, choose another."""
        with contextlib.ExitStack() as stack:
            prepared, error = self._read(group, source, stack)
            if self._leave_out(group, source, error):
                return False
            raise_together(group, error)
            assert prepared is not None
            together(group, prepared.apply, f"step {source.what.step} cannot be loaded")
            self._restore_random_state(group, source, prepared)
            if self._memory is not None and not isinstance(source.what, Manifest):
                self._memory.abandon_newer(source.version)
        return True

    def _leave_out(self, group: Group, source: ShardSource, error: CheckpointError | None) -> bool:
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
                self._warn_of(bad)
            return True
        return bool(lost)

    def _read(
        self, group: Group, source: ShardSource, stack: contextlib.ExitStack
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

    def _prepared(self, copies: Mapping[int, OpenCopy], group: Group, source: ShardSource) -> Prepared:
        return self._contents.parts.prepare(copies, group.rank, group.world_size, source.world_size)

    def _opener(self, source: ShardSource, stack: contextlib.ExitStack) -> CopiesOnDisk | CopiesInMemory:
        if isinstance(source.what, Manifest):
            if not source.what.is_sharded:
                raise CheckpointMismatch(
                    f"step {source.what.step} in {self._files.directory} is of a state that was the same on all ranks: "
                    "`elastic-agent convert` makes a sharded one of it"
                )
            return CopiesOnDisk(self._files, source.what, stack)
        return CopiesInMemory(self._env, self._memory, source, stack)

    def _restore_random_state(self, group: Group, source: ShardSource, prepared: Prepared) -> None:
        state = prepared.own.get(RANDOM_STATE)
        if source.world_size != group.world_size:
            logger.warning(
                "random states not restored, the world size changed: step=%d saved=%d now=%d",
                source.what.step,
                source.world_size,
                group.world_size,
            )
        elif isinstance(state, torch.Tensor):
            rng.restore(state.numpy().tobytes())
        else:
            logger.warning(
                "random state not restored, no rank has kept it: step=%d rank=%d",
                source.what.step,
                group.rank,
            )
