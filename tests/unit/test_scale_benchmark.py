"""The scale benchmark: its figures from runs written by hand, its nodes on the memory store, its command on etcd."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from elastic_agent.rendezvous.memory import MemoryStore

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMIT_S = 60


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command, with its parts as its attributes."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("rendezvous_scale")


def run(module: ModuleType, system: str, nodes: int, *seconds: float, outcome: str = "done") -> object:
    parts = tuple(module.Part(one, 9, nodes, nodes + 1, 2048 * nodes) for one in seconds)
    return module.Run(system, nodes, 0, outcome, parts, 0.5)


def test_the_table_has_medians_failures_ratios_and_what_each_node_cost(benchmark: ModuleType) -> None:
    runs = [
        *(run(benchmark, "etcd", 8, join, 0.2) for join in (0.1, 0.3, 0.2)),
        run(benchmark, "torchrun", 8, 1.0, 4.0),
        run(benchmark, "torchrun", 8, 3.0, outcome="hung"),
        run(benchmark, "torchrun", 8, outcome="died"),
        run(benchmark, "etcd", 100, 12.0, 0.5),
    ]
    _head, _line, *rows = benchmark.table(runs, benchmark.SYSTEMS).splitlines()
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


def test_what_is_plotted_are_the_medians_of_the_part(benchmark: ModuleType) -> None:
    runs = [run(benchmark, "etcd", nodes, join, 2 * join) for nodes in (64, 8) for join in (1.0, 3.0, 2.0)]
    runs.append(run(benchmark, "torchrun", 8, outcome="hung"))
    assert benchmark.medians(runs, 0) == {"etcd": {8: 2.0, 64: 2.0}}
    assert benchmark.medians(runs, 1) == {"etcd": {8: 4.0, 64: 4.0}}


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["rendezvous_scale.py", "--plot", "nowhere.png"])
    with pytest.raises(SystemExit, match=r"pip install 'elastic-agent\[plot\]'"):
        benchmark.main()


def test_torchrun_is_spared_our_sizes_and_repetitions_are_outermost(benchmark: ModuleType) -> None:
    plan = list(benchmark._plan([8], [16], ["torchrun", "c10d"], 2))
    once = [(8, "c10d"), (8, "torchrun"), (16, "c10d")]
    assert plan == [(nodes, system, number) for number in (0, 1) for nodes, system in once]


def test_simulated_nodes_join_and_join_again_with_one_write_each(benchmark: ModuleType) -> None:
    module = importlib.import_module("scale_nodes")
    store = MemoryStore()
    crowds = [module.OurNodes(lambda: store, first, 2, 4) for first in (0, 2)]

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


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed: .ci/system-packages etcd")
def test_the_command_measures_nodes_in_several_processes(tmp_path: Path) -> None:
    words = ["--system", "etcd", "--sizes", "4", "--our-sizes", "--repeat", "1", "--processes", "2"]
    words += ["--limit-s", str(LIMIT_S), "--json", str(tmp_path / "runs.json")]
    command = [sys.executable, str(BENCHMARKS / "rendezvous_scale.py"), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    (one,) = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert (one["outcome"], len(one["parts"])) == ("done", 2)
    assert one["parts"][0]["writes"] == 5
    assert "| 4     | etcd   |" in ended.stdout
