"""The figures of the recovery benchmark, from lines written by hand: a benchmark that flatters is worse than none."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import recovery_costs as costs
import recovery_figures as figures
import recovery_scenarios as scenarios
import recovery_systems as systems
from recovery_job import Launch

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


def test_survivors_that_keep_running_are_in_another_world_after_the_loss_and_after_the_return() -> None:
    """As torchft has it: the one that stays counts the changes, the one that comes begins to count."""
    old = world(OLD, 2, 100.0, range(1, 12))
    alone = [figures.Step(112.0 + turn, 12 + turn, 0, 1, 1, OLD) for turn in range(10)]
    pair = [
        figures.Step(122.0 + turn, 22 + turn, rank, 2, generation, pid)
        for turn in range(10)
        for rank, generation, pid in ((0, 2, OLD), (1, 0, NEW))
    ]
    assert figures.recovery(old + alone, FAULT_S, 2, lasting=5) is None
    assert figures.recovery(old + alone + pair, FAULT_S, 2, lasting=5) == figures.Recovery(11.5, 2.0, 0)


def test_what_the_agents_say_of_the_last_recovery_is_found_in_their_logs() -> None:
    said = [
        "12:00:00.000 [a] generation 1: first step is 1\n"
        "12:00:00.000 [a] generation 2: first step is 9, after 0.300 s without training (detect 0.100) because of b\n"
        "12:00:01.000 [a] generation 3: first step is 17, after 0.184 s without training (detect 0.002, stop 0.031)"
        " because killed by SIGKILL (signal 9)\n"
        "12:00:02.000 [a] stopping generation 3: node b joining\n",
        "12:00:00.000 [b] generation 3: first step is 17\n",
    ]
    assert figures.timelines(said) == ["0.184 s without training (detect 0.002, stop 0.031)"]


def run(scenario: str, system: str, *results: object) -> list[object]:
    """A text is the outcome of a run that failed, a `Recovery` or a dict of figures what was measured."""
    return [
        figures.Run(scenario, system, number, *outcome(result), 0.5) for number, result in enumerate(results)
    ]


def outcome(result: object) -> tuple[str, dict[str, float]]:
    if isinstance(result, str):
        return result, {}
    return "measured", result if isinstance(result, dict) else figures.figures_of(result)


TITLES = {"kill": "a kill", "start": "a start", "join": "a join", "rest": "at rest"}
GOALS = {("kill", "recovery"): "<= 0.2", ("rest", "node_mb"): "<= 600"}


def rows(runs: list[object]) -> list[list[str]]:
    text = figures.table(runs, TITLES, ["slow", "ours", "ours-new"], ("ours", "ours-new"), GOALS)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_the_table_has_medians_extremes_failures_ratios_and_goals() -> None:
    made = figures.Recovery
    runs = [
        *run("kill", "slow", made(8.0, 8.5, 4), "hung", made(6.0, 6.5, 0), made(7.0, 7.5, 24), "hung"),
        *run("kill", "ours", made(0.2, 0.25, 4), made(0.1, 0.15, 0), made(0.9, 0.95, 5)),
        *run("start", "slow", made(13.2, None, None)),
        *run("start", "ours", made(3.3, None, None)),
        *run("join", "slow", "died", "hung", "died"),
        *run("rest", "slow", {"node_mb": 1900.0}),
        *run("rest", "ours", {"node_mb": 475.0}),
    ]
    header, line, *body = rows(runs)
    assert header == ["scenario", "what", "slow", "ours", "slow / ours", "goal"]
    assert all(set(cell) == {"-"} for cell in line)
    assert body == [
        ["a kill", "to the first new step, s", "7 (6-8), 2 of 5 hung", "0.20 (0.10-0.90)", "35x", "<= 0.2"],
        ["a kill", "outage, s", "7.5 (6.5-8.5), 2 of 5 hung", "0.25 (0.15-0.95)", "30x", ""],
        ["a kill", "steps redone", "4 (0-24), 2 of 5 hung", "4 (0-5)", "", ""],
        ["a start", "to the first new step, s", "13 (13-13)", "3.3 (3.3-3.3)", "4x", ""],
        ["a join", "to the first new step, s", "2 of 3 died, 1 of 3 hung", "", "-", ""],
        ["at rest", "whole node, MB", "1900 (1900-1900)", "475 (475-475)", "4x", "<= 600"],
    ]


def test_the_ratios_are_those_of_our_last_variant() -> None:
    made = figures.Recovery
    runs = [
        *run("kill", "slow", made(8.0, None, None)),
        *run("kill", "ours", made(2.0, None, None)),
        *run("kill", "ours-new", made(0.5, None, None)),
    ]
    head, _, only = rows(runs)
    assert head == ["scenario", "what", "slow", "ours", "ours-new", "slow / ours", "goal"]
    assert only[-2:] == ["16x", "<= 0.2"]


def test_a_table_without_ours_has_no_ratios() -> None:
    assert rows(run("kill", "slow", "hung"))[0] == ["scenario", "what", "slow", "goal"]


def test_the_timeline_that_is_shown_is_that_of_the_median_run() -> None:
    runs = [
        figures.Run("kill", "ours", number, "recovered", {"recovery": recovery_s}, 0.5, (f"run {number}",))
        for number, recovery_s in enumerate((0.9, 0.1, 0.2))
    ]
    seen = figures.timeline_list(runs, TITLES)
    assert seen == "- a kill (ours, 0.20 s as the benchmark saw it): run 2"
    assert figures.timeline_list(run("kill", "ours", "hung"), TITLES) == ""


# --- What a steady job needs


def process(proc: Path, pid: int, *, parent: int, ticks: tuple[int, int] = (0, 0), pss_kb: int = 0) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    fields = ["S", str(parent), *["0"] * 9, *map(str, ticks), "0", "0"]
    (folder / "stat").write_text(f"{pid} (a (strange) name) {' '.join(fields)}\n")
    (folder / "smaps_rollup").write_text(
        f"00400000-7fff ---p 0 00:00 0 [rollup]\nRss: 999 kB\nPss:   {pss_kb} kB\n"
    )


def test_memory_is_the_sum_of_shares_of_those_that_live(tmp_path: Path) -> None:
    process(tmp_path, 10, parent=1, pss_kb=1000)
    process(tmp_path, 11, parent=10, pss_kb=500)
    assert costs.pss_mb([10, 11, 12], tmp_path) == pytest.approx(1.536)


def test_processor_time_is_what_was_spent_between_two_looks(tmp_path: Path) -> None:
    process(tmp_path, 10, parent=1, ticks=(100, 50))
    process(tmp_path, 11, parent=10, ticks=(7, 0))
    second = 1.5 * costs.TICKS_S * 100
    assert costs.processor_s([10, 12], tmp_path) == pytest.approx({10: second})
    assert costs.spent_s({10: 1.5, 13: 4.0}, {10: 2.0, 11: 0.25}) == pytest.approx(0.75)


def test_a_family_is_all_that_descend(tmp_path: Path) -> None:
    for pid, parent in ((10, 1), (11, 10), (12, 11), (13, 1)):
        process(tmp_path, pid, parent=parent)
    assert costs.family([10], tmp_path) == {10, 11, 12}


# --- What there is to run


def test_every_goal_is_of_a_scenario_and_a_figure_that_are_measured() -> None:
    names = {scenario.name for scenario in scenarios.SCENARIOS}
    assert {name for name, _ in scenarios.GOALS} <= names
    assert {figure for _, figure in scenarios.GOALS} <= set(figures.FIGURES)


@pytest.mark.parametrize("system", systems.SYSTEMS, ids=lambda system: system.name)
@pytest.mark.parametrize("scenario", scenarios.SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_system_has_workers_for_every_scenario(
    system: systems.System, scenario: scenarios.Scenario
) -> None:
    launch = Launch(scenario.setting, 0, "127.0.0.1", "127.0.0.1:29400", Path("/job"))
    commands = system.commands(launch)
    told = " ".join(map(" ".join, commands))
    workers = sum(int(count) for count in re.findall(r"--nproc-per-node=(\d+)", told))
    assert workers == scenario.setting.workers
    assert "/job" in told
    for script in re.findall(r"\S+_job\.py", told):
        assert Path(script).exists()
