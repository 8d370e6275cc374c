"""Which rank reads, which receives and which maps what another has got: tables."""

from __future__ import annotations

import pytest

from elastic_agent.worker.checkpointing.loading.node_sharing import RankBytes, Route, first_ranks, routes

HAS, FILLS, MAPS, RECEIVES = Route.HAS, Route.FILLS, Route.MAPS, Route.RECEIVES


def test_the_first_of_a_place_is_its_lowest_rank_and_in_no_place_everybody_is() -> None:
    assert first_ranks(["a", "a", "b", "", "b", ""]) == [0, 0, 2, 3, 2, 5]


@pytest.mark.parametrize(
    ("ranks", "first", "expected"),
    [
        ([RankBytes("file")] * 3, [0, 0, 0], [HAS, HAS, HAS]),
        ([RankBytes("file"), RankBytes("other")], [0, 0], [HAS, RECEIVES]),
        ([RankBytes("file"), RankBytes()], [0, 0], [HAS, RECEIVES]),
        ([RankBytes(), RankBytes("file")], [0, 0], [RECEIVES, RECEIVES]),
        ([RankBytes("", "/m", True), RankBytes("", "/m")], [0, 0], [FILLS, MAPS]),
        ([RankBytes("", "/m", True), RankBytes("other", "/m")], [0, 0], [FILLS, MAPS]),
        ([RankBytes("", "/m"), RankBytes("", "/m")], [0, 0], [RECEIVES, RECEIVES]),
        ([RankBytes("", "/m", True), RankBytes()], [0, 0], [FILLS, RECEIVES]),
        ([RankBytes("file"), RankBytes("", "/m", True), RankBytes("", "/m")], [0, 1, 1], [HAS, FILLS, MAPS]),
        ([RankBytes("file"), RankBytes("file")], [0, 1], [HAS, HAS]),
    ],
)
def test_ways(ranks: list[RankBytes], first: list[int], expected: list[Route]) -> None:
    assert routes(ranks, first) == expected
