"""Where each piece of a sharded state lies in one rank's copy.

A copy is the bytes of a `.distcp` file of `torch.distributed.checkpoint` (DCP), with this table behind them: one
`torch.save` archive for each tensor that the rank has a piece of, one for each value that is no tensor. So a copy can
be read without the process that wrote it, written to disk as it is, and found out about without unpickling anything.

Keys are those of DCP: the path of a value in the state, joined by dots. What a rank has for itself has `ranks.N.`
before it, so that it is no other rank's. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass

from ....codec import Checked, Count, Invalid, from_plain, load_object, plain

SCHEMA = 1
ALIGNMENT = 64
"""Of an archive's place in a copy: its elements lie at such multiples from its beginning."""
MAX_TABLE_BYTES = 256 << 20
"""Of one that is no longer compressed."""

RANKS = "ranks"
"""Under which each rank has what is its own, see `own_key`: some of it under the names that follow."""
RANDOM_STATE, OWN_PARTS, DECLARED = "rng", "parts", "declared"
"""The state of its generators; its parts that are declared to be each rank's own; their names."""

Sizes = tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class Shard(Checked):
    """A piece of one tensor: `sizes` elements from `offsets` on, of a tensor of `shape`, each by dimension.

    The archive takes `length` bytes from `begin` on; in it the elements, contiguous, begin at `data`: an offset in the
    copy, too. `dtype` is as in `torch.float32`, without "torch.". `common`: all ranks have the same, as of a tensor
    that is not distributed.
    """

    key: str
    dtype: str
    shape: Sizes
    offsets: Sizes
    sizes: Sizes
    begin: Count
    length: Count
    data: Count
    common: bool = False

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if not len(self.shape) == len(self.offsets) == len(self.sizes):
            raise Invalid(f"table: {self.key!r} has {len(self.shape)} dimensions, its piece has others")
        if any(
            at + size > whole for at, size, whole in zip(self.offsets, self.sizes, self.shape, strict=True)
        ):
            raise Invalid(f"table: the piece of {self.key!r} lies outside of it")
        if not self.begin <= self.data <= self.begin + self.length:
            raise Invalid(f"table: the elements of {self.key!r} lie outside of its archive")


@dataclass(frozen=True, slots=True)
class Value(Checked):
    """What is no tensor: an archive of `torch.save`, loadable with `weights_only=True`."""

    key: str
    begin: Count
    length: Count
    common: bool = False


@dataclass(frozen=True, slots=True)
class Table(Checked):
    """All that one rank's copy holds. `paths`: of each key the path that it stands for, as DCP's planner keeps it."""

    shards: tuple[Shard, ...]
    values: tuple[Value, ...]
    paths: dict[str, tuple[str | int, ...]]

    @property
    def digest(self) -> str:
        """See `RankShards.digest`. What is common, or the rank's own, does not count."""
        rows = sorted(
            (one.key, one.dtype, one.shape, one.offsets, one.sizes)
            for one in self.shards
            if not one.common and not is_own(one.key)
        )
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def to_bytes(self) -> bytes:
        body = json.dumps({"schema": SCHEMA, **plain(self)}, separators=(",", ":")).encode()
        return zlib.compress(body, 1)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Table:
        """Raises Invalid."""
        inflate = zlib.decompressobj()
        try:
            body = inflate.decompress(raw, MAX_TABLE_BYTES)
        except zlib.error as error:
            raise Invalid(f"table: {error}") from error
        if not inflate.eof:
            raise Invalid(f"table: it does not end, or is longer than {MAX_TABLE_BYTES} bytes")
        fields = load_object(body, "table")
        if fields.pop("schema", None) != SCHEMA:
            raise Invalid(f"table: its schema is not {SCHEMA}")
        return from_plain(cls, fields)


def own_key(rank: int, key: str) -> str:
    return f"{RANKS}.{rank}.{key}"


def is_own(key: str) -> bool:
    return key.startswith(f"{RANKS}.")


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
