"""Brings every rank the state of one step: the newest that any of them has, in its node's memory or on its disk.

A checkpoint on disk is believed only after all of it was read, which takes longer than everything else together. So
the ranks first exchange what their disks claim to have; only if that could win over the memory is it verified.

All ranks take the same way through here, whatever goes wrong on one: a rank that left alone would let the others wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

from ...errors import BadCheckpoint, CheckpointError, CheckpointMismatch
from ...ranks.group import Group
from ...ranks.refusals import together
from ...storage.disk.checkpoint_files import CheckpointFiles, VerifiedCheckpoint, digest
from ...storage.disk.manifests import Manifest
from ...storage.disk.ownership import MOST_STEPS, Former, Ownership
from ...storage.memory.copy_header import Header
from ...storage.memory.node_memory import NodeMemory, load_mapped
from ...storage.memory.slots import HeldSlot
from ...wire.messages import MAX_REASON_CHARS
from .checkpoint_selection import BadState, Offer, Source, choose_source, nodes_with, runs_in_memory
from .node_sharing import Bytes, NodeSharing, first_ranks

logger = logging.getLogger(__name__)

_RECORD = struct.Struct("!qq")  # rank and length, followed by that rank's random state


@dataclass(frozen=True, slots=True)
class Loaded:
    """What reached this rank: the state, and the random state of the same rank when it was saved, if that is known."""

    payload: Mapping[str, Any]
    """The tensors are mapped, and not to be kept."""
    random_state: bytes | None
    world_size: int
    """When it was saved."""
    partial: bool = False
    """Survivors of a failure have saved it: what each rank alone knew is in its rank_state file."""
    generation: int = 0
    """Of whose memory it came; 0 from a disk."""


class Restore:
    """One load, as one rank takes part in it."""

    def __init__(
        self,
        group: Group,
        files: CheckpointFiles,
        memory: NodeMemory | None,
        node: str,
        bad: Callable[[BadCheckpoint], None],
        chosen: Callable[[int], None],
        bad_state: BadState | None = None,
    ) -> None:
        """`bad` is called with each checkpoint on this rank's disk that does not verify, `chosen` with the step that
        is about to be read; `bad_state` is taken last.
        """
        self._group = group
        self._files = files
        self._memory = memory
        self._node = node
        self._bad = bad
        self._chosen = chosen
        self._bad_state = bad_state
        self._stack = contextlib.ExitStack()
        self._mine: VerifiedCheckpoint | None = None
        self._held: HeldSlot | None = None
        self._offers: list[Offer] = []
        self._first_ranks: list[int] = []
        """By rank, who verifies the files for it."""
        self.source: Source | None = None
        """Whose state it is, once `choose` has found out."""
        self.unreadable = False
        """What has reached this rank could not be read: that is the state's fault, and no refusal."""

    def __enter__(self) -> Restore:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def choose(self) -> Source | None:
        """None when no rank has anything. Raises NoUsableCheckpoint."""
        manifest, looked = self._claim(), False
        reasons: tuple[str, ...] = ()
        while True:
            self._offers = self._exchange(manifest, reasons)
            informed = looked or any(offer.copies for offer in self._offers)
            self.source = choose_source(self._offers, self._bad_state) if informed else None
            if self.source is not None and isinstance(self.source.what, Header):
                if self._all_hold(self.source.what):
                    return self.source
            elif looked:
                return self.source
            else:
                self._first_ranks = first_ranks(
                    [raw.decode() for raw in self._group.gather(self._place().encode())]
                )
                if self._first_ranks[self._group.rank] == self._group.rank:
                    self._mine, reasons = self._look()
                manifest, looked = self._mine.manifest if self._mine is not None else None, True

    @property
    def is_elsewhere(self) -> bool:
        """Whether the chosen state does not lie in rank 0's directory."""
        return self.source is not None and (isinstance(self.source.what, Header) or self.source.rank != 0)

    def related_runs(self) -> tuple[Former, ...]:
        """Other runs that this job's state comes from, each up to a step; all ranks call it.

        Runs in memory are this job's. Of a state from elsewhere it is the run that made it, and what the owner of its
        directory has.
        """
        found = [Former(run, MOST_STEPS) for run in runs_in_memory(self._offers)]
        if self.source is None or not self.is_elsewhere:
            return tuple(found)
        what = self.source.what
        found.append(Former(what.run, what.step))
        if isinstance(what, Manifest) or self._offers[0].foreign:
            for raw in filter(None, self._group.gather(self._heritage(what))):
                found += (one for one in Ownership.from_json(raw).before if one.step >= 0)
        return tuple(found)

    def _heritage(self, what: Manifest | Header) -> bytes:
        owner = self._files.claim.owner()
        if owner is None or owner.run.id not in (self._files.run.id, what.run):
            return b""
        return owner.to_json()

    def load(self, apply: Callable[[Loaded], None]) -> None:
        """Bring the chosen state here and apply it, or raise on every rank."""
        assert self.source is not None
        rank, what = self.source.rank, self.source.what

        def load() -> None:
            try:
                if isinstance(what, Header):
                    self._load_copy(rank, what, apply)
                else:
                    self._load_file(rank, what, apply)
            except CheckpointError:
                raise
            except Exception:
                self.unreadable = True
                raise

        together(self._group, load, f"step {what.step} cannot be loaded")

    def _read(self, stream: Bytes, step: int) -> Any:
        """The state that has reached this rank. From here on what is in it may end this process."""
        self._chosen(step)
        return load_mapped(stream)

    def _exchange(self, manifest: Manifest | None, reasons: tuple[str, ...]) -> list[Offer]:
        """What each rank has, by rank."""
        memory = self._memory
        copies = memory.copies() if memory is not None and memory.copies_for_node else ()
        foreign = manifest is not None and not self._files.claim.is_ours(manifest)
        node = memory.place.node if memory is not None else ""
        offer = Offer(manifest, reasons, copies, node, self._files.run.id, foreign)
        return self._group.exchange(offer)

    # ---------------------------------------------------------------- from disk

    def _place(self) -> str:
        """Ranks in the same place see the same files: what one has verified the others need not read."""
        return f"{self._node}:{self._files.directory}" if self._node else ""

    def _unwanted(self, manifest: Manifest) -> bool:
        bad = self._bad_state
        return bad is not None and bad.covers(manifest, foreign=not self._files.claim.is_ours(manifest))

    def _claim(self) -> Manifest | None:
        """The newest checkpoint that this rank's disk claims to have."""
        with contextlib.suppress(OSError):
            return self._files.newest_manifest(self._unwanted)
        return None

    def _look(self) -> tuple[VerifiedCheckpoint | None, tuple[str, ...]]:
        """The newest good checkpoint in this rank's directory, and what is wrong with those before it."""
        try:
            found, bad = self._files.find(self._unwanted)
        except OSError as error:
            return None, (f"{self._files.directory}: {error}"[:MAX_REASON_CHARS],)
        for one in bad:
            self._bad(one)
        if found is not None:
            self._stack.enter_context(found.stream)
        return found, tuple(str(one)[:MAX_REASON_CHARS] for one in bad)

    def _load_file(self, owner: int, wanted: Manifest, apply: Callable[[Loaded], None]) -> None:
        group, memory = self._group, self._memory
        if wanted.is_sharded:
            raise CheckpointMismatch(
                f"step {wanted.step} in {self._files.directory} is of a sharded state, and this script's is the same "
                "on all ranks: `elastic-agent convert` makes one of it, or give this script another directory"
            )
        mine: BufferedReader | None = None
        if self._first_ranks[group.rank] == group.rank:
            if self._mine is not None and self._mine.manifest.sha256 == wanted.sha256:
                mine = self._mine.stream
        else:
            with contextlib.suppress(OSError):
                mine = self._stack.enter_context(self._files.open_data(wanted))

        def check(received: Bytes) -> None:
            if digest(received) != wanted.sha256:
                raise CheckpointError(f"step {wanted.step} broke on its way from rank {owner}: start again")

        generation = memory.place.generation if memory is not None else 0
        run = self._files.run.id
        header = Header(wanted.step, generation, wanted.step, wanted.world_size, wanted.size, run=run)
        sharing = NodeSharing(group, memory, self._first_ranks, self._stack)
        payload = self._read(sharing.transfer(owner, header, mine, _identity(mine), check), wanted.step)
        apply(Loaded(payload, _random_state(payload, group.rank), len(payload["rng"])))

    # ---------------------------------------------------------------- from memory

    def _all_hold(self, wanted: Header) -> bool:
        """Open this node's copy. False: on some node it cannot be read, which is not offered again."""
        memory, problem = self._memory, ""
        node = memory.place.node if memory is not None else ""
        if memory is not None and node in nodes_with(wanted, self._offers):
            try:
                self._held = self._stack.enter_context(memory.hold(wanted.version))
            except (OSError, ValueError) as error:
                problem = str(error) or repr(error)
                logger.warning("a copy in memory is left aside: step=%d reason=%s", wanted.step, problem)
        problems = self._group.gather(problem.encode())
        broken = {offer.node for offer, text in zip(self._offers, problems, strict=True) if text}
        if broken:
            self._stack.pop_all().close()
            self._held = None
            if memory is not None and memory.copies_for_node and node in broken:
                memory.drop(wanted.version)
        return not broken

    def _load_copy(self, owner: int, wanted: Header, apply: Callable[[Loaded], None]) -> None:
        group, memory, held = self._group, self._memory, self._held
        records = self._gather_records(wanted)
        stream = held.stream if held is not None else None
        holding = nodes_with(wanted, self._offers)
        there: Bytes | None = stream
        if any(offer.node not in holding for offer in self._offers):
            nodes = first_ranks([offer.node for offer in self._offers])
            there = NodeSharing(group, memory, nodes, self._stack).transfer(
                owner, wanted, stream, "copy", lambda _: None
            )
        assert there is not None
        payload = self._read(there, wanted.step)
        here = wanted if held is None else held.header
        state = records.get(group.rank) if here.rng_holes else _random_state(payload, group.rank)
        apply(Loaded(payload, state, wanted.world_size, wanted.partial, wanted.generation))
        if memory is not None and memory.copies_for_node:
            self._keep(memory, wanted, records)

    def _gather_records(self, wanted: Header) -> dict[int, bytes]:
        """Every rank's random state after that step, as far as any node has written it down."""
        if not any(copy.header.rng_holes for offer in self._offers for copy in offer.copies):
            return {}
        memory = self._memory
        mine = memory.records(wanted) if memory is not None and memory.copies_for_node else {}
        raw = b"".join(_RECORD.pack(rank, len(state)) + state for rank, state in mine.items())
        found: dict[int, bytes] = {}
        for part in self._group.gather(raw):
            offset = 0
            while offset < len(part):
                rank, length = _RECORD.unpack_from(part, offset)
                offset += _RECORD.size + length
                found[rank] = part[offset - length : offset]
        return found

    def _keep(self, memory: NodeMemory, wanted: Header, records: dict[int, bytes]) -> None:
        """Let this node's memory have the whole state too: the node that had it until now may be the next to go."""
        try:
            memory.abandon_newer(wanted.version)
            memory.fill(wanted.version, records)
        except (OSError, ValueError) as error:
            logger.warning(
                "the loaded state is not in this node's memory: step=%d reason=%s", wanted.step, error
            )


def _identity(stream: BufferedReader | None) -> str:
    """Of an open file: equal in two processes of a machine for the same content only."""
    if stream is None:
        return ""
    found = os.fstat(stream.fileno())
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


def _random_state(payload: Mapping[str, Any], rank: int) -> bytes | None:
    states = payload["rng"]
    return bytes(states[rank].tolist()) if rank < len(states) else None
