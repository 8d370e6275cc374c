"""The benchmark of step(): each case runs, its figures go into the table, and a step is cheap on any machine."""

from __future__ import annotations

import pytest

from step_overhead import CASES, GOAL_US, Run, run, table


@pytest.mark.parametrize("case", CASES)
def test_each_case_is_measured_and_step_is_cheap(case: str) -> None:
    measured = run(case, calls=400)
    assert 0 < measured.empty_ns < measured.step_ns
    if case != "pending":
        # A median of 21 blocks: what else the machine does has to disturb eleven of them.
        assert measured.step_ns < 4 * GOAL_US * 1000


def test_the_table_compares_each_run_with_its_own_empty_calls() -> None:
    runs = [Run("plain", 40.0, 400.0), Run("plain", 60.0, 420.0), Run("pending", 100.0, 20_000.0)]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(runs).splitlines()[2:]] == [
        ["an empty function", "60 (40-100)", "", ""],
        ["step()", "410 (400-420)", "8.2x", "5 us"],
        ["step() while a change is pending", "20000 (20000-20000)", "200x", ""],
    ]
