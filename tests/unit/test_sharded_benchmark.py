"""The table of the benchmark of sharded state."""

from __future__ import annotations

from recovery_figures import Step
from sharded import DCP, OURS, Run, stood_still, table


def test_the_table_compares_with_a_copy_with_dcp_and_with_no_replica() -> None:
    saves = {"copy": 0.01, "remember": 0.012, "save": 0.015, "async_save": 0.06}
    fault = {"recovery_s": 0.5, "outage_s": 0.5, "redone": 3, "load_s": 0.1, "disk_mb": 0.0, "still_s": 0.4}
    runs = [
        Run("stall", "saves", 100, 0.0, saves),
        Run("killed", OURS, 100, 0.0, fault),
        Run("killed", DCP, 100, 0.0, {**fault, "recovery_s": 2.0, "disk_mb": 300.0}),
        Run("planned", "3 -> 2", 100, 0.0, {**fault, "redone": 0}),
        Run("replicas", "0", 100, 0.0, {"a_second": 20.0}),
        Run("replicas", "1", 100, 0.0, {"a_second": 19.0}),
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(runs).splitlines()[2:]]
    rows = {(what, peer): (scenario, ours, ratio) for scenario, what, ours, _, peer, _, ratio in lines}
    assert rows["remember(): stall, ms", "copy"] == ("100 MB a rank", "12 (12-12)", "1.20x")
    assert rows["save(): stall, ms", "async_save"] == ("100 MB a rank", "15 (15-15)", "0.25x")
    assert rows["to the first new step, s", DCP] == ("a node of 3 killed", "0.50 (0.50-0.50)", "0.25x")
    assert rows["data files of the disk opened, MB", DCP] == ("a node of 3 killed", "0 (0-0)", "0x")
    still, outage = (
        "from the last step to the first new one, s",
        "longest pause since the change was asked for, s",
    )
    assert rows[still, ""] == ("planned, 3 -> 2", "0.40 (0.40-0.40)", "")
    assert rows[outage, ""] == ("planned, 3 -> 2", "0.50 (0.50-0.50)", "")
    assert rows["steps a second", "no replica"] == ("1 replica", "19 (19-19)", "0.95x")


def test_a_planned_change_takes_from_the_last_step_of_the_old_world_to_the_first_of_the_new() -> None:
    """A pause before that is no part of it."""
    steps = [
        Step(at_s, 0, 0, 3, generation, 1)
        for at_s, generation in ((1, 4), (9, 4), (9.1, 4), (9.6, 5), (9.7, 5))
    ]
    assert stood_still(steps) == 9.6 - 9.1
