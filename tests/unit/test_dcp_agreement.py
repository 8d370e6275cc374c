"""What the ranks of a DCP save agree on: whether they copy, over what, and when the save ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.worker.checkpointing.sharded.meeting import RankHome
from elastic_agent.worker.dcp.agreement import Agreed, Brought, WorldRank, agree
from elastic_agent.worker.errors import CheckpointError
from elastic_agent.worker.storage.replication.copy_rule import Readiness, Replication, SlotState

EMPTY = Readiness((SlotState(), SlotState()))
OF_10 = SlotState((3, 10), Replication.ACKNOWLEDGED)


def brought(rank: int, readiness: Readiness | None = EMPTY, *, world_size: int = 2) -> Brought:
    home = RankHome(f"n{rank // 2}", f"n{rank // 2}:1", "", f"{rank:016}", "")
    return Brought(20, WorldRank(rank, world_size, home), 100, readiness, True, False)


def agreed(*ranks: Brought, loaded: tuple[int, int] | None = None) -> Agreed:
    return agree(ranks, 3, loaded)


def test_all_copy_where_all_have_memory() -> None:
    assert agreed(brought(0), brought(1)) == Agreed(copies=True, most_bytes=200)
    assert not agreed(brought(0), brought(1, None)).copies


def test_the_settled_version_is_kept_and_the_loaded_one_before_there_is_one() -> None:
    ready = Readiness((OF_10, SlotState()))
    both = agreed(brought(0, ready), brought(1, ready))
    assert (both.copies, both.keep, both.settled) == (True, (3, 10), (3, 10))
    one = agreed(brought(0, ready), brought(1), loaded=(2, 5))
    assert (one.copies, one.keep, one.settled) == (True, (2, 5), None)


def test_where_a_slot_is_read_that_is_needed_all_write_while_all_wait() -> None:
    busy = Readiness((OF_10, replace(OF_10, version=(3, 5), held=True)))
    free = Readiness((OF_10, SlotState()))
    found = agreed(brought(0, free), brought(1, busy))
    assert (found.copies, found.keep) == (False, (3, 10))


def test_a_process_group_of_some_ranks_does_not_copy() -> None:
    """Each rank of it would take the slots of another one."""
    assert not agreed(brought(0, world_size=3), brought(1, world_size=3)).copies
    assert not agreed(brought(1), brought(0)).copies


def test_after_a_refusal_anywhere_the_save_ends_on_disk() -> None:
    assert agreed(brought(0), replace(brought(1), was_refused=True)).durable


def test_homes_go_out_until_all_know_them() -> None:
    new = replace(brought(1), knows_others=False)
    assert [one.digest[-1] for one in agreed(brought(0), new).homes] == ["0", "1"]
    assert not agreed(brought(0), brought(1)).homes


def test_the_disk_writers_get_the_time_of_the_node_that_writes_most() -> None:
    ranks = [replace(brought(rank, world_size=4), size=size) for rank, size in enumerate((1, 2, 30, 4))]
    assert agreed(*ranks).most_bytes == 34


def test_ranks_that_save_different_steps_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"by rank: \{0: 20, 1: 21\}"):
        agreed(brought(0), replace(brought(1), step=21))
