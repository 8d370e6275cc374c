"""Brings a copy that has all of a state to every rank: that of its node, mapped where it is, or another node's.

A copy in memory may lack the random states of the ranks: then each rank of its generation has written its own down,
and all that any node has of these is gathered. Once a state is loaded, every node has a copy of it that lacks nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Sequence
from io import BufferedReader

import torch

from ...errors import BadCheckpoint, CheckpointError
from ...ranks.group import Group
from ...state.sharding.parts import Prepared
from ...state.sharding.table import RANDOM_STATE
from ...storage.disk.checkpoint_files import CheckpointFiles, VerifiedCheckpoint
from ...storage.disk.manifests import Manifest
from ...storage.disk.old_format import sha256_of
from ...storage.memory.copy_header import Header
from ...storage.memory.slot_memory import SlotMemory
from ...storage.memory.slots import HeldSlot
from .node_sharing import Bytes, NodeSharing, SharedBytes, first_ranks
from .selection import Offer, Source, nodes_with

logger = logging.getLogger(__name__)

_RECORD = struct.Struct("!qq")  # rank and length, followed by that rank's random state


class WholeCopies:
    """What one rank has of them, for one choice. What it opens is closed with `stack`."""

    def __init__(
        self, group: Group, files: CheckpointFiles, memory: SlotMemory | None, stack: contextlib.ExitStack
    ) -> None:
        self._group = group
        self._files = files
        self._memory = memory
        self._stack = stack
        self._first_ranks: Sequence[int] = ()
        """By rank, who verifies the files for it."""
        self._verified: VerifiedCheckpoint | None = None
        self._offers: Sequence[Offer] = ()
        self._held: HeldSlot | None = None
        self._records: dict[int, bytes] = {}
        self._lacks_random_states = False

    # ---------------------------------------------------------------- what is here

    def found(self, verified: VerifiedCheckpoint | None, first: Sequence[int]) -> None:
        """On disk, what this rank has looked at; `first` as of `first_ranks`, by the places of their files."""
        self._verified, self._first_ranks = verified, first
        if verified is not None:
            self._stack.enter_context(verified.stream)

    def all_hold(self, source: Source, offers: Sequence[Offer]) -> bool:
        """Open this node's copy. False: on some node it cannot be read, which is not offered again."""
        wanted = source.what
        assert isinstance(wanted, Header)
        self._offers = offers
        memory, problem = self._memory, ""
        node = memory.place.node if memory is not None else ""
        if memory is not None and node in nodes_with(wanted, offers):
            try:
                self._held = memory.hold_verified(wanted.version)
            except (OSError, ValueError) as error:
                problem = str(error) or repr(error)
                logger.warning("a copy in memory is left aside: step=%d reason=%s", wanted.step, problem)
        problems = self._group.gather(problem.encode())
        broken = {offer.node for offer, text in zip(offers, problems, strict=True) if text}
        if broken:
            if self._held is not None:
                with self._held:
                    self._held = None
            if memory is not None and memory.keeps_common and node in broken:
                memory.drop(wanted.version)
        elif self._held is not None:
            self._stack.enter_context(self._held)
        return not broken

    # ---------------------------------------------------------------- bringing it here

    def bring(self, source: Source) -> SharedBytes:
        """All ranks call it. Raises CheckpointError on all of them."""
        if isinstance(source.what, Header):
            return self._bring_copy(source.rank, source.what)
        if source.what.is_one_file:
            return self._bring_file(source.rank, source.what)
        return self._bring_part(source.rank, source.what)

    def _bring_part(self, owner: int, wanted: Manifest) -> SharedBytes:
        mine = self._own_file(wanted)
        if mine is None and not self._is_first:
            with contextlib.suppress(BadCheckpoint):
                copy = self._stack.enter_context(self._files.open_rank(wanted, 0))
                mine = SharedBytes.of_part(copy.stream, copy.footer)
        sharing = NodeSharing(self._group, self._memory, self._first_ranks, self._stack)
        return sharing.transfer(owner, self._header_of(wanted), mine, _identity(mine))

    def _bring_file(self, owner: int, wanted: Manifest) -> SharedBytes:
        """Of the version before. No slot can have it."""
        mine = self._own_file(wanted)
        if mine is None and not self._is_first:
            with contextlib.suppress(OSError):
                mine = SharedBytes(self._stack.enter_context(self._files.open_file(wanted)))

        def check(received: Bytes) -> None:
            if sha256_of(received) != wanted.sha256:
                raise CheckpointError(f"step {wanted.step} broke on its way from rank {owner}: start again")

        sharing = NodeSharing(self._group, None, self._first_ranks, self._stack)
        return sharing.transfer(owner, self._header_of(wanted), mine, _identity(mine), check)

    @property
    def _is_first(self) -> bool:
        return self._first_ranks[self._group.rank] == self._group.rank

    def _own_file(self, wanted: Manifest) -> SharedBytes | None:
        verified = self._verified
        if verified is None or verified.manifest.sha256 != wanted.sha256:
            return None
        if verified.footer is None:
            return SharedBytes(verified.stream)
        return SharedBytes.of_part(verified.stream, verified.footer)

    def _header_of(self, wanted: Manifest) -> Header:
        generation = self._memory.place.generation if self._memory is not None else 0
        return Header(
            wanted.step, generation, wanted.step, wanted.world_size, wanted.size, run=self._files.run.id
        )

    def _bring_copy(self, owner: int, wanted: Header) -> SharedBytes:
        held, here = self._held, wanted
        self._records = self._gather_records(wanted)
        mine = None
        if held is not None:
            here, mine = held.header, SharedBytes.of_slot(held)
        self._lacks_random_states = bool(here.rng_holes)
        holding = nodes_with(wanted, self._offers)
        if any(offer.node not in holding for offer in self._offers):
            nodes = first_ranks([offer.node for offer in self._offers])
            sharing = NodeSharing(self._group, self._memory, nodes, self._stack)
            return sharing.transfer(owner, wanted, mine, "copy")
        assert mine is not None
        return mine

    def _gather_records(self, wanted: Header) -> dict[int, bytes]:
        """Every rank's random state after that step, as far as any node has written it down."""
        if not any(copy.header.rng_holes for offer in self._offers for copy in offer.copies):
            return {}
        memory = self._memory
        mine = (
            memory.records(wanted.version, wanted.world_size)
            if memory is not None and memory.keeps_common
            else {}
        )
        raw = b"".join(_RECORD.pack(rank, len(state)) + state for rank, state in mine.items())
        found: dict[int, bytes] = {}
        for part in self._group.gather(raw):
            offset = 0
            while offset < len(part):
                rank, length = _RECORD.unpack_from(part, offset)
                offset += _RECORD.size + length
                found[rank] = part[offset - length : offset]
        return found

    # ---------------------------------------------------------------- what is known of it

    def random_state(self, prepared: Prepared) -> bytes | None:
        """Of this rank, after the state that was brought; None: no rank has kept it."""
        if self._lacks_random_states:
            return self._records.get(self._group.rank)
        state = prepared.own.get(RANDOM_STATE)
        return state.numpy().tobytes() if isinstance(state, torch.Tensor) else None

    def keep(self, source: Source) -> None:
        """Let this node's memory have the whole state too: the node that had it until now may be the next to go."""
        memory, wanted = self._memory, source.what
        if memory is None or not memory.keeps_common or not isinstance(wanted, Header):
            return
        try:
            memory.abandon_newer(wanted.version)
            memory.fill(wanted.version, self._records)
        except (OSError, ValueError) as error:
            logger.warning(
                "the loaded state is not in this node's memory: step=%d reason=%s", wanted.step, error
            )


def _identity(mine: SharedBytes | None) -> str:
    """Of an open file: equal in two processes of a machine for the same content only."""
    if mine is None:
        return ""
    assert isinstance(mine.stream, BufferedReader)
    found = os.fstat(mine.stream.fileno())
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"
