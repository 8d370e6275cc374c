"""What a rank writes of a copy whose shards a lower rank writes, too: the rows that it has for itself alone.

In HSDP each replica group has the same shards. Their file would be a second one of the same content; what is not the
same, as a rank's random state, would be lost without a file of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from ....state.sharding.table import Shard, Table, Value, aligned, own_key

_Row = TypeVar("_Row", Shard, Value)


@dataclass(frozen=True, slots=True)
class OwnRows:
    """`table` is that of the new copy; `ranges` are the places of its archives in the old one, as offset and length."""

    table: Table
    ranges: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """Where the table lies."""
        return sum(map(aligned, (length for _, length in self.ranges)))


def own_rows(table: Table, rank: int) -> OwnRows:
    """A function of the table alone: whoever writes DCP's index finds out the same places."""
    places: dict[tuple[int, int], int] = {}
    """By its place in the old copy: tensors that are tied have one archive."""
    end = 0

    def moved(row: _Row) -> _Row:
        nonlocal end
        place = row.begin, row.length
        if place not in places:
            places[place], end = end, end + aligned(row.length)
        begin = places[place]
        if isinstance(row, Shard):
            return replace(row, begin=begin, data=begin + row.data - row.begin)
        return replace(row, begin=begin)

    shards = tuple(moved(row) for row in table.shards if _is_of(rank, row.key))
    values = tuple(moved(row) for row in table.values if _is_of(rank, row.key))
    paths = {key: path for key, path in table.paths.items() if _is_of(rank, key)}
    return OwnRows(Table(shards, values, paths), tuple(places))


def _is_of(rank: int, key: str) -> bool:
    return key.startswith(own_key(rank, ""))
