"""What the ranks of a DCP save agree on: whether they copy, over what, and when the save ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.worker.checkpointing.sharded.meeting import RankHome
from elastic_agent.worker.dcp.rank_storage import SaveDecision, SaveRequest, WorldRank, decide
from elastic_agent.worker.errors import CheckpointError
from elastic_agent.worker.storage.replication.copy_rule import Readiness, Replication, SlotState

EMPTY = Readiness((SlotState(), SlotState()))
OF_10 = SlotState((3, 10), Replication.ACKNOWLEDGED)


def request(rank: int, readiness: Readiness | None = EMPTY, *, world_size: int = 2) -> SaveRequest:
    home = RankHome(f"n{rank // 2}", f"n{rank // 2}:1", f"{rank:016}", "")
    return SaveRequest(20, WorldRank(rank, world_size, home), 100, readiness, True, False)


def decided(*ranks: SaveRequest, loaded: tuple[int, int] | None = None) -> SaveDecision:
    return decide(ranks, 3, loaded)


def test_all_copy_where_all_have_memory() -> None:
    assert decided(request(0), request(1)) == SaveDecision(copies=True, most_bytes=200)
    assert not decided(request(0), request(1, None)).copies


def test_the_settled_version_is_kept_and_the_loaded_one_before_there_is_one() -> None:
    ready = Readiness((OF_10, SlotState()))
    both = decided(request(0, ready), request(1, ready))
    assert (both.copies, both.protected, both.drop_older_than) == (True, (3, 10), (3, 10))
    one = decided(request(0, ready), request(1), loaded=(2, 5))
    assert (one.copies, one.protected, one.drop_older_than) == (True, (2, 5), None)


def test_replicas_are_kept_while_a_newer_version_has_none() -> None:
    """A partner is out of reach: a node that is lost may leave the version before as the newest whole one."""
    ready = Readiness((OF_10, SlotState((3, 15), Replication.DEGRADED)))
    found = decided(request(0, ready), request(1, ready))
    assert (found.protected, found.drop_older_than) == ((3, 15), (3, 10))


def test_where_a_slot_is_read_that_is_needed_all_write_while_all_wait() -> None:
    busy = Readiness((OF_10, replace(OF_10, version=(3, 5), held=True)))
    free = Readiness((OF_10, SlotState()))
    found = decided(request(0, free), request(1, busy))
    assert (found.copies, found.protected) == (False, (3, 10))


def test_a_save_that_overlaps_with_another_one_on_any_rank_is_refused_to_all() -> None:
    with pytest.raises(
        CheckpointError, match=r"step 20 .*ranks \[1\] .*Wait for the future of the last dcp.async"
    ):
        decided(request(0), replace(request(1), is_busy=True))


def test_a_process_group_of_some_ranks_does_not_copy() -> None:
    """Each rank of it would take the slots of another one."""
    assert not decided(request(0, world_size=3), request(1, world_size=3)).copies
    assert not decided(request(1), request(0)).copies


def test_after_a_refusal_anywhere_the_save_ends_on_disk() -> None:
    assert decided(request(0), replace(request(1), last_save_failed=True)).durable


def test_homes_go_out_until_all_know_them() -> None:
    new = replace(request(1), knows_nodes=False)
    assert [one.digest[-1] for one in decided(request(0), new).homes] == ["0", "1"]
    assert not decided(request(0), request(1)).homes


def test_the_disk_writers_get_the_time_of_the_node_that_writes_most() -> None:
    ranks = [replace(request(rank, world_size=4), size=size) for rank, size in enumerate((1, 2, 30, 4))]
    assert decided(*ranks).most_bytes == 34


def test_ranks_that_save_different_steps_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"by rank: \{0: 20, 1: 21\}"):
        decided(request(0), replace(request(1), step=21))
