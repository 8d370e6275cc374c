"""What the ranks of a sharded state tell each other before they copy or save: one collective of a few bytes each."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ....codec import Checked, Text
from ...errors import CheckpointError
from ...ranks.group import Group
from ...ranks.replicas import DIGEST_BYTES
from ...storage.replication.copy_rule import READINESS_BYTES, Readiness

_DIGEST_CHARS = 16
_NOTHING = bytes(DIGEST_BYTES)
_HAS_MEMORY, _HAS_WRITER, _PATIENCE_OVER, _GIVES_UP = 1, 2, 4, 8

_RECORD = struct.Struct(f"!q{_DIGEST_CHARS}sQ{DIGEST_BYTES}sB{READINESS_BYTES}s")


@dataclass(frozen=True, slots=True)
class Brought:
    """By one rank.

    `shards` is the digest of its shards, `size` that of its copy in bytes; empty and 0: its state cannot be taken.
    `common` is the digest of what all ranks should have alike, where that is compared. `readiness`: of its slots; None:
    its node has no memory for copies. `patience_over`: it waits no longer for replicas; `gives_up`: it waits no longer
    at all. Of these two rank 0's word counts.
    """

    step: int
    shards: str
    size: int
    common: bytes = _NOTHING
    has_writer: bool = False
    readiness: Readiness | None = None
    patience_over: bool = False
    gives_up: bool = False

    def to_bytes(self) -> bytes:
        flags = (
            _HAS_MEMORY * (self.readiness is not None)
            | _HAS_WRITER * self.has_writer
            | _PATIENCE_OVER * self.patience_over
            | _GIVES_UP * self.gives_up
        )
        readiness = self.readiness.to_bytes() if self.readiness is not None else bytes(READINESS_BYTES)
        return _RECORD.pack(self.step, self.shards.encode(), self.size, self.common, flags, readiness)

    @staticmethod
    def from_bytes(raw: bytes) -> Brought:
        """Raises ValueError."""
        try:
            step, shards, size, common, flags, readiness = _RECORD.unpack(raw)
        except struct.error as error:
            raise ValueError(f"a record of {len(raw)} bytes") from error
        return Brought(
            step,
            shards.rstrip(b"\0").decode("ascii"),
            size,
            common,
            bool(flags & _HAS_WRITER),
            Readiness.from_bytes(readiness) if flags & _HAS_MEMORY else None,
            bool(flags & _PATIENCE_OVER),
            bool(flags & _GIVES_UP),
        )


@dataclass(frozen=True, slots=True)
class Met:
    """What all ranks have brought, by rank."""

    all: Sequence[Brought]

    @property
    def all_have_memory(self) -> bool:
        return all(one.readiness is not None for one in self.all)

    @property
    def all_have_writers(self) -> bool:
        return all(one.has_writer for one in self.all)

    @property
    def some_refused(self) -> bool:
        """Some rank's state cannot be taken."""
        return not all(one.shards for one in self.all)

    @property
    def patience_over(self) -> bool:
        return self.all[0].patience_over

    @property
    def gives_up(self) -> bool:
        return self.all[0].gives_up

    @property
    def readiness(self) -> list[Readiness]:
        return [one.readiness for one in self.all if one.readiness is not None]

    def twins_of(self, rank: int) -> tuple[int, ...]:
        """The other ranks that have the same shards."""
        mine = self.all[rank].shards
        return tuple(other for other, one in enumerate(self.all) if one.shards == mine and other != rank)

    def first_twin_of(self, rank: int) -> int | None:
        """The lowest rank with the same shards, which writes them to disk; None: this rank does."""
        twins = self.twins_of(rank)
        return min(twins) if twins and min(twins) < rank else None


def meet(group: Group, brought: Brought) -> Met:
    """Every rank calls it. Raises CheckpointError, on all ranks, where they do not come for the same step."""
    try:
        found = [Brought.from_bytes(raw) for raw in group.gather(brought.to_bytes())]
    except ValueError as error:
        raise CheckpointError(
            f"ranks cannot read each other's records ({error}): install the same version of elastic-agent on all nodes"
        ) from error
    steps = {rank: one.step for rank, one in enumerate(found)}
    if len(set(steps.values())) > 1:
        raise CheckpointError(
            f"ranks save different steps, by rank: {steps}; call save() or remember() in the same iteration"
        )
    return Met(found)


@dataclass(frozen=True, slots=True)
class RankHome(Checked):
    """Where a rank is: its node, that node's memory server and failure domain; and the digest of its shards."""

    node: Annotated[str, Text(256)]
    address: Annotated[str, Text(300)]
    domain: Annotated[str, Text(256)]
    digest: Annotated[str, Text(16)]
