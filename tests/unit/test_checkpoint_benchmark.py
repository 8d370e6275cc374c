"""The benchmark of checkpoints: a small state goes through it, and its figures go into the table."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from checkpoint import Run, run, table


def test_a_small_state_is_saved_behind_training_and_restored() -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is too long for the name of a socket
        measured = run("behind", 2, 1, Path(folder))
        left = os.listdir(folder)
    assert 0 < measured.copy_s < measured.stall_s < measured.durable_s
    assert measured.restore_s > 0
    assert measured.compare_s > 0
    assert not left


def test_the_table_compares_with_a_copy_and_with_torch() -> None:
    runs = [
        Run("behind", 100, 1, copy_s=0.010, stall_s=0.012, durable_s=0.3, restore_s=0.02, compare_s=0.004),
        Run("memory-only", 100, 1, copy_s=0.010, stall_s=0.011, durable_s=0.011, restore_s=0.02),
        Run("plain", 100, 1, copy_s=0.020, stall_s=0.240, durable_s=0.24, restore_s=0.1),
    ]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(runs).splitlines()[2:]]
    assert rows == [
        ["100 MB, 1 rank", "one copy in memory", "10 (10-20)", "", "", "", "", ""],
        ["100 MB, 1 rank", "the comparison of all ranks, in the first save", "4 (4-4)", "", "", "", "", ""],
        [
            "100 MB, 1 rank",
            "Checkpointer.save_to_memory()",
            "11 (11-11)",
            "1.10x (goal 1.3x)",
            "0.05x",
            "never",
            "20 (20-20)",
            "0.20x",
        ],
        [
            "100 MB, 1 rank",
            "Checkpointer.save(), disk written behind",
            "12 (12-12)",
            "1.20x (goal 1.3x)",
            "0.05x",
            "300 (300-300)",
            "20 (20-20)",
            "0.20x",
        ],
        [
            "100 MB, 1 rank",
            "torch.save() and fsync",
            "240 (240-240)",
            "12x",
            "",
            "240 (240-240)",
            "100 (100-100)",
            "",
        ],
    ]
