"""Ultralytics under elastic-agent: a kill costs the epoch that is under way, and no epoch before it."""

from __future__ import annotations

import csv
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.harness import TORCH_PRELOADED, Agent, Job
from tests.system.processes import MARKER

from .framework_job import EXAMPLES, TRAINED_S, FrameworkJob

ON_CPU = Path(__file__).with_name("ultralytics_on_cpu.py")
BATCHES, EPOCHS = 4, 5
"""Of an epoch of the example in batches of 16 over all workers, and of the training."""

pytestmark = pytest.mark.timeout(400)


def run_of(job: Job) -> FrameworkJob:
    run = FrameworkJob(job, str(ON_CPU), EXAMPLES / "ultralytics_train.py")
    run.environment |= {
        "PYTHONPATH": str(Path(__file__).with_name("stand_ins")),
        "YOLO_CONFIG_DIR": str(job.folder),
        "YOLO_OFFLINE": "true",
        "YOLO_AUTOINSTALL": "false",
    }
    return run


def epochs(run: FrameworkJob) -> list[int]:
    """Those in Ultralytics' own table of results."""
    (file,) = run.folder.rglob("results.csv")
    with open(file) as lines:
        return [int(line["epoch"]) for line in csv.DictReader(lines)]


def begun(run: FrameworkJob, generation: int) -> int:
    """The epoch with which this generation began."""
    return (min(run.steps(generation)) - 1) // BATCHES + 1


def by_elastic_agent(run: FrameworkJob, workers: int) -> Agent:
    return run.start("a", f"--nproc-per-node={workers}", TORCH_PRELOADED)


def by_start_file(run: FrameworkJob, workers: int) -> Agent:
    environment = {
        **os.environ,
        **run.environment,
        MARKER: run.job.id,
        "SYSTEM_TEST_HISTORY": str(run.job.folder / "history.jsonl"),
    }
    words = [sys.executable, str(ON_CPU), str(workers)]
    agent = Agent("start file", words, environment, run.job.folder / "start.log")
    run.job.agents.append(agent)
    return agent


@pytest.mark.parametrize(
    ("started", "workers"), [(by_elastic_agent, 1), (by_elastic_agent, 2), (by_start_file, 2)]
)
def test_a_killed_worker_costs_the_epoch_that_was_under_way(
    job: Job, started: Callable[[FrameworkJob, int], Agent], workers: int
) -> None:
    run = run_of(job)
    agent = started(run, workers)
    first = run.trained(workers, steps=BATCHES + 2)
    os.kill(first.pid(workers - 1), signal.SIGKILL)
    second = run.trained(workers, after=first.number, steps=1)
    run.slow.unlink()
    assert agent.exit_code(TRAINED_S) == 0
    redone = run.redone(first, second)
    print(f"{started.__name__}, {workers} workers: batches done again after the kill: {redone}")
    assert begun(run, second.number) == 2
    assert redone <= BATCHES
    assert epochs(run) == list(range(1, EPOCHS + 1)), "each epoch is there, and once"


def test_a_node_that_leaves_goes_on_with_the_next_epoch_when_it_is_back(job: Job, second_job: Job) -> None:
    """A job of Ultralytics has one node, so it ends then; the next one goes on."""
    run, later = run_of(job), run_of(second_job)
    later.environment["TEST_FOLDER"] = str(run.folder)
    leaver = by_elastic_agent(run, 1)
    first = run.trained(1, steps=BATCHES + 2)
    leaver.signal(signal.SIGTERM)
    assert leaver.exit_code() == 128 + signal.SIGTERM
    later.slow.unlink()
    assert by_elastic_agent(later, 1).exit_code(TRAINED_S) == 0
    redone = run.steps(first.number)[-1] - BATCHES
    print(f"batches done again after the leave: {redone}")
    assert later.steps(1)[0] == BATCHES + 1
    assert epochs(run) == list(range(1, EPOCHS + 1))
