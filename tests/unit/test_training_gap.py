"""What the system tests take for a gap in training."""

from __future__ import annotations

import pytest

from tests.system.harness import longest_training_gap

History = dict[tuple[int, int], list[float]]
"""When each rank of each generation stepped; two ranks make a world."""


@pytest.mark.parametrize(
    ("history", "gap_s"),
    [
        pytest.param({}, 0.0, id="nothing happened"),
        pytest.param({(1, 0): [1, 2, 3], (1, 1): [1, 2, 3]}, 1.0, id="steps alone"),
        pytest.param({(1, 0): [1, 2, 3, 4, 5], (1, 1): [1, 2, 5]}, 3.0, id="one rank stood still"),
        pytest.param(
            {(1, 0): [1, 2, 3, 4], (1, 1): [1, 2], (2, 0): [6, 7], (2, 1): [7, 8]},
            5.0,
            id="from the first rank that stopped to the last that began",
        ),
        pytest.param(
            {(1, 0): [1], (1, 1): [1], (2, 0): [5], (2, 1): [7]}, 6.0, id="the newest has just begun"
        ),
        pytest.param(
            {(1, 0): [1, 2], (1, 1): [1, 2], (2, 0): [3, 4], (3, 0): [9], (3, 1): [9]},
            7.0,
            id="a generation that one rank never began",
        ),
    ],
)
def test_training_goes_on_while_all_ranks_of_a_generation_step(history: History, gap_s: float) -> None:
    steps = [
        {"generation": generation, "rank": rank, "world": 2, "at": at}
        for (generation, rank), times in history.items()
        for at in times
    ]
    assert longest_training_gap(steps) == gap_s
