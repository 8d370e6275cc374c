"""The figures of the benchmark of `submit`, from runs written by hand."""

from __future__ import annotations

from submit import OURS, THEIRS, Idle, Start, idle_table, table


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def test_each_start_stands_beside_torchruns_of_the_same_shape() -> None:
    runs = [
        Start(OURS, 1, 0.2, 0.5, 0.1),
        Start(THEIRS, 1, 0.0, 5.0, 0.1),
        Start(OURS, 2, 0.2, 0.8, 0.1),
        Start(THEIRS, 2, 0.0, 4.0, 0.1),
        Start(OURS, 1, 0.4, 0.7, 0.1),
        Start(THEIRS, 1, 0.0, 7.0, 0.1),
    ]
    assert cells(table(runs)) == [
        ["two on one node", "0.30 (0.20-0.40)", "0.60 (0.50-0.70)", "1.0", "6 (5-7)", "10x"],
        ["one on each of two nodes", "0.20 (0.20-0.20)", "0.80 (0.80-0.80)", "1.0", "4 (4-4)", "5x"],
    ]


def test_an_idle_daemon_is_compared_with_the_goal_of_its_store() -> None:
    runs = [
        Idle("local", 0.05, 33.0, 35.0, 322.0, 313.0, 0.1),
        Idle("etcd", 0.25, 54.0, 35.0, 322.0, 379.0, 0.1),
    ]
    assert cells(idle_table(runs)) == [
        [
            "local",
            "0.05 (0.05-0.05)",
            "0.1",
            "33 (33-33)",
            "60",
            "35 (35-35)",
            "322 (322-322)",
            "313 (313-313)",
        ],
        [
            "etcd",
            "0.25 (0.25-0.25)",
            "0.2",
            "54 (54-54)",
            "60",
            "35 (35-35)",
            "322 (322-322)",
            "379 (379-379)",
        ],
    ]
