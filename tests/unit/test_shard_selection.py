"""Which version of a sharded state is loaded, and from where."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from elastic_agent.codec import Invalid, from_plain, plain
from elastic_agent.worker.checkpointing.loading.selection import (
    BadState,
    Offer,
    Source,
    choose_source,
    unusable,
)
from elastic_agent.worker.errors import NoUsableCheckpoint
from elastic_agent.worker.storage.disk.manifests import Manifest
from elastic_agent.worker.storage.memory.copy_header import FoundCopy, Header, RankShards
from elastic_agent.worker.storage.memory.slot_folders import SlotFolder


def disk(step: int, generation: int = 1, run: str = "") -> Manifest:
    name = f"step-{step:012d}-{run}-{'b' * 8}-{'a' * 16}.pt" if run else f"step-{step:012d}-{'a' * 16}.pt"
    return Manifest(step, generation, 2, name, 1, "a" * 64, run)


def copy(
    rank: int,
    step: int,
    generation: int = 1,
    *,
    world: int = 2,
    of: str = "",
    common: bool = True,
    twins: tuple[int, ...] = (),
    resumed_from: int = 0,
    run: str = "",
    keep: tuple[int, int] | None = None,
) -> FoundCopy:
    """In the slots of local rank 0, or in a replica `of` another node."""
    shards = RankShards(rank, f"{min(rank, *twins, rank):016x}", common, twins, keep)
    header = Header(step, generation, resumed_from, world, 1, run=run, shards=shards)
    return FoundCopy(SlotFolder("d" * 16, 0, of * 12), "ab"[step % 2], header)


def node(name: str, *copies: FoundCopy, manifest: Manifest | None = None) -> Offer:
    return Offer(manifest, (), copies, name, f"{name}:7000")


def version(*offers: Offer, bad: BadState | None = None) -> tuple[int, int] | None:
    found = choose_source(offers, bad)
    for order in itertools.permutations(offers):
        again = choose_source(order, bad)
        assert (again and again.version) == (found and found.version)
    return found.version if found is not None else None


def lie(source: Source | None) -> list[list[str]]:
    """By old rank, the nodes."""
    assert source is not None
    return [[place.node for place in places] for places in source.places]


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        ([node("a"), node("b")], None),
        ([node("a", copy(0, 4)), node("b", copy(1, 4))], (1, 4)),
        # rank 1 was killed in the middle of its copy of step 6
        ([node("a", copy(0, 4), copy(0, 6)), node("b", copy(1, 4))], (1, 4)),
        # a node was lost; its partner has both of its slots
        ([node("a", copy(0, 4), copy(0, 6), copy(1, 4, of="b"), copy(1, 6, of="b"))], (1, 6)),
        # it had acknowledged the older one only
        ([node("a", copy(0, 4), copy(0, 6), copy(1, 4, of="b"))], (1, 4)),
        # a newer generation's version is whole, and of a lower step
        ([node("a", copy(0, 9), copy(0, 6, 2)), node("b", copy(1, 9), copy(1, 6, 2))], (2, 6)),
        # it is not
        ([node("a", copy(0, 9), copy(0, 6, 2)), node("b", copy(1, 9))], (1, 9)),
        # the world before had another size: its copies are whole, those of the new one are not yet
        ([node("a", copy(0, 8, 2, world=1), copy(0, 6)), node("b", copy(1, 6))], (2, 8)),
        ([node("a", copy(0, 6, world=3), copy(2, 6, world=3, of="c"), copy(0, 7, 2)),
          node("b", copy(1, 6, world=3))], (1, 6)),
        # equal versions of worlds of two sizes are not of one world
        ([node("a", copy(0, 6, world=3)), node("b", copy(1, 6))], None),
        # twins stand in for each other
        ([node("a", copy(0, 4, world=4, twins=(2,)), copy(1, 4, world=4, twins=(3,)))], (1, 4)),
        ([node("a", copy(0, 4, world=4, twins=(2,))), node("b", copy(3, 4, world=4))], None),
        # what is the same on all ranks is on no live node
        ([node("a", copy(0, 4, common=False)), node("b", copy(1, 4, common=False))], None),
        ([node("a", copy(0, 4, common=False)), node("b", copy(1, 4))], (1, 4)),
    ],
)  # fmt: skip
def test_only_a_whole_version_counts(offers: list[Offer], chosen: tuple[int, int] | None) -> None:
    assert version(*offers) == chosen


BOTH = (copy(0, 12), copy(1, 12))
LATER = (copy(0, 12, 2, resumed_from=10), copy(1, 12, 2, resumed_from=10))


@pytest.mark.parametrize(
    ("copies", "manifest", "chosen"),
    [
        ((), disk(10), disk(10)),
        (BOTH, disk(10), None),
        (BOTH, disk(12), None),
        (BOTH, disk(20), disk(20)),
        # generation 2 began at step 10, and has abandoned what generation 1 did later
        (LATER, disk(20), None),
        (LATER, disk(20, 2), disk(20, 2)),
        # the disk's number is another store's
        (LATER, disk(9, 37), None),
        (LATER, disk(13, 37), disk(13, 37)),
        # shards are missing: as if there were nothing in memory
        (BOTH[:1], disk(10), disk(10)),
    ],
)
def test_memory_and_disk(copies: tuple[FoundCopy, ...], manifest: Manifest, chosen: Manifest | None) -> None:
    for offers in itertools.permutations([node("a", *copies), node("b", manifest=manifest)]):
        found = choose_source(offers)
        assert found is not None
        assert found.what == (chosen or copies[0].header)
        if chosen is not None:
            assert (offers[found.rank].manifest, found.places) == (chosen, ())


def test_all_places_of_each_rank_are_named_its_own_copies_first() -> None:
    twin = copy(2, 4, world=3, common=False, twins=(0,))
    offers = [
        node("a", twin, copy(1, 4, world=3, common=False, of="b"), copy(0, 2, world=3)),
        node("b", copy(1, 4, world=3), copy(0, 4, world=3, twins=(2,), of="c")),
    ]
    found = choose_source(offers)
    assert lie(found) == [["b", "a"], ["a", "b"], ["a", "b"]]
    assert found is not None
    assert found.world_size == 3
    assert all(places[0].is_of(rank) for rank, places in enumerate(found.places))
    assert {(one.node, one.folder) for one in found.common} == {
        ("b", SlotFolder("d" * 16, 0)),
        ("b", SlotFolder("d" * 16, 0, "c" * 12)),
    }
    assert all(place.address == f"{place.node}:7000" for places in found.places for place in places)


def test_an_offer_names_folders_by_their_names() -> None:
    offer = node("a", copy(0, 4, of="b"))
    body = json.loads(json.dumps(plain(offer)))
    assert body["copies"][0]["folder"] == f"{'d' * 16}.0.{'b' * 12}"
    assert from_plain(Offer, body) == offer
    body["copies"][0]["folder"] = "../x"
    with pytest.raises(Invalid, match=r"folder is '../x', expected the name of a folder of slots"):
        from_plain(Offer, body)


def test_of_which_ranks_only_twins_are_left() -> None:
    found = choose_source([node("a", copy(0, 4, world=4, twins=(2,)), copy(1, 4, world=4, twins=(3,)))])
    assert found is not None
    assert [places[0].is_of(rank) for rank, places in enumerate(found.places)] == [True, True, False, False]


def of_two_groups(rank: int, step: int, generation: int = 1, **more: Any) -> FoundCopy:
    """As HSDP has it: ranks 0 and 2 hold the same shards, and so do 1 and 3."""
    return copy(rank, step, generation, world=4, twins=((rank + 2) % 4,), **more)


def both_of(first: int, step: int, generation: int = 1, **more: Any) -> list[FoundCopy]:
    return [of_two_groups(rank, step, generation, **more) for rank in (first, first + 1)]


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        # rank 0 was killed in the middle of its copy of step 5, and its twin was not
        ([node("a", *both_of(0, 4), of_two_groups(1, 5, keep=(1, 4))),
          node("b", *both_of(2, 4), *both_of(2, 5, keep=(1, 4)))], (1, 4)),
        # a spare still has what it had in the generation before, and the node in its place is lost
        ([node("a", *both_of(0, 4), *both_of(0, 5, 2, keep=(1, 4))), node("spare", *both_of(2, 4))], (2, 5)),
        # a node is lost with all that ranks 0 and 1 had for themselves
        ([node("b", *both_of(2, 4), *both_of(2, 5, keep=(1, 4)))], (1, 5)),
        # what all have is not what was kept, but older
        ([node("a", *both_of(0, 2)), node("b", *both_of(2, 2), *both_of(2, 5, keep=(1, 4)))], (1, 5)),
    ],
)  # fmt: skip
def test_a_step_that_a_rank_has_not_finished_gives_way_to_the_one_that_was_kept(
    offers: list[Offer], chosen: tuple[int, int]
) -> None:
    assert version(*offers) == chosen


def test_another_runs_disk_counts_where_nothing_else_is() -> None:
    foreign = replace(node("b", manifest=disk(20, 5, run="other")), foreign=True)
    assert version(node("a", *BOTH), foreign) == (1, 12)
    assert version(node("a", BOTH[0]), foreign) == (5, 20)


def test_the_run_of_any_copy_in_memory_is_this_jobs() -> None:
    """Also of one that is not whole."""
    own = replace(node("a", copy(0, 12, run="mine"), manifest=disk(20, 5, run="mine")), foreign=True)
    other = replace(node("b", manifest=disk(30, 5, run="other")), foreign=True)
    assert version(own, other) == (5, 20)


def test_a_bad_state_is_taken_last() -> None:
    bad = BadState(generation=3, step=12, present=4)
    assert version(node("a", *BOTH, copy(0, 11), copy(1, 11)), bad=bad) == (1, 11)
    assert version(node("a", *BOTH, copy(0, 11)), bad=bad) == (1, 12)
    assert version(node("a", *BOTH, manifest=disk(5)), bad=bad) == (1, 5)


def test_a_disk_that_does_not_verify_is_an_error_only_where_nothing_else_is() -> None:
    rotten = Offer(bad=("step 4: bytes differ",), node="b")
    assert version(node("a", *BOTH), rotten) == (1, 12)
    with pytest.raises(NoUsableCheckpoint, match="rank 1: step 4: bytes differ"):
        choose_source([node("a", BOTH[0]), rotten])


def test_what_cannot_be_loaded_is_told() -> None:
    offers = [
        node("a", copy(0, 12, 2, world=3), copy(0, 10, 2, world=3)),
        node("b", copy(2, 12, 2, world=3), copy(0, 4, world=1)),
    ]
    chosen = choose_source(offers)
    assert chosen is not None
    assert chosen.version == (1, 4)
    newest, older = unusable(offers, chosen)
    assert newest.reason == (
        "step 12 of generation 2 cannot be loaded: no node that answers has the shards of rank 1 of 3; "
        "the others are on nodes a, b"
    )
    assert (older.version, older.missing, older.nodes) == ((2, 10), (1, 2), ("a",))
    assert unusable(offers, Source(disk(11))) == (newest,)
    assert unusable(offers, None) == (newest, older)
    assert unusable(offers, None, BadState(generation=2, step=11, present=3)) == (older,)


def test_a_version_without_what_is_common_is_told_too() -> None:
    [one] = unusable([node("a", copy(0, 4, world=1, common=False))], None)
    assert one.reason == (
        "step 4 of generation 1 cannot be loaded: no node that answers has what is the same on all of its 1 ranks; "
        "the others are on node a"
    )
