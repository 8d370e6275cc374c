"""Whose copy is loaded: the whole rule as a table."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from elastic_agent.worker.errors import NoUsableCheckpoint
from elastic_agent.worker.files import Manifest
from elastic_agent.worker.offers import Copy, Offer, Owner, choose_owner, nodes_with
from elastic_agent.worker.slots import Header


def disk(step: int, generation: int = 1) -> Manifest:
    return Manifest(step, generation, 2, f"step-{step:012d}-{'a' * 16}.pt", 1, "a" * 64)


def memory(step: int, generation: int = 1, *, base: int = 0) -> Header:
    return Header(step, generation, base, world_size=2, size=1)


def owner(*offers: Offer) -> Owner | None:
    return choose_owner(offers)


@pytest.mark.parametrize(
    ("offers", "rank"),
    [
        ([None], None),
        ([disk(1), disk(1)], 0),
        ([None, disk(1), disk(1)], 1),
        ([disk(1), disk(1, generation=2)], 1),
        ([disk(2), disk(1, generation=9)], 0),
        ([disk(2), disk(2, generation=2), disk(2, generation=2)], 1),
    ],
)
def test_of_disks_alone_the_newest_step_wins(offers: list[Manifest | None], rank: int | None) -> None:
    chosen = owner(*map(Offer, offers))
    assert chosen == (None if rank is None else Owner(rank, offers[rank]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("copies", "disks", "winner"),
    [
        ([memory(12)], [], memory(12)),
        ([memory(12), memory(11)], [disk(10)], memory(12)),
        # what is on disk is as new: the memory is quicker
        ([memory(12)], [disk(12)], memory(12)),
        # the memory was too small for a while
        ([memory(12)], [disk(20)], disk(20)),
        # a node that was cut off went on in generation 1; the others began generation 2 at step 10
        ([memory(12, 1), memory(11, 2, base=10)], [disk(10)], memory(11, 2, base=10)),
        # the same, and the cut off one has even saved on its own disk
        ([memory(11, 2, base=10)], [disk(12, 1)], memory(11, 2, base=10)),
        # the same, and only the disk has what the others did since
        ([memory(12, 1)], [disk(11, 2)], disk(11, 2)),
        # generation 2 has done nothing yet that anybody kept: what it came from counts
        ([memory(12, 1)], [disk(10, 1)], memory(12, 1)),
        # the disk's number is another store's, of an earlier life of this job; generation 1 began there
        ([memory(5050, 1, base=5000)], [disk(5000, 37)], memory(5050, 1, base=5000)),
        # such a disk is found by a job that had begun anew without it
        ([memory(10, 1)], [disk(5000, 37)], disk(5000, 37)),
        # of two disks beyond the memory's beginning the newer generation's is the line that goes on
        ([memory(11, 1)], [disk(20, 2), disk(30, 1)], disk(20, 2)),
    ],
)
def test_memory_and_disk(copies: list[Header], disks: list[Manifest], winner: Header | Manifest) -> None:
    offers = [Offer(copies=(Copy(copy),), node=f"n{place}") for place, copy in enumerate(copies)]
    offers += [Offer(one) for one in disks]
    for order in itertools.permutations(offers):
        chosen = choose_owner(order)
        assert chosen is not None
        assert chosen.what == winner


def test_of_equals_the_lowest_rank_owns_it() -> None:
    assert owner(Offer(), Offer(copies=(Copy(memory(3)),)), Offer(copies=(Copy(memory(3)),))) == Owner(
        1, memory(3)
    )


def test_bytes_may_differ_between_nodes_that_have_the_same_step() -> None:
    offers = [
        Offer(copies=(Copy(memory(3)), Copy(memory(1))), node="a"),
        Offer(node="a"),
        Offer(copies=(Copy(replace(memory(3), size=9)),), node="b"),
        Offer(copies=(Copy(memory(2)),), node="c"),
    ]
    assert nodes_with(memory(3), offers) == {"a", "b"}


def test_bad_checkpoints_count_only_where_there_is_nothing_else() -> None:
    bad = Offer(bad=("it rots",))
    assert owner(bad, Offer(copies=(Copy(memory(3)),))) == Owner(1, memory(3))
    with pytest.raises(NoUsableCheckpoint, match="rank 1: it rots"):
        owner(Offer(), bad)


def test_an_offer_reaches_the_others_whole() -> None:
    copies = (
        Copy(replace(memory(7), gaps=((0, 1), (0, 0)), sums=(1, 2), haste=True), frozenset({1})),
        Copy(memory(6)),
    )
    for offer in (Offer(), Offer(disk(4), ("x" * 100,), copies, "a node")):
        assert Offer.from_json(offer.to_json()) == offer


def remembered(step: int, *ranks: int, haste: bool = False, world_size: int = 2) -> Copy:
    gaps = ((0, 1),) * world_size
    return Copy(Header(step, 1, 0, world_size, 1, gaps, haste), frozenset(ranks))


@pytest.mark.parametrize(
    ("nodes", "step"),
    [
        ([[remembered(8, 0, 1), remembered(7, 0, 1)], []], 8),
        # rank 1 did not come to step 8
        ([[remembered(8, 0), remembered(7, 0, 1)], []], 7),
        # each node knows its own ranks
        ([[remembered(8, 0), remembered(7, 0)], [remembered(8, 1), remembered(7, 1)]], 8),
        ([[remembered(8, 0), remembered(7, 0)], [remembered(7, 1), remembered(6, 1)]], 7),
        # rank 1 had failed when this was copied, and lost no step to it
        ([[remembered(8, 0, haste=True), remembered(7, 0, 1)], []], 8),
        # nobody can have all random states: rank 1's node is gone
        ([[remembered(8, 0), remembered(7, 0)], []], 8),
        # nor does anybody need them
        ([[remembered(8, 0, world_size=3), remembered(7, 0, 1, 2, world_size=3)], []], 8),
        # a save has them in itself
        ([[Copy(memory(8)), remembered(7, 0, 1)], []], 8),
    ],
)
def test_a_copy_counts_when_every_rank_has_come_to_it(nodes: list[list[Copy]], step: int) -> None:
    offers = [Offer(copies=tuple(copies), node=str(place)) for place, copies in enumerate(nodes)]
    for order in itertools.permutations(offers):
        chosen = choose_owner(order)
        assert chosen is not None
        assert chosen.what.step == step
