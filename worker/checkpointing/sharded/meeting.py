"""What the ranks of a sharded state bring before they copy or save: one collective of a few bytes for each rank."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from ....codec import Checked, Text
from ...errors import CheckpointError
from ...ranks.comparison import DIGEST_BYTES
from ...ranks.group import Group
from ...storage.disk.commit import TOKEN_BYTES
from ...storage.replication.copy_rule import READINESS_BYTES, Readiness

_DIGEST_CHARS = 16
_NOTHING = bytes(DIGEST_BYTES)
_NO_TOKEN = bytes(TOKEN_BYTES)
_HAS_MEMORY, _HAS_WRITER, _PATIENCE_OVER, _GIVES_UP, _HAS_NEW_TABLE, _CANNOT_SAVE, _DURABLE = (
    1 << bit for bit in range(7)
)

RECORD = struct.Struct(f"!q{_DIGEST_CHARS}sQ{DIGEST_BYTES}s{TOKEN_BYTES}sB{READINESS_BYTES}s")


class Brought(NamedTuple):
    """By one rank. No dataclass, for each rank makes those of all, and there may be thousands.

    `shards` is the digest of its shards, `size` that of its copy in bytes; empty and 0: its state cannot be taken.
    `common` is the digest of what all ranks should have alike, where that is compared. `readiness`: of its slots; None:
    its node has no memory for copies. `patience_over`: it waits no longer for replicas; `gives_up`: it waits no longer
    at all. Of these two rank 0's word counts.

    Of a save to disk: `token` is rank 0's for the name of the attempt. `has_new_table`: its copy's table is not the one
    that rank 0 has of it. `cannot_save`: it has a refusal to raise, and no state was taken. `durable`: rank 0 has found
    that step on disk.
    """

    step: int
    shards: str
    size: int
    common: bytes = _NOTHING
    token: bytes = _NO_TOKEN
    has_writer: bool = False
    readiness: Readiness | None = None
    patience_over: bool = False
    gives_up: bool = False
    has_new_table: bool = False
    cannot_save: bool = False
    durable: bool = False

    def to_bytes(self) -> bytes:
        flags = (
            _HAS_MEMORY * (self.readiness is not None)
            | _HAS_WRITER * self.has_writer
            | _PATIENCE_OVER * self.patience_over
            | _GIVES_UP * self.gives_up
            | _HAS_NEW_TABLE * self.has_new_table
            | _CANNOT_SAVE * self.cannot_save
            | _DURABLE * self.durable
        )
        readiness = self.readiness.to_bytes() if self.readiness is not None else bytes(READINESS_BYTES)
        return RECORD.pack(
            self.step, self.shards.encode(), self.size, self.common, self.token, flags, readiness
        )

    @staticmethod
    def from_bytes(raw: bytes) -> Brought:
        """Raises ValueError."""
        try:
            step, shards, size, common, token, flags, readiness = RECORD.unpack(raw)
        except struct.error as error:
            raise ValueError(f"a record of {len(raw)} bytes") from error
        return Brought(
            step, shards.rstrip(b"\0").decode("ascii"), size, common, token, *_unpacked(flags, readiness)
        )


@functools.lru_cache(maxsize=64)
def _unpacked(flags: int, readiness: bytes) -> tuple[bool, Readiness | None, bool, bool, bool, bool, bool]:
    """The last fields of a record, which most ranks have alike."""
    return (
        bool(flags & _HAS_WRITER),
        Readiness.from_bytes(readiness) if flags & _HAS_MEMORY else None,
        bool(flags & _PATIENCE_OVER),
        bool(flags & _GIVES_UP),
        bool(flags & _HAS_NEW_TABLE),
        bool(flags & _CANNOT_SAVE),
        bool(flags & _DURABLE),
    )


@dataclass(frozen=True)
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
    def some_cannot_save(self) -> bool:
        return any(one.cannot_save for one in self.all)

    @property
    def durable(self) -> bool:
        return self.all[0].durable

    @property
    def some_refused(self) -> bool:
        """Some rank's state cannot be taken."""
        return not all(one.shards for one in self.all)

    @property
    def some_have_new_tables(self) -> bool:
        return any(one.has_new_table for one in self.all)

    @property
    def token(self) -> bytes:
        return self.all[0].token

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
        return tuple(twin for twin in self._holders[self.all[rank].shards] if twin != rank)

    @property
    def first_twins(self) -> list[int | None]:
        """By rank, the lowest rank with the same shards, which writes them to disk; None: this rank does."""
        first = [self._holders[one.shards][0] for one in self.all]
        return [twin if twin != rank else None for rank, twin in enumerate(first)]

    @functools.cached_property
    def _holders(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for rank, one in enumerate(self.all):
            found.setdefault(one.shards, []).append(rank)
        return found


def meet(group: Group, brought: Brought) -> Met:
    """Every rank calls it. Raises CheckpointError, on all ranks, where they do not come for the same step."""
    try:
        found = [Brought.from_bytes(raw) for raw in group.gather_fixed(brought.to_bytes())]
    except ValueError as error:
        raise CheckpointError(
            "ranks cannot read each other's records: some ranks do not call save() or save_to_memory() here, and all "
            "must; or their versions differ: install the same version of elastic-agent on all nodes"
        ) from error
    steps = {rank: one.step for rank, one in enumerate(found)}
    if len(set(steps.values())) > 1:
        raise CheckpointError(
            f"ranks save different steps, by rank: {steps}; call save() or save_to_memory() in the same iteration"
        )
    return Met(found)


@dataclass(frozen=True, slots=True)
class RankHome(Checked):
    """Where a rank is: its node, that node's memory server, and the digest of its shards.

    `loaded` is that of its own copy of the loaded version; empty: it has none.
    """

    node: Annotated[str, Text(256)]
    address: Annotated[str, Text(300)]
    digest: Annotated[str, Text(16)]
    loaded: Annotated[str, Text(16)]
