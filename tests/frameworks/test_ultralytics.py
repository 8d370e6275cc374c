"""Ultralytics under elastic-agent: a kill costs the epoch that is under way, and no epoch before it."""

from __future__ import annotations

import csv
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.harness import MARKER, TORCH_PRELOADED, Agent, Job

from .scene import EXAMPLES, TRAINED_S, Scene

ON_CPU = Path(__file__).with_name("ultralytics_on_cpu.py")
BATCHES, EPOCHS = 4, 5
"""Of an epoch of the example in batches of 16 over all workers, and of the training."""

pytestmark = pytest.mark.timeout(400)


def scene_of(job: Job) -> Scene:
    scene = Scene(job, str(ON_CPU), EXAMPLES / "ultralytics_train.py")
    scene.environment |= {
        "PYTHONPATH": str(Path(__file__).with_name("stand_ins")),
        "YOLO_CONFIG_DIR": str(job.folder),
        "YOLO_OFFLINE": "true",
        "YOLO_AUTOINSTALL": "false",
    }
    return scene


def epochs(scene: Scene) -> list[int]:
    """Those in Ultralytics' own table of results."""
    (file,) = scene.folder.rglob("results.csv")
    with open(file) as lines:
        return [int(line["epoch"]) for line in csv.DictReader(lines)]


def begun(scene: Scene, generation: int) -> int:
    """The epoch with which this generation began."""
    return (min(scene.steps(generation)) - 1) // BATCHES + 1


def by_elastic_agent(scene: Scene, workers: int) -> Agent:
    return scene.start("a", f"--nproc-per-node={workers}", TORCH_PRELOADED)


def by_start_file(scene: Scene, workers: int) -> Agent:
    environment = {
        **os.environ,
        **scene.environment,
        MARKER: scene.job.id,
        "SYSTEM_TEST_HISTORY": str(scene.job.folder / "history.jsonl"),
    }
    words = [sys.executable, str(ON_CPU), str(workers)]
    agent = Agent("start file", words, environment, scene.job.folder / "start.log")
    scene.job.agents.append(agent)
    return agent


@pytest.mark.parametrize(
    ("started", "workers"), [(by_elastic_agent, 1), (by_elastic_agent, 2), (by_start_file, 2)]
)
def test_a_killed_worker_costs_the_epoch_that_was_under_way(
    job: Job, started: Callable[[Scene, int], Agent], workers: int
) -> None:
    scene = scene_of(job)
    agent = started(scene, workers)
    first = scene.trained(workers, steps=BATCHES + 2)
    os.kill(first.pid(workers - 1), signal.SIGKILL)
    second = scene.trained(workers, after=first.number, steps=1)
    scene.slow.unlink()
    assert agent.exit_code(TRAINED_S) == 0
    redone = scene.redone(first, second)
    print(f"{started.__name__}, {workers} workers: batches done again after the kill: {redone}")
    assert begun(scene, second.number) == 2
    assert redone <= BATCHES
    assert epochs(scene) == list(range(1, EPOCHS + 1)), "each epoch is there, and once"


def test_a_node_that_leaves_goes_on_with_the_next_epoch_when_it_is_back(job: Job, second_job: Job) -> None:
    """A job of Ultralytics has one node, so it ends then; the next one goes on."""
    scene, later = scene_of(job), scene_of(second_job)
    later.environment["TEST_FOLDER"] = str(scene.folder)
    leaver = by_elastic_agent(scene, 1)
    first = scene.trained(1, steps=BATCHES + 2)
    leaver.signal(signal.SIGTERM)
    assert leaver.exit_code() == 128 + signal.SIGTERM
    later.slow.unlink()
    assert by_elastic_agent(later, 1).exit_code(TRAINED_S) == 0
    redone = scene.steps(first.number)[-1] - BATCHES
    print(f"batches done again after the leave: {redone}")
    assert later.steps(1)[0] == BATCHES + 1
    assert epochs(scene) == list(range(1, EPOCHS + 1))
