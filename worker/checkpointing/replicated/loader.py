"""Loads a state that is the same on all ranks: the newest that any of them has, in its node's memory or on its disk."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

import torch

from ...errors import CheckpointError, CheckpointMismatch
from ...ranks.group import Group, together
from ...state import rng
from ...state.kinds import refuse_sharded
from ...state.rank_parts import Rules, states_for
from ...state.state_dicts import Part, load_into, modules_in, refuse_code
from ...storage.disk.checkpoint_files import CheckpointFiles, VerifiedCheckpoint, digest
from ...storage.disk.manifests import Manifest
from ...storage.memory import rank_state
from ...storage.memory.copy_header import Header
from ...storage.memory.slot_memory import SlotMemory
from ...storage.memory.slots import HeldSlot
from ...wire.environment import WorkerEnv
from ..loading.node_sharing import Bytes, NodeSharing, first_ranks
from ..loading.selection import Offer, Source, choose_source, nodes_with
from ..loading.state_loader import LoadedState, Reasons, StateLoader, choose_together
from .contents import Contents

logger = logging.getLogger(__name__)

_RECORD = struct.Struct("!qq")  # rank and length, followed by that rank's random state


class Loader(StateLoader):
    _is_sharded = False

    def __init__(
        self,
        files: CheckpointFiles,
        contents: Contents,
        memory: SlotMemory | None,
        env: WorkerEnv,
        *,
        read_only: bool,
    ) -> None:
        super().__init__(files, memory, env, read_only=read_only)
        self._contents = contents
        self._stack = contextlib.ExitStack()
        """What is open until this load ends."""
        self._mine: VerifiedCheckpoint | None = None
        self._held: HeldSlot | None = None
        self._offers: list[Offer] = []

    def _refuse(self) -> None:
        refuse_sharded(self._contents.parts)
        if not self._read_only:
            refuse_code(self._contents.parts)

    def _bring(self, group: Group) -> LoadedState:
        self._mine = self._held = None
        with self._stack:
            source, self._offers = choose_together(
                self._claimed(),
                lambda manifest, reasons: group.exchange(self._offer(manifest, reasons)),
                lambda offers: choose_source(offers, self._bad_state),
                lambda: self._look_and_keep(group),
                lambda source, offers: self._all_hold(group, source, offers),
            )
            if source is not None:
                self._step = source.what.step
                self._warn_if_set_back(source.what)
                together(group, lambda: self._load(group, source), f"step {self._step} cannot be loaded")
        return LoadedState(source.what if source is not None else None)

    def _load(self, group: Group, source: Source) -> None:
        try:
            if isinstance(source.what, Header):
                self._load_copy(group, source.rank, source.what)
            else:
                self._load_file(group, source.rank, source.what)
        except CheckpointError:
            raise
        except Exception:
            self._unreadable = True
            raise

    def _apply(self, group: Group, loaded: Loaded) -> None:
        contents = self._contents
        apply(
            loaded,
            contents.parts,
            contents.of_each_rank,
            group,
            self._files.directory,
            self._memory,
            read_only=self._read_only,
        )

    def _read(self, stream: Bytes, step: int) -> Any:
        """The state that has reached this rank. From here on what is in it may end this process."""
        self._report.load_chosen(step)
        return load_mapped(stream)

    # ---------------------------------------------------------------- from disk

    def _look_and_keep(self, group: Group) -> tuple[Manifest | None, Reasons]:
        self._mine, reasons = self._look(group)
        if self._mine is None:
            return None, reasons
        self._stack.enter_context(self._mine.stream)
        return self._mine.manifest, reasons

    def _load_file(self, group: Group, owner: int, wanted: Manifest) -> None:
        memory = self._memory
        if wanted.is_sharded:
            raise CheckpointMismatch(
                f"step {wanted.step} in {self._files.directory} is of a sharded state, and this script's is the same "
                "on all ranks: torch's dcp_to_torch_save makes one file of it, or give this script another directory"
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
        self._apply(group, Loaded(payload, _random_state(payload, group.rank), len(payload["rng"])))

    # ---------------------------------------------------------------- from memory

    def _all_hold(self, group: Group, source: Source, offers: list[Offer]) -> bool:
        """Open this node's copy. False: on some node it cannot be read, which is not offered again."""
        wanted = source.what
        assert isinstance(wanted, Header)
        memory, problem = self._memory, ""
        node = memory.place.node if memory is not None else ""
        if memory is not None and node in nodes_with(wanted, offers):
            try:
                self._held = self._stack.enter_context(memory.hold_verified(wanted.version))
            except (OSError, ValueError) as error:
                problem = str(error) or repr(error)
                logger.warning("a copy in memory is left aside: step=%d reason=%s", wanted.step, problem)
        problems = group.gather(problem.encode())
        broken = {offer.node for offer, text in zip(offers, problems, strict=True) if text}
        if broken:
            self._stack.pop_all().close()
            self._held = None
            if memory is not None and memory.keeps_common and node in broken:
                memory.drop(wanted.version)
        return not broken

    def _load_copy(self, group: Group, owner: int, wanted: Header) -> None:
        memory, held = self._memory, self._held
        records = self._gather_records(group, wanted)
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
        self._apply(group, Loaded(payload, state, wanted.world_size, wanted.partial, wanted.generation))
        if memory is not None and memory.keeps_common:
            self._keep(memory, wanted, records)

    def _gather_records(self, group: Group, wanted: Header) -> dict[int, bytes]:
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
        for part in group.gather(raw):
            offset = 0
            while offset < len(part):
                rank, length = _RECORD.unpack_from(part, offset)
                offset += _RECORD.size + length
                found[rank] = part[offset - length : offset]
        return found

    def _keep(self, memory: SlotMemory, wanted: Header, records: dict[int, bytes]) -> None:
        """Let this node's memory have the whole state too: the node that had it until now may be the next to go."""
        try:
            memory.abandon_newer(wanted.version)
            memory.fill(wanted.version, records)
        except (OSError, ValueError) as error:
            logger.warning(
                "the loaded state is not in this node's memory: step=%d reason=%s", wanted.step, error
            )


def load_mapped(stream: Bytes) -> Any:
    """The payload in an open file; its tensors are the file's own memory, and must not outlive the load."""
    try:
        return torch.load(
            f"/proc/self/fd/{stream.fileno()}", map_location="cpu", mmap=True, weights_only=True
        )
    except (OSError, RuntimeError):  # a file system that cannot map
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)


def _identity(stream: BufferedReader | None) -> str:
    """Of an open file: equal in two processes of a machine for the same content only."""
    if stream is None:
        return ""
    found = os.fstat(stream.fileno())
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


def _random_state(payload: Mapping[str, Any], rank: int) -> bytes | None:
    states = payload["rng"]
    return bytes(states[rank].tolist()) if rank < len(states) else None


# ---------------------------------------------------------------- going on from what was loaded
#
# What every rank does with a state that has reached it: its parts take it, and its random numbers go on from there.


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


def apply(
    loaded: Loaded,
    state: Mapping[str, Part],
    of_each_rank: Rules,
    group: Group,
    directory: str,
    memory: SlotMemory | None,
    *,
    read_only: bool = False,
) -> None:
    """`read_only`: more parts may have been saved, and the random numbers stay as they are.

    Raises OtherWorldSize, and has changed nothing then; CheckpointMismatch, and some parts may have been changed.
    """
    saved, step = loaded.payload["state"], loaded.payload["step"]
    shared = {name: part for name, part in state.items() if name not in of_each_rank}
    if saved.keys() != shared.keys() and not (read_only and shared.keys() <= saved.keys()):
        raise CheckpointMismatch(
            f"the checkpoint of step {step} in {directory} holds {sorted(saved)}, this script's state is "
            f"{sorted(shared)}: give Checkpointer the same names, or use another directory"
        )
    own = states_for(
        group.rank,
        group.world_size,
        loaded.payload.get("ranks", ()),
        of_each_rank,
        f"the checkpoint of step {step} in {directory}",
        some=read_only,
    )
    states = {**saved, **own}
    modules = modules_in(state)
    for name, part in state.items():
        try:
            load_into(part, states[name], modules)
        except Exception as error:
            raise CheckpointMismatch(
                f"{name!r} of step {step} in {directory} does not fit this script: {error}"
            ) from error
    if read_only:
        return
    if loaded.world_size != group.world_size:
        logger.warning(
            "random numbers start anew, the world size changed: step=%d saved=%d now=%d",
            step,
            loaded.world_size,
            group.world_size,
        )
    elif loaded.partial and memory is not None and _restore_own(loaded, shared, group, memory.folder):
        pass
    elif loaded.random_state is not None:
        rng.restore(loaded.random_state)
    else:
        logger.warning("random state not restored, no rank has kept it: step=%d rank=%d", step, group.rank)


def _restore_own(loaded: Loaded, state: Mapping[str, Part], group: Group, folder: str) -> bool:
    """What this rank alone knew when another one failed: its random state, and the buffers of its modules."""
    entry = rank_state.find(folder, group.rank, group.world_size, loaded.generation, loaded.payload["step"])
    if entry is None:
        return False
    rng.restore(entry.random_state)
    buffers = rank_state.Buffers(modules_in(state))
    if entry.buffers and len(entry.buffers) == buffers.size:
        buffers.restore(torch.frombuffer(bytearray(entry.buffers), dtype=torch.uint8))
    return True
