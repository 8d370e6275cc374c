"""What the metrics page promises: documented names, closed labels, true transitions, a page promtool accepts."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from elastic_agent.agent.workers import hang_detector as detector
from elastic_agent.health.metrics import (
    DURATION_BUCKETS_S,
    HANG_STATES,
    PREFIX,
    STATES,
    Build,
    Gauge,
    Metrics,
)

VERSION_LABELS = {"version", "torch_version", "nccl_version", "python_version"}


def new_metrics(
    run_id: str = "run-1", node: str = "node-a", causes: Sequence[str] = ("killed", "unknown")
) -> Metrics:
    return Metrics(
        run_id,
        node,
        Build(version="0.1.0", torch_version="2.13"),
        workers=2,
        min_nodes=1,
        started_at_s=1_700_000_000.25,
        causes=causes,
    )


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    constant = {"run_id": "run-1", "node": "node-a"}
    registry = CollectorRegistry()
    registry.register(metrics)
    return registry.get_sample_value(PREFIX + name, {**constant, **labels})


def test_the_labels_of_hangs_are_those_of_the_detector() -> None:
    watches: list[Any] = [SimpleNamespace(timeout=timeout) for timeout in (None, 60.0)]
    stalls: list[Any] = [None, object()]
    found = {detector.HangDetector.state(watch, stall) for watch, stall in product(watches, stalls)}
    assert found == set(HANG_STATES)


def test_every_series_carries_run_id_and_node_and_its_own_labels_only() -> None:
    metrics = new_metrics()
    own_labels = {family.name: set(family.labels) for family in metrics.families}
    parsed = list(text_string_to_metric_families(metrics.render().decode()))
    assert sum(len(family.samples) for family in parsed) > len(own_labels)
    for family in parsed:
        name = family.name.removeprefix(PREFIX)
        own = own_labels[name if family.type != "counter" else name + "_total"]
        for sample in family.samples:
            assert sample.labels["run_id"] == "run-1"
            assert sample.labels["node"] == "node-a"
            assert set(sample.labels) - {"run_id", "node", "le"} == own


def test_label_values_are_escaped() -> None:
    metrics = new_metrics(run_id='quote " backslash \\ newline \n end')
    [*families] = text_string_to_metric_families(metrics.render().decode())
    assert {sample.labels["run_id"] for family in families for sample in family.samples} == {
        'quote " backslash \\ newline \n end'
    }


def test_promtool_finds_no_problem() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package: prometheus)")
    metrics = new_metrics()
    set_every_gauge(metrics)
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=metrics.render(), capture_output=True, timeout=30, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def set_every_gauge(metrics: Metrics) -> None:
    for family in metrics.families:
        if isinstance(family, Gauge):
            for values in product(*family.labels.values()):
                family.set(math.inf, **dict(zip(family.labels, values, strict=True)))


def test_counters_and_histograms_exist_before_their_first_event() -> None:
    metrics = new_metrics()
    assert value(metrics, "worker_exits_total", local_rank="1", reason="killed") == 0
    assert value(metrics, "restarts_total", reason="lost") == 0
    assert value(metrics, "checkpoint_save_duration_seconds_count", tier="memory") == 0


@pytest.mark.parametrize("state", STATES)
def test_exactly_the_entered_state_is_one(state: str) -> None:
    metrics = new_metrics()
    metrics.state.choose("running")
    metrics.state.choose(state)
    assert {each: value(metrics, "state", state=each) for each in STATES} == {
        each: float(each == state) for each in STATES
    }


def test_a_counter_takes_any_amount_but_never_falls() -> None:
    metrics = new_metrics()
    metrics.productive_time_seconds_total.inc(0.5)
    metrics.productive_time_seconds_total.inc(0.25)
    with pytest.raises(ValueError, match="never falls"):
        metrics.productive_time_seconds_total.inc(-1)
    assert value(metrics, "productive_time_seconds_total") == 0.75


@pytest.mark.parametrize(
    ("observed_s", "first_bucket"),
    [(0.0, "0.05"), (0.05, "0.05"), (0.051, "0.1"), (600.0, "600"), (601.0, "+Inf")],
)
def test_an_observation_counts_in_every_bucket_from_its_own_up(observed_s: float, first_bucket: str) -> None:
    metrics = new_metrics()
    metrics.checkpoint_save_duration_seconds.observe(observed_s, tier="local")
    bounds = [*(f"{bound:g}" for bound in DURATION_BUCKETS_S), "+Inf"]
    counts = [
        value(metrics, "checkpoint_save_duration_seconds_bucket", tier="local", le=bound) for bound in bounds
    ]
    below = bounds.index(first_bucket)
    assert counts == [0.0] * below + [1.0] * (len(bounds) - below)


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda m: m.state.choose("sleeping"), "sleeping"),
        (lambda m: m.nodes.set(1, state="asleep"), "asleep"),
        (lambda m: m.store_errors_total.inc(operation="maybe"), "maybe"),
        (lambda m: m.worker_exits_total.inc(local_rank=2, reason="killed"), "'local_rank': 2"),
        (lambda m: m.checkpoint_save_duration_seconds.observe(1.0, tier="tape"), "tape"),
        (lambda m: m.restarts_total.inc(), "reason"),
        (lambda m: m.step.set(1, pid=77), "pid"),
    ],
)
def test_a_label_outside_its_closed_set_is_refused_and_named(
    write: Callable[[Metrics], None], named: str
) -> None:
    metrics = new_metrics()
    before = len(metrics.render().splitlines())
    with pytest.raises(ValueError, match=named):
        write(metrics)
    assert len(metrics.render().splitlines()) == before


def test_a_scrape_never_sees_half_a_transition() -> None:
    metrics = new_metrics()
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # let the threads meet inside a transition, not only between two
    stop = threading.Event()

    def keep_moving() -> None:
        generation = 0
        while not stop.is_set():
            generation += 1
            metrics.state.choose(STATES[generation % len(STATES)])
            metrics.count_steps(new=1, lost=1, timed=1, mean_s=0.1)

    mover = threading.Thread(target=keep_moving)
    mover.start()
    try:
        for _ in range(200):
            snapshot = {metric.name.removeprefix(PREFIX): metric.samples for metric in metrics.collect()}
            assert sum(sample.value for sample in snapshot["state"]) == 1
            counts = {snapshot[name][0].value for name in ("steps", "lost_steps")}
            assert len(counts) == 1
    finally:
        stop.set()
        mover.join()
        sys.setswitchinterval(switch_interval)


def test_the_metrics_directory_of_the_training_script_is_left_alone(tmp_path: Path) -> None:
    program = (
        "from elastic_agent.health.metrics import Build, Metrics\n"
        "about = 'r', 'n', Build(version='1')\n"
        "m = Metrics(*about, workers=1, min_nodes=1, started_at_s=0.0)\n"
        "m.restarts_total.inc(reason='unknown')\n"
        "m.step.set(1)\n"
        "assert m.render()\n"
    )
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []
