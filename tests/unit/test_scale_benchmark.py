"""The scale benchmark: its figures from runs written by hand, and its nodes on the memory store."""

from __future__ import annotations

import sys
import threading

import pytest

import rendezvous_scale
from elastic_agent.rendezvous.store.memory import MemoryStore
from rendezvous_scale import SYSTEMS
from scale_figures import Part, Run, medians, table
from scale_nodes import OurNodes

LIMIT_S = 60


def run(system: str, nodes: int, *seconds: float, outcome: str = "done") -> Run:
    parts = tuple(Part(one, 9, nodes, nodes + 1, 2048 * nodes) for one in seconds)
    return Run(system, nodes, 0, outcome, parts, 0.5)


def test_the_table_has_medians_failures_ratios_and_what_each_node_cost() -> None:
    runs = [
        *(run("etcd", 8, join, 0.2) for join in (0.1, 0.3, 0.2)),
        run("torchrun", 8, 1.0, 4.0),
        run("torchrun", 8, 3.0, outcome="hung"),
        run("torchrun", 8, outcome="died"),
        run("etcd", 100, 12.0, 0.5),
    ]
    _head, _line, *rows = table(runs, SYSTEMS).splitlines()
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in rows] == [
        [
            "8",
            "etcd",
            "0.20 (0.10-0.30)",
            "0.20 (0.20-0.20)",
            "10x and 20x",
            "1.0 + 1.0",
            "2.0 + 2.0",
            "9 + 9",
        ],
        [
            "8",
            "torchrun",
            "2 (1-3), 1 of 3 died",
            "4 (4-4), 1 of 3 hung",
            "",
            "1.0 + 1.0",
            "2.0 + 2.0",
            "9 + 9",
        ],
        ["100", "etcd", "12 (12-12)", "0.50 (0.50-0.50)", "", "1.0 + 1.0", "2.0 + 2.0", "101 + 101"],
    ]


def test_what_is_plotted_are_the_medians_of_the_part() -> None:
    runs = [run("etcd", nodes, join, 2 * join) for nodes in (64, 8) for join in (1.0, 3.0, 2.0)]
    runs.append(run("torchrun", 8, outcome="hung"))
    assert medians(runs, 0) == {"etcd": {8: 2.0, 64: 2.0}}
    assert medians(runs, 1) == {"etcd": {8: 4.0, 64: 4.0}}


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["rendezvous_scale.py", "--plot", "nowhere.png"])
    with pytest.raises(SystemExit, match=r"pip install matplotlib"):
        rendezvous_scale.main()


def test_torchrun_is_spared_our_sizes_and_repetitions_are_outermost() -> None:
    plan = list(rendezvous_scale._plan([8], [16], ["torchrun", "c10d"], 2))
    once = [(8, "c10d"), (8, "torchrun"), (16, "c10d")]
    assert plan == [(nodes, system, number) for number in (0, 1) for nodes, system in once]


def test_simulated_nodes_join_and_join_again_with_one_write_each() -> None:
    store = MemoryStore()
    crowds = [OurNodes(lambda: store, first, 2, 4) for first in (0, 2)]

    def part(what: str) -> None:
        threads = [
            threading.Thread(
                target=crowd.join if what == "join" else crowd.rejoin, kwargs=kwargs, daemon=True
            )
            for crowd, kwargs in zip(crowds, how[what], strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), f"no {what} within {LIMIT_S} s"

    how: dict[str, list[dict[str, bool]]] = {"join": [{}, {}], "rejoin": [{"fail": True}, {"fail": False}]}
    part("join")
    traffic = [crowd.meter.read() for crowd in crowds]
    assert sum(one.revisions for one in traffic) == 4 + 1
    assert store.read(()).revision == 5
    part("rejoin")
    later = [crowd.meter.read() for crowd in crowds]
    # The failure and two worlds; and each node that had not failed says that it has settled.
    assert store.read(()).revision == sum(one.revisions for one in later) == 5 + 3 + 3
    assert all(one.received > before.received for one, before in zip(later, traffic, strict=True))
    for crowd in crowds:
        crowd.close()
