"""Which rank reads, which receives and which maps what another has got: tables."""

from __future__ import annotations

import pytest

from elastic_agent.worker.loading.node_sharing import Stand, Way, firsts, ways

HAS, FILLS, MAPS, RECEIVES = Way.HAS, Way.FILLS, Way.MAPS, Way.RECEIVES


def test_the_first_of_a_place_is_its_lowest_rank_and_in_no_place_everybody_is() -> None:
    assert firsts(["a", "a", "b", "", "b", ""]) == [0, 0, 2, 3, 2, 5]


@pytest.mark.parametrize(
    ("stands", "first", "expected"),
    [
        ([Stand("file")] * 3, [0, 0, 0], [HAS, HAS, HAS]),
        ([Stand("file"), Stand("other")], [0, 0], [HAS, RECEIVES]),
        ([Stand("file"), Stand()], [0, 0], [HAS, RECEIVES]),
        ([Stand(), Stand("file")], [0, 0], [RECEIVES, RECEIVES]),
        ([Stand("", "/m", True), Stand("", "/m")], [0, 0], [FILLS, MAPS]),
        ([Stand("", "/m", True), Stand("other", "/m")], [0, 0], [FILLS, MAPS]),
        ([Stand("", "/m"), Stand("", "/m")], [0, 0], [RECEIVES, RECEIVES]),
        ([Stand("", "/m", True), Stand()], [0, 0], [FILLS, RECEIVES]),
        ([Stand("file"), Stand("", "/m", True), Stand("", "/m")], [0, 1, 1], [HAS, FILLS, MAPS]),
        ([Stand("file"), Stand("file")], [0, 1], [HAS, HAS]),
    ],
)
def test_ways(stands: list[Stand], first: list[int], expected: list[Way]) -> None:
    assert ways([Stand.from_json(stand.to_json()) for stand in stands], first) == expected
