"""The benchmark of a pool's decision: it decides, and its figures go into the table."""

from __future__ import annotations

import pytest

from schedule import CASES, GOAL_MS, Run, measure, table


@pytest.mark.parametrize(
    ("jobs", "allocations"), [([(1, 2)] * 3, 4), ([(9, 9), (2, 4)], 4), ([(1, 4), (3, 3)], 4)]
)
def test_a_small_queue_gets_its_nodes(jobs: list[tuple[int, int]], allocations: int) -> None:
    run = measure("small", jobs, nodes=4)
    assert run.allocations == allocations
    assert run.first_ms > 0
    assert run.again_ms > 0


def test_the_table_has_the_slower_decision_and_the_goal() -> None:
    case = next(iter(CASES))
    lines = table([Run(case, 4.0, 2.0, 100), Run(case, 5.0, 10.0, 100)]).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [
        case,
        "7 (4-10)",
        f"{GOAL_MS:g}",
        "2.9x",
    ]
