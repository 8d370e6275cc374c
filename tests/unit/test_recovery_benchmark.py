"""The figures of the recovery benchmark, from lines written by hand: a benchmark that flatters is worse than none."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

import recovery_figures as figures

FAULT_S = 110.5
OLD, NEW, NEWER = 1000, 2000, 3000


def world(pid: int, size: int, start_s: float, steps: Iterable[int]) -> list[object]:
    """A world whose ranks finish these steps together, one a second; the pid of rank r is pid + r."""
    return [
        figures.Step(start_s + turn, step, rank, size, 0, pid + rank)
        for turn, step in enumerate(steps)
        for rank in range(size)
    ]


def test_lines_become_steps() -> None:
    assert figures.parse_steps("5000.371246 374 1 2 0 30150\n5000.4 375 0 2 7 30149\n") == [
        figures.Step(5000.371246, 374, 1, 2, 0, 30150),
        figures.Step(5000.4, 375, 0, 2, 7, 30149),
    ]


def test_a_restarted_world_is_measured_from_the_fault_to_its_first_step() -> None:
    old = world(OLD, 2, 100.0, range(1, 12))  # the last one at 110.0, checkpoint after step 8
    new = world(NEW, 2, 117.0, range(9, 20))
    assert figures.recovery(old + new, FAULT_S, 2, lasting=5) == figures.Recovery(6.5, 7.0, 3)


def test_the_old_world_going_on_after_a_join_is_no_outage_and_no_new_world() -> None:
    old = world(OLD, 2, 100.0, range(1, 31))  # until 129.0
    new = world(NEW, 3, 133.0, range(26, 40))
    assert figures.recovery(old, FAULT_S, 3, lasting=5) is None
    assert figures.recovery(old + new, FAULT_S, 3, lasting=5) == figures.Recovery(22.5, 4.0, 5)


def test_a_process_that_stays_for_a_smaller_world_is_new_there() -> None:
    old = world(OLD, 3, 100.0, range(1, 12))
    new = world(OLD, 2, 112.0, range(12, 20))
    assert figures.recovery(old + new, FAULT_S, 2, lasting=5) == figures.Recovery(1.5, 2.0, 0)


def test_a_new_world_that_falls_apart_is_no_recovery_but_its_steps_were_done() -> None:
    old = world(OLD, 2, 100.0, range(1, 12))
    brief = world(NEW, 2, 115.0, [9, 10])
    assert figures.recovery(old + brief, FAULT_S, 2, lasting=5) is None
    new = world(NEWER, 2, 120.0, range(9, 20))
    # 9 and 10 were done three times, 11 twice.
    assert figures.recovery(old + brief + new, FAULT_S, 2, lasting=5) == figures.Recovery(9.5, 5.0, 5)


def test_a_world_of_the_wrong_size_is_no_recovery() -> None:
    steps = world(OLD, 3, 100.0, range(1, 12)) + world(NEW, 1, 115.0, range(12, 40))
    assert figures.recovery(steps, FAULT_S, 2, lasting=5) is None


def test_a_step_that_only_one_rank_wrote_before_the_fault_was_done() -> None:
    old = [*world(OLD, 2, 100.0, range(1, 12)), figures.Step(110.4, 12, 1, 2, 0, OLD + 1)]
    new = world(NEW, 2, 112.0, range(12, 20))
    assert figures.recovery(old + new, FAULT_S, 2, lasting=5).redone == 1


def test_gaps_before_the_fault_are_not_its_fault() -> None:
    old = world(OLD, 2, 50.0, [1, 2]) + world(OLD, 2, 108.0, range(3, 6))
    new = world(NEW, 2, 112.0, range(6, 20))
    assert figures.recovery(old + new, FAULT_S, 2, lasting=5).outage_s == 2.0


def test_a_start_has_no_outage_and_nothing_to_redo() -> None:
    steps = world(NEW, 2, 113.0, range(1, 10))
    assert figures.recovery(steps, FAULT_S, 2, lasting=5) == figures.Recovery(2.5, None, None)


@pytest.mark.parametrize(
    ("steps", "steady"),
    [
        ([], False),
        (world(OLD, 2, 100.0, range(5)), True),
        (world(OLD, 2, 100.0, range(4)), False),
        (world(OLD, 3, 100.0, range(5)), False),
        (world(OLD, 2, 100.0, range(5)) + world(NEW, 3, 110.0, range(2)), False),
        (world(OLD, 1, 100.0, range(5)) + world(NEW, 2, 110.0, range(5)), True),
    ],
    ids=["nothing", "long enough", "too short", "wrong size", "gone again", "grown"],
)
def test_steady_is_a_world_of_the_right_size_that_has_run_for_a_while(
    steps: list[object], steady: bool
) -> None:
    assert figures.is_steady(steps, 2, 5) is steady


def run(scenario: str, system: str, *results: object) -> list[object]:
    return [
        figures.Run(scenario, system, number, result, None, 0.5)
        if isinstance(result, str)
        else figures.Run(scenario, system, number, "recovered", result, 0.5)
        for number, result in enumerate(results)
    ]


def rows(runs: list[object]) -> list[list[str]]:
    text = figures.table(
        runs, {"kill": "a kill", "start": "a start", "join": "a join"}, ["slow", "ours"], "ours"
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_the_table_has_medians_extremes_failures_and_ratios() -> None:
    made = figures.Recovery
    runs = [
        *run("kill", "slow", made(8.0, 8.5, 4), "hung", made(6.0, 6.5, 0), made(7.0, 7.5, 24), "hung"),
        *run("kill", "ours", made(0.2, 0.25, 4), made(0.1, 0.15, 0), made(0.9, 0.95, 5)),
        *run("start", "slow", made(13.2, None, None)),
        *run("start", "ours", made(3.3, None, None)),
        *run("join", "slow", "died", "hung", "died"),
    ]
    header, line, *body = rows(runs)
    assert header == ["scenario", "what", "slow", "ours", "slow / ours"]
    assert all(set(cell) == {"-"} for cell in line)
    assert body == [
        ["a kill", "to the first new step, s", "7 (6-8), 2 of 5 hung", "0.20 (0.10-0.90)", "35x"],
        ["a kill", "outage, s", "7.5 (6.5-8.5), 2 of 5 hung", "0.25 (0.15-0.95)", "30x"],
        ["a kill", "steps redone", "4 (0-24), 2 of 5 hung", "4 (0-5)", ""],
        ["a start", "to the first new step, s", "13 (13-13)", "3.3 (3.3-3.3)", "4x"],
        ["a join", "to the first new step, s", "2 of 3 died, 1 of 3 hung", "", "-"],
    ]


def test_a_table_without_ours_has_no_ratios() -> None:
    assert rows(run("kill", "slow", "hung"))[0] == ["scenario", "what", "slow"]
