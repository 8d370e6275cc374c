"""The benchmark of what watching a job costs: a step is measured with and without, and the table compares each run."""

from __future__ import annotations

from watching import STEP_S, Run, step_costs, table


def test_a_step_is_measured_with_and_without_the_measure_of_waits() -> None:
    measured = step_costs(20)
    assert 0 < measured.unwatched_s < STEP_S
    assert 0 < measured.watched_s < STEP_S


def test_the_table_compares_each_run_with_its_own_other_half() -> None:
    runs = [
        Run("step", 420e-6, 400e-6),
        Run("agent", 1.2, 1.0),
        Run("step", 440e-6, 400e-6),
        Run("agent", 1.5, 1.0),
    ]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(runs).splitlines()[2:]] == [
        ["a worker's step, us", "430 (420-440)", "400 (400-400)", "1.07x", "+30.0 us, 0.15%", "1% of 20 ms"],
        ["the agent of 8 workers, s per minute", "1.35 (1.20-1.50)", "1 (1-1)", "1.35x", "+0.35 s", "0.3 s"],
    ]
