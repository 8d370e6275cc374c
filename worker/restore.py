"""Brings every rank the state of one step: the newest that any of them has, in its node's memory or on its disk.

A checkpoint on disk is believed only after all of it was read, which takes longer than everything else together. So
the ranks first tell what their disks claim to have; only if that could win over the memory is it verified.

All ranks take the same way through here, whatever goes wrong on one: who left alone would leave the others waiting.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import errors
from .collectives import Group
from .errors import BadCheckpoint, CheckpointError
from .files import CheckpointFiles, Manifest, VerifiedCheckpoint, digest
from .memory import NodeMemory, load_mapped
from .offers import MAX_REASON_CHARS, Offer, Owner, choose_owner, nodes_with
from .slots import Header, Held, NoRoom, SlotsBusy

logger = logging.getLogger(__name__)

_RECORD = struct.Struct("!qq")  # rank and length, followed by that rank's random state
_CRC = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What reached this rank: the state, and the random state of the same rank when it was saved, if anybody has it."""

    payload: Mapping[str, Any]
    random_state: bytes | None
    world_size: int
    """When it was saved."""
    mapped: bool
    """The tensors are the memory's own, and not to be kept."""
    salvaged: bool = False
    """Survivors of a failure have saved it: what each rank alone knew is in its journal."""
    generation: int = 0
    """Of whose memory it came; 0 from a disk."""


class Restore:
    """One load, as one rank takes part in it."""

    def __init__(
        self,
        group: Group,
        files: CheckpointFiles,
        memory: NodeMemory | None,
        bad: Callable[[BadCheckpoint], None],
    ) -> None:
        """`bad` hears of every checkpoint on this rank's disk that does not verify."""
        self._group = group
        self._files = files
        self._memory = memory
        self._bad = bad
        self._stack = contextlib.ExitStack()
        self._mine: VerifiedCheckpoint | None = None
        self._held: Held | None = None
        self._offers: list[Offer] = []
        self.owner: Owner | None = None
        """Whose state it is, once `choose` has found out."""

    def __enter__(self) -> Restore:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def choose(self) -> Owner | None:
        """None when nobody has anything. Raises NoUsableCheckpoint."""
        manifest, looked = self._claim(), False
        reasons: tuple[str, ...] = ()
        while True:
            self._offers = self._tell(manifest, reasons)
            self.owner = choose_owner(self._offers) if looked or any(o.copies for o in self._offers) else None
            if self.owner is not None and isinstance(self.owner.what, Header):
                if self._all_hold(self.owner.what):
                    return self.owner
            elif looked:
                return self.owner
            else:
                self._mine, reasons = self._look()
                manifest, looked = self._mine.manifest if self._mine is not None else None, True

    def load(self, apply: Callable[[Loaded], None]) -> None:
        """Bring the chosen state here and apply it, or raise on every rank."""
        assert self.owner is not None
        what = self.owner.what
        error: CheckpointError | None = None
        try:
            if isinstance(what, Header):
                self._load_copy(self.owner.rank, what, apply)
            else:
                self._load_file(self.owner.rank, what, apply)
        except CheckpointError as refusal:
            error = refusal
        except Exception as failure:
            error = because(CheckpointError, f"step {what.step} cannot be loaded: {failure!r}", failure)
        raise_together(self._group, error)

    def _tell(self, manifest: Manifest | None, reasons: tuple[str, ...]) -> list[Offer]:
        """What everybody has, by rank."""
        memory = self._memory
        copies = memory.copies() if memory is not None and memory.is_keeper else ()
        offer = Offer(manifest, reasons, copies, memory.place.node if memory is not None else "")
        return [Offer.from_json(raw) for raw in self._group.gather(offer.to_json())]

    # ---------------------------------------------------------------- from disk

    def _claim(self) -> Manifest | None:
        """The newest checkpoint that this rank's disk claims to have."""
        with contextlib.suppress(OSError):
            return self._files.newest_manifest()
        return None

    def _look(self) -> tuple[VerifiedCheckpoint | None, tuple[str, ...]]:
        """The newest good checkpoint in this rank's directory, and what is wrong with those before it."""
        try:
            found, bad = self._files.find()
        except OSError as error:
            return None, (f"{self._files.directory}: {error}",)
        for one in bad:
            self._bad(one)
        if found is not None:
            self._stack.enter_context(found.stream)
        return found, tuple(map(str, bad))

    def _load_file(self, owner: int, wanted: Manifest, apply: Callable[[Loaded], None]) -> None:
        has_it = {
            rank
            for rank, offer in enumerate(self._offers)
            if offer.manifest is not None and offer.manifest.sha256 == wanted.sha256
        }
        group = self._group
        mine = self._mine if group.rank in has_it else None
        stream: io.BufferedReader | io.BytesIO = mine.stream if mine is not None else io.BytesIO()
        if len(has_it) < group.world_size:
            group.send(stream if mine is None or group.rank == owner else None, wanted.size, source=owner)
        stream.seek(0)
        if mine is None and digest(stream) != wanted.sha256:
            raise CheckpointError(f"step {wanted.step} broke on its way from rank {owner}: start again")
        payload = torch.load(stream, map_location="cpu", weights_only=True)
        apply(Loaded(payload, _random_state(payload, group.rank), len(payload["rng"]), mapped=False))

    # ---------------------------------------------------------------- from memory

    def _all_hold(self, wanted: Header) -> bool:
        """Open this node's copy. False: on some node it cannot be read, which nobody will offer again."""
        memory, problem = self._memory, ""
        node = memory.place.node if memory is not None else ""
        if memory is not None and node in nodes_with(wanted, self._offers):
            try:
                self._held = self._stack.enter_context(memory.hold(wanted.age))
            except (OSError, ValueError) as error:
                problem = str(error) or repr(error)
                logger.warning("a copy in memory is left aside: step=%d reason=%s", wanted.step, problem)
        problems = self._group.gather(problem.encode())
        broken = {offer.node for offer, told in zip(self._offers, problems, strict=True) if told}
        if broken:
            self._stack.pop_all().close()
            self._held = None
            if memory is not None and memory.is_keeper and node in broken:
                memory.drop(wanted.age)
        return not broken

    def _load_copy(self, owner: int, wanted: Header, apply: Callable[[Loaded], None]) -> None:
        group, memory, held = self._group, self._memory, self._held
        records = self._gather_records(wanted)
        received = io.BytesIO()
        holding = nodes_with(wanted, self._offers)
        if any(offer.node not in holding for offer in self._offers):
            stream = received if held is None else held.stream if group.rank == owner else None
            crcs = group.gather(_CRC.pack(group.send(stream, wanted.size, source=owner)))
            received.seek(0)
            if held is None and crcs[group.rank] != crcs[owner]:
                raise CheckpointError(f"step {wanted.step} broke on its way from rank {owner}: start again")
        if held is not None:
            payload, mapped = load_mapped(held), True
        else:
            payload, mapped = torch.load(received, map_location="cpu", weights_only=True), False
        here = wanted if held is None else held.header
        state = records.get(group.rank) if here.gaps else _random_state(payload, group.rank)
        apply(Loaded(payload, state, wanted.world_size, mapped, wanted.haste, wanted.generation))
        if memory is not None and memory.is_keeper:
            self._keep(memory, wanted, received if held is None else None, records)

    def _gather_records(self, wanted: Header) -> dict[int, bytes]:
        """Every rank's random state after that step, as far as any node has written it down."""
        if not any(copy.header.gaps for offer in self._offers for copy in offer.copies):
            return {}
        memory = self._memory
        mine = memory.records(wanted) if memory is not None and memory.is_keeper else {}
        raw = b"".join(_RECORD.pack(rank, len(state)) + state for rank, state in mine.items())
        found: dict[int, bytes] = {}
        for part in self._group.gather(raw):
            offset = 0
            while offset < len(part):
                rank, length = _RECORD.unpack_from(part, offset)
                offset += _RECORD.size + length
                found[rank] = part[offset - length : offset]
        return found

    def _keep(
        self, memory: NodeMemory, wanted: Header, received: io.BytesIO | None, records: dict[int, bytes]
    ) -> None:
        """Let this node's memory have the whole state too: whoever had it until now may be the next to go."""
        try:
            memory.abandon_newer(wanted.age)
            if received is not None:
                memory.put_bytes(received, wanted)
            memory.fill(wanted.age, records)
        except (NoRoom, SlotsBusy, OSError, ValueError) as error:
            logger.warning(
                "the loaded state is not in this node's memory: step=%d reason=%s", wanted.step, error
            )


def _random_state(payload: Mapping[str, Any], rank: int) -> bytes | None:
    states = payload["rng"]
    return bytes(states[rank].tolist()) if rank < len(states) else None


# ---------------------------------------------------------------- errors that all ranks share


def raise_together(group: Group, error: CheckpointError | None) -> None:
    """Raise on every rank when one has an error: its own there, and the first rank's on those without."""
    note = json.dumps([type(error).__name__, str(error)[:MAX_REASON_CHARS]]).encode() if error else b""
    notes = group.gather(note)
    if error is not None:
        raise error
    for rank, note in enumerate(notes):
        if note:
            name, text = json.loads(note)
            raise getattr(errors, name)(f"rank {rank}: {text}")


def because(kind: type[CheckpointError], text: str, cause: Exception) -> CheckpointError:
    error = kind(text)
    error.__cause__ = cause
    return error
