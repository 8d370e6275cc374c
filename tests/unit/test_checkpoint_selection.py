"""Whose copy is loaded: the whole rule as a table."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest

from elastic_agent.worker.checkpointing.loading.selection import (
    BadState,
    Offer,
    Source,
    choose_source,
    nodes_with,
)
from elastic_agent.worker.errors import NoUsableCheckpoint
from elastic_agent.worker.ranks.group import current_group
from elastic_agent.worker.storage.disk.manifests import Manifest
from elastic_agent.worker.storage.memory.copy_header import FoundCopy, Header, NotedState
from elastic_agent.worker.storage.memory.slot_folders import SlotFolder
from elastic_agent.worker.wire.environment import WorkerEnv


def disk(step: int, generation: int = 1) -> Manifest:
    return Manifest(step, generation, 2, f"step-{step:012d}-{'a' * 16}.pt", 1, "a" * 64)


def memory(step: int, generation: int = 1, *, resumed_from: int = 0) -> Header:
    return Header(step, generation, resumed_from, world_size=2, size=1)


def offer(*headers: Header, manifest: Manifest | None = None, node: str = "", run: str = "") -> Offer:
    folder = SlotFolder("d" * 16)
    copies = tuple(FoundCopy(folder, "ab"[place % 2], header) for place, header in enumerate(headers))
    return Offer(manifest, copies=copies, node=node, run=run)


def owner(*offers: Offer) -> Source | None:
    return choose_source(offers)


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
    assert chosen == (None if rank is None else Source(offers[rank], rank))  # type: ignore[arg-type]


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
        ([memory(12, 1), memory(11, 2, resumed_from=10)], [disk(10)], memory(11, 2, resumed_from=10)),
        # the same, and the cut off one has even saved on its own disk
        ([memory(11, 2, resumed_from=10)], [disk(12, 1)], memory(11, 2, resumed_from=10)),
        # the same, and only the disk has what the others did since
        ([memory(12, 1)], [disk(11, 2)], disk(11, 2)),
        # generation 2 has done nothing yet that anybody kept: what it came from counts
        ([memory(12, 1)], [disk(10, 1)], memory(12, 1)),
        # the disk's number is another store's, of an earlier life of this job; generation 1 began there
        ([memory(5050, 1, resumed_from=5000)], [disk(5000, 37)], memory(5050, 1, resumed_from=5000)),
        # such a disk is found by a job that had begun anew without it
        ([memory(10, 1)], [disk(5000, 37)], disk(5000, 37)),
        # of two disks beyond the memory's beginning the newer generation's is the line that goes on
        ([memory(11, 1)], [disk(20, 2), disk(30, 1)], disk(20, 2)),
    ],
)
def test_memory_and_disk(copies: list[Header], disks: list[Manifest], winner: Header | Manifest) -> None:
    offers = [offer(copy, node=f"n{place}") for place, copy in enumerate(copies)]
    offers += [Offer(one) for one in disks]
    for order in itertools.permutations(offers):
        chosen = choose_source(order)
        assert chosen is not None
        assert chosen.what == winner


BAD = BadState(generation=7, step=30, present=9)


@pytest.mark.parametrize(
    ("copies", "disks", "winner"),
    [
        # the older slot, the disk's older checkpoint, whichever is newer
        ([memory(30, 5), memory(29, 5)], [disk(20)], memory(29, 5)),
        ([memory(30, 5)], [disk(20)], disk(20)),
        ([memory(30, 5), memory(10, 5)], [disk(20, 5)], disk(20, 5)),
        # a generation that loaded it wrote it again, or went on from it
        ([memory(30, 6), memory(29, 5)], [disk(30, 7)], memory(29, 5)),
        ([memory(29, 5)], [disk(31, 7)], memory(29, 5)),
        # the disk's number is another store's
        ([], [disk(30, 37), disk(20, 37)], disk(20, 37)),
        # what a later generation has made of an older state is as good as any
        ([memory(30, 8, resumed_from=29), memory(29, 5)], [], memory(30, 8, resumed_from=29)),
        ([], [disk(31, 8), disk(30, 7)], disk(31, 8)),
        # there is nothing else
        ([memory(30, 5)], [], memory(30, 5)),
        ([], [disk(30)], disk(30)),
    ],
)
def test_a_bad_state_is_the_last_resort(
    copies: list[Header], disks: list[Manifest], winner: Header | Manifest
) -> None:
    offers = [offer(copy, node=f"n{place}") for place, copy in enumerate(copies)]
    offers += [Offer(one) for one in disks]
    for order in itertools.permutations(offers):
        chosen = choose_source(order, BAD)
        assert chosen is not None
        assert chosen.what == winner


def test_a_disk_that_rots_does_not_hide_the_bad_state_that_is_left() -> None:
    offers = [offer(memory(30, 5)), Offer(bad=("it rots",))]
    chosen = choose_source(offers, BAD)
    assert chosen == Source(memory(30, 5), 0)


def test_the_agent_names_the_bad_state_in_the_environment() -> None:
    named = {"ELASTIC_AGENT_BAD_STATE": "7:30", "ELASTIC_AGENT_GENERATION": "9", "ELASTIC_AGENT_RUN": "me"}
    assert BadState.of(WorkerEnv.of(named), "me") == replace(BAD, run="me")
    assert BadState.of(WorkerEnv.of({"ELASTIC_AGENT_GENERATION": "9"}), "me") is None


def of(run: str, step: int, generation: int = 1) -> Manifest:
    name = f"step-{step:012d}-{run}-00000000-{'a' * 16}.pt"
    return Manifest(step, generation, 2, name, 1, "a" * 64, run)


def mine(step: int, generation: int = 1) -> Header:
    return replace(memory(step, generation), run="me")


@pytest.mark.parametrize(
    ("copies", "own", "foreign", "winner"),
    [
        # the job is started again: the newest that anybody has
        ([], [], [of("a", 5), of("b", 9)], of("b", 9)),
        # a node joins with what another job has left on its disk
        ([], [of("me", 5)], [of("a", 9)], of("me", 5)),
        ([], [of("a", 5)], [of("b", 9)], of("a", 5)),
        ([mine(10)], [], [of("a", 5000, 37)], mine(10)),
        # taken over, and set back from: numbers of another run's generations say nothing
        ([mine(10)], [of("a", 5000, 37)], [], mine(10)),
        ([mine(10)], [of("me", 20)], [], of("me", 20)),
        # the run has got a new name, and the agents have lived on
        ([replace(memory(10), run="before")], [of("me", 8, 2)], [], of("me", 8, 2)),
        ([replace(memory(10), run="before")], [], [of("before", 20)], of("before", 20)),
    ],
)
def test_another_runs_checkpoint_counts_only_where_there_is_nothing_else(
    copies: list[Header], own: list[Manifest], foreign: list[Manifest], winner: Header | Manifest
) -> None:
    offers = [offer(copy, node=f"n{place}", run="me") for place, copy in enumerate(copies)]
    offers += [Offer(one, run="me") for one in own] + [Offer(one, run="me", foreign=True) for one in foreign]
    for order in itertools.permutations(offers):
        chosen = choose_source(order)
        assert chosen is not None
        assert chosen.what == winner


MY_BAD = replace(BAD, run="me")


@pytest.mark.parametrize(
    ("copies", "own", "foreign", "winner"),
    [
        # its step and generation are as those of what came of the bad state, but it is another run's
        ([mine(30, 5)], [], [of("a", 200, 7)], mine(30, 5)),
        ([], [of("me", 30, 5)], [of("a", 20, 3)], of("me", 30, 5)),
        ([mine(30, 5)], [of("me", 20, 5)], [of("a", 200, 8)], of("me", 20, 5)),
        # the job was started again, and what it came from is the bad one: generations of two runs have no order
        ([], [of("a", 30, 8)], [], of("a", 30, 8)),
        ([mine(29, 8)], [of("a", 30, 8)], [], mine(29, 8)),
        # the run has got a new name, and its state before is its own
        ([replace(memory(30), run="before")], [], [of("before", 20)], of("before", 20)),
        ([], [], [of("a", 200, 7)], of("a", 200, 7)),
    ],
)
def test_the_bad_state_is_this_runs(
    copies: list[Header], own: list[Manifest], foreign: list[Manifest], winner: Header | Manifest
) -> None:
    offers = [offer(copy, node=f"n{place}", run="me") for place, copy in enumerate(copies)]
    offers += [Offer(one, run="me") for one in own] + [Offer(one, run="me", foreign=True) for one in foreign]
    for order in itertools.permutations(offers):
        chosen = choose_source(order, MY_BAD)
        assert chosen is not None
        assert chosen.what == winner


def test_another_runs_checkpoint_is_never_what_came_of_the_bad_state() -> None:
    assert not MY_BAD.covers(of("a", 200, 7), foreign=True)
    assert MY_BAD.covers(of("a", 200, 8)), "taken over: numbers of another run's generations say nothing"
    assert not MY_BAD.covers(of("me", 200, 8))


def test_of_equals_the_lowest_rank_owns_it() -> None:
    assert owner(Offer(), offer(memory(3)), offer(memory(3))) == Source(memory(3), 1)


def test_bytes_may_differ_between_nodes_that_have_the_same_step() -> None:
    offers = [
        offer(memory(3), memory(1), node="a"),
        Offer(node="a"),
        offer(replace(memory(3), size=9), node="b"),
        offer(memory(2), node="c"),
    ]
    assert nodes_with(memory(3), offers) == {"a", "b"}


def test_bad_checkpoints_count_only_where_there_is_nothing_else() -> None:
    bad = Offer(bad=("it rots",))
    assert owner(bad, offer(memory(3))) == Source(memory(3), 1)
    with pytest.raises(NoUsableCheckpoint, match="rank 1: it rots"):
        owner(Offer(), bad)


def test_an_offer_reaches_the_others_whole() -> None:
    newer = replace(memory(7), rng_holes=((0, 1), (0, 0)), sums=(1, 2), partial=True)
    own = replace(offer(newer, memory(6), manifest=disk(4), node="a node"), bad=("x" * 100,))
    foreign = Offer(of("a", 4), run="b", foreign=True, noted=(NotedState((1, 7), 2, 1),))
    for one in (Offer(), own, foreign):
        assert current_group().exchange(one) == [one]


@dataclass(frozen=True)
class Remembered:
    """What one node has of a step: a copy, unless it is overwritten, and random states of these ranks."""

    header: Header
    ranks: tuple[int, ...]
    is_there: bool = True


def remembered(
    step: int, *ranks: int, partial: bool = False, world_size: int = 2, is_there: bool = True
) -> Remembered:
    holes = ((0, 1),) * world_size
    return Remembered(Header(step, 1, 0, world_size, 1, holes, partial), ranks, is_there)


@pytest.mark.parametrize(
    ("nodes", "step"),
    [
        ([[remembered(8, 0, 1), remembered(7, 0, 1)], []], 8),
        # rank 1 did not come to step 8
        ([[remembered(8, 0), remembered(7, 0, 1)], []], 7),
        # each node knows its own ranks
        ([[remembered(8, 0), remembered(7, 0)], [remembered(8, 1), remembered(7, 1)]], 8),
        ([[remembered(8, 0), remembered(7, 0)], [remembered(7, 1), remembered(6, 1)]], 7),
        # while a disk writer held the other slot, step 8 went over step 7 on the node of rank 0
        (
            [
                [remembered(8, 0), Remembered(memory(2), ()), remembered(7, 0, is_there=False)],
                [remembered(7, 1), remembered(6, 1)],
            ],
            7,
        ),
        # the same, but the node of rank 1 is gone: a save of long ago is no better for having its random state
        ([[remembered(8, 0), Remembered(memory(2), ()), remembered(7, 0, is_there=False)], []], 8),
        # rank 1 is there, and has not ended its first step since the load
        ([[remembered(8, 0), Remembered(memory(7, 0), ())], []], 7),
        # rank 1 had failed when this was copied, and lost no step to it
        ([[remembered(8, 0, partial=True), remembered(7, 0, 1)], []], 8),
        # nobody can have all random states: rank 1's node is gone
        ([[remembered(8, 0), remembered(7, 0)], []], 8),
        # nor does anybody need them
        ([[remembered(8, 0, world_size=3), remembered(7, 0, 1, 2, world_size=3)], []], 8),
        # a save has them in itself
        ([[Remembered(memory(8), ()), remembered(7, 0, 1)], []], 8),
    ],
)
def test_a_copy_counts_when_every_rank_has_come_to_it(nodes: list[list[Remembered]], step: int) -> None:
    offers = [
        replace(
            offer(*(one.header for one in found if one.is_there), node=str(place)),
            noted=tuple(
                NotedState(one.header.version, one.header.world_size, rank)
                for one in found
                for rank in one.ranks
            ),
        )
        for place, found in enumerate(nodes)
    ]
    for order in itertools.permutations(offers):
        chosen = choose_source(order)
        assert chosen is not None
        assert chosen.what.step == step


def test_of_equal_copies_one_with_checksums_is_sent() -> None:
    def with_sums(node: str, *sums: int) -> Offer:
        return offer(Header(5, 1, 0, 2, 100, sums=sums), node=node)

    found = choose_source([with_sums("a"), with_sums("b", 7), with_sums("c", 7)])
    assert found is not None
    assert found.rank == 1
