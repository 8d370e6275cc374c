"""The table of one rank's copy: it says what it holds, and refuses what cannot be."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest

from elastic_agent.codec import Invalid
from elastic_agent.worker.state.sharding.table import Shard, Table, Value, own_key

ROW = Shard("model.weight", "float32", (8, 4), (4, 0), (4, 4), 0, 1200, 896)
TABLE = Table(
    (ROW, Shard(own_key(1, "rng"), "uint8", (16,), (0,), (16,), 1216, 1100, 2112)),
    (Value("optimizer.param_groups", 2368, 900, common=True),),
    {"model.weight": ("model", "weight"), "optimizer.param_groups": ("optimizer", "param_groups", 0)},
)


def test_a_table_is_read_as_it_was_written() -> None:
    assert Table.from_bytes(TABLE.to_bytes()) == TABLE


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no table",
        TABLE.to_bytes()[:-9],
        zlib.compress(b"{}"),
        zlib.compress(b"[" * 100_000),
        zlib.compress(b'{"schema":2,"shards":[],"values":[],"paths":{}}'),
        zlib.compress(b'{"schema":1,"shards":[],"values":[]}'),
    ],
)
def test_what_is_no_table_is_refused(raw: bytes) -> None:
    with pytest.raises(Invalid):
        Table.from_bytes(raw)


@pytest.mark.parametrize(
    "change",
    [{"offsets": (5, 0)}, {"sizes": (4,)}, {"shape": (8, 4, 1)}, {"data": 1201}, {"begin": -1}],
)
def test_a_row_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(Invalid):
        replace(ROW, **change)


def test_copies_of_the_same_shards_have_one_digest() -> None:
    """Where the bytes lie, what is common and what is the rank's own do not count; which piece it is does."""
    moved = replace(TABLE, shards=(replace(ROW, begin=64, data=960),), values=())
    other = replace(TABLE, shards=(replace(ROW, offsets=(0, 0)),))
    assert moved.digest == TABLE.digest != other.digest
