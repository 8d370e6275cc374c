from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from elastic_agent.rendezvous.coordinator.next_world import places

COMES = None


@pytest.mark.parametrize(
    ("survivors", "joining", "new"),
    [
        # nothing is lost: newcomers come behind
        ([0, 1, 2], [], [0, 1, 2]),
        ([0, 1], [COMES, COMES], [0, 1, 2, 3]),
        # a newcomer takes the place of a lost one, several in their order, and what is left is at the end
        ([0, 2], [COMES], [0, 2, 1]),
        ([0, 3], [COMES, COMES], [0, 3, 1, 2]),
        ([0, 2], [COMES, COMES], [0, 2, 1, 3]),
        # a world that shrinks: only those beyond its end move
        ([0, 2, 3], [], [0, 2, 1]),
        ([0, 3, 4, 5], [], [0, 3, 1, 2]),
        ([0, 1, 4, 5], [COMES], [0, 1, 4, 2, 3]),
        # the first place is a survivor's: of one that moves anyhow, or else of the last
        ([1, 2], [], [1, 0]),
        ([1, 2, 3], [], [1, 2, 0]),
        ([1, 2], [COMES], [1, 0, 2]),
        ([2], [COMES, COMES], [0, 1, 2]),
        ([3, 5], [COMES, COMES], [3, 0, 1, 2]),
        # one that has joined again takes its own place, unless that is taken or no more
        ([0, 2], [COMES, 1], [0, 2, 3, 1]),
        ([0, 3], [1, COMES], [0, 3, 1, 2]),
        ([1, 2], [0], [1, 0, 2]),
        ([0], [5, COMES], [0, 1, 2]),
        # none has stayed
        ([], [COMES, COMES], [0, 1]),
        ([], [2, COMES, 0], [2, 1, 0]),
        ([], [], []),
    ],
)
def test_where_each_node_stands(
    survivors: Sequence[int], joining: Sequence[int | None], new: Sequence[int]
) -> None:
    assert places(survivors, joining) == new


def test_no_survivor_moves_that_need_not() -> None:
    for size in range(6):
        for staying in itertools.product((True, False), repeat=size):
            survivors = [place for place, stays in enumerate(staying) if stays]
            lost = [place for place, stays in enumerate(staying) if not stays]
            for joining in itertools.product((COMES, *lost[:2]), repeat=3):
                came = [
                    place
                    for number, place in enumerate(joining)
                    if place not in joining[:number] or place is None
                ]
                new = places(survivors, came)
                assert sorted(new) == list(range(len(survivors) + len(came)))
                stay = new[: len(survivors)]
                moved = sum(old != now for old, now in zip(survivors, stay, strict=True))
                beyond = sum(old >= len(new) for old in survivors)
                assert moved == max(beyond, bool(survivors) and survivors[0] != 0)
                assert not survivors or 0 in stay
