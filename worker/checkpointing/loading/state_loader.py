"""Loads the newest state of which all is somewhere: in the memory of this node or of others, or on disk.

All ranks choose the same (`selection`). Each then reads what it needs of it, and nothing changes before all have read.
A rank whose place in the world, and whose part of the state, are those of an old rank maps that rank's copy; a copy
that has all of a state is brought to every node once (`whole_copies`).

All ranks take the same way through here, whatever goes wrong on one: a rank that left alone would let the others wait.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...errors import BadCheckpoint, CheckpointError, CheckpointMismatch, NotSaved, Unconfirmed
from ...ranks.group import Group, all_did, because, current_group, raise_together, together, tried
from ...state import rng
from ...state.sharding.parts import Prepared, ShardedParts
from ...state.sharding.reading import OpenCopy
from ...state.state_dicts import Part, modules_in, refuse_code
from ...steps import progress
from ...storage.disk.checkpoint_files import CheckpointFiles, VerifiedCheckpoint
from ...storage.disk.manifests import Manifest
from ...storage.memory import rank_state
from ...storage.memory.copy_header import Header
from ...storage.memory.slot_memory import SlotMemory
from ...wire.environment import WorkerEnv
from ...wire.messages import MAX_REASON_CHARS, LoadResult, Tier
from .node_sharing import Bytes, SharedBytes, first_ranks
from .offered_copies import copies_in, offers_of_standbys
from .open_copies import CopiesInMemory, CopiesOnDisk, CopiesUnusable, CopyHere
from .selection import BadState, CopyName, Offer, Source, choose_source, unusable, without
from .whole_copies import WholeCopies

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


class Loadable(Protocol):
    """What a Checkpointer has: of a sharded state, or of one that is the same on all ranks."""

    parts: ShardedParts
    given: dict[str, Part]

    def refuse(self) -> None:
        """Raises CheckpointError for parts that cannot be carried."""


@dataclass(frozen=True, slots=True)
class Unread:
    """What one rank could not read of the chosen version: the checkpoint on disk, or these copies in memory."""

    on_disk: bool = False
    copies: tuple[CopyName, ...] = ()


class StateLoader:
    """As one rank takes part in it."""

    def __init__(
        self,
        files: CheckpointFiles,
        contents: Loadable,
        memory: SlotMemory | None,
        env: WorkerEnv,
        *,
        is_sharded: bool,
        read_only: bool,
    ) -> None:
        """`read_only`: training does not go on from what is loaded, so nothing is claimed or reported."""
        self._files = files
        self._contents = contents
        self._memory = memory
        self._env = env
        self._is_sharded = is_sharded
        self._read_only = read_only
        self._report = progress.Silent() if read_only else progress
        self._bad_state = None if read_only else BadState.of(env, files.run.id)
        self._speaks_for_node = not read_only and env.local_rank == 0
        self._left_out: set[CopyName] = set()
        """Copies that some rank could not read; the same on all ranks."""
        self._began_s = 0.0
        self._step = 0
        """That is being loaded."""
        self._unreadable = False
        """What was chosen cannot be read: that is the state's fault, and no refusal."""

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
        self._contents.refuse()
        if not self._read_only:
            refuse_code(self._contents.given)
        if self._speaks_for_node:
            self._files.claim.release_former_locks()
        with contextlib.suppress(NotSaved, Unconfirmed):  # the log has it
            finish_last_write()

    def _bring(self, group: Group) -> LoadedState:
        """Choose a state, bring it here and apply it. Raises CheckpointError, on all ranks."""
        while True:
            self._unreadable = False
            with contextlib.ExitStack() as stack:
                wholes = WholeCopies(group, self._files, self._memory, stack)
                source = self._choose(group, wholes)
                if source is None:
                    return LoadedState()
                self._step = source.what.step
                self._report.load_chosen(self._step)
                try:
                    is_taken = self._take(group, source, wholes, stack)
                except CheckpointMismatch:
                    self._unreadable = False
                    raise
                if is_taken:
                    self._unreadable = False
                    return LoadedState(source.what)

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

    # ---------------------------------------------------------------- choosing

    def _choose(self, group: Group, wholes: WholeCopies) -> Source | None:
        """Raises NoUsableCheckpoint."""
        standbys = offers_of_standbys(self._env, self._files.directory, group) if self._is_sharded else ()

        def exchange(manifest: Manifest | None, reasons: Reasons) -> list[Offer]:
            of_ranks = group.exchange(self._offer(manifest, reasons))
            return [without(offer, self._left_out) for offer in (*of_ranks, *standbys)]

        def look() -> tuple[Manifest | None, Reasons]:
            found, reasons, first = self._look(group)
            wholes.found(found, first)
            return (found.manifest if found is not None else None), reasons

        source, offers = choose_together(
            self._claimed(),
            exchange,
            lambda offers: choose_source(offers, self._bad_state),
            look,
            lambda source, offers: self._is_sharded or wholes.all_hold(source, offers),
        )
        if group.rank == 0:
            for one in unusable(offers, source, self._bad_state):
                logger.warning("%s", one.reason)
            if source is not None:
                self._warn_if_set_back(source.what)
        return source

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

    # ---------------------------------------------------------------- taking

    def _take(self, group: Group, source: Source, wholes: WholeCopies, stack: contextlib.ExitStack) -> bool:
        """Bring the chosen state here and apply it. False, on all ranks: it cannot be read, choose another."""
        step = source.what.step
        together(group, self._contents.parts.begin_load, f"step {step} cannot be loaded")
        in_memory = isinstance(source.what, Header)
        is_whole = not self._is_sharded and (not isinstance(source.what, Manifest) or source.what.parts == 1)
        brought = None
        if is_whole:
            brought, error = tried(lambda: wholes.bring(source), f"step {step} cannot be loaded")
            raise_together(group, error)
        self._unreadable = True
        prepared, error = self._read(group, source, brought, stack)
        if self._leave_out(group, source, error):
            return False
        raise_together(group, error)
        assert prepared is not None
        together(group, lambda: self._apply(group, source, prepared, wholes), f"step {step} cannot be loaded")
        if is_whole:
            wholes.keep(source)
        elif self._memory is not None and in_memory:
            self._memory.abandon_newer(source.version)
        return True

    def _apply(self, group: Group, source: Source, prepared: Prepared, wholes: WholeCopies) -> None:
        prepared.apply()
        if not self._read_only:
            self._restore_random_state(group, source, prepared, wholes)

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
        self, group: Group, source: Source, brought: SharedBytes | None, stack: contextlib.ExitStack
    ) -> tuple[Prepared | None, CheckpointError | None]:
        """All that this rank needs, or why not; nothing has changed yet."""
        step = source.what.step
        try:
            if isinstance(source.what, Manifest) and source.what.is_one_file:
                return self._prepared_file(group, source.what, brought), None
            copies = self._opener(source, brought, stack)
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

    def _prepared_file(self, group: Group, manifest: Manifest, brought: SharedBytes | None) -> Prepared:
        """Of the version before, see `old_format`."""
        if brought is None:
            raise CheckpointMismatch(
                f"step {manifest.step} in {self._files.directory} is of a state that was the same on all ranks, and of "
                "an older version: give this script another directory, and load the file into its model and "
                "optimizer first"
            )
        payload = load_mapped(brought.stream)
        return self._contents.parts.prepare_file(payload, group.rank, group.world_size, some=self._read_only)

    def _opener(
        self, source: Source, brought: SharedBytes | None, stack: contextlib.ExitStack
    ) -> CopiesOnDisk | CopiesInMemory | CopyHere:
        if brought is not None:
            return CopyHere(brought)
        if isinstance(source.what, Manifest):
            return CopiesOnDisk(self._files, source.what, stack)
        return CopiesInMemory(self._env, self._memory, source, stack)

    def _restore_random_state(
        self, group: Group, source: Source, prepared: Prepared, wholes: WholeCopies
    ) -> None:
        what, memory = source.what, self._memory
        if source.world_size != group.world_size:
            logger.warning(
                "random numbers start anew, the world size changed: step=%d saved=%d now=%d",
                what.step,
                source.world_size,
                group.world_size,
            )
            return
        if isinstance(what, Header) and what.partial and memory is not None:
            own = rank_state.find(memory.folder, group.rank, group.world_size, what.generation, what.step)
            if own is not None:
                rng.restore(own.random_state)
                rank_state.restore_buffers(own, modules_in(self._contents.given))
                return
        state = wholes.random_state(prepared)
        if state is None and memory is not None:
            state = memory.records(source.version, source.world_size).get(group.rank)
        if state is not None:
            rng.restore(state)
        else:
            logger.warning(
                "random state not restored, no rank has kept it: step=%d rank=%d", what.step, group.rank
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

    def _look(self, group: Group) -> tuple[VerifiedCheckpoint | None, Reasons, list[int]]:
        """The newest good checkpoint, and what is wrong with those before it; neither where another rank looks. And by
        rank, who looks."""
        first = first_ranks([raw.decode() for raw in group.gather(self._place().encode())])
        if first[group.rank] != group.rank:
            return None, (), first
        try:
            found, bad = self._files.find(self._is_unwanted, verify=not self._is_sharded)
        except OSError as error:
            return None, (f"{self._files.directory}: {error}"[:MAX_REASON_CHARS],), first
        for one in bad:
            warn_of(one)
            self._report_load(one.step, "corrupt")
        return found, tuple(str(one)[:MAX_REASON_CHARS] for one in bad), first


def load_mapped(stream: Bytes) -> Any:
    """What `torch.save` has written to an open file; its tensors are the file's own memory, and must not outlive it."""
    try:
        return torch.load(
            f"/proc/self/fd/{stream.fileno()}", map_location="cpu", mmap=True, weights_only=True
        )
    except (OSError, RuntimeError):  # a file system that cannot map
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)


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
