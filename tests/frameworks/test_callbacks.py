"""The examples for other libraries lose no step in planned changes, little to a kill, and end as they must."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.system.harness import TORCH_PRELOADED, Job

from .scene import RECORDED, TRAINED_S, Scene

pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True)
class Case:
    steps: int
    batch: int
    """Of one rank."""
    epoch: int | None = None
    """The samples of an epoch, whose last step ends with it."""
    lost: int = 1
    """Steps that a kill costs at most. 1: the copies of a step are not made by all nodes at one instant."""


def numbers(state: Any) -> Any:
    """To the last bit."""
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, state)


CASES = {
    "transformers_trainer.py": Case(120, 16),
    "lightning_fit.py": Case(120, 16),
    "accelerate_loop.py": Case(120, 16, epoch=1024),
    "fsdp2_dcp.py": Case(120, 16, epoch=1024, lost=20),
}


def position(state: dict[str, Any], case: Case) -> int:
    """Samples that are finished, as the checkpoint has it."""
    if case.epoch is None:
        found: int = state["trainer"]["data"]["position"]
        return found
    sampler = state["sampler"]
    return sampler["epoch"] * case.epoch + sampler["position"]


def samples(scene: Scene, case: Case) -> int:
    """How many samples the steps that count had: of each step the last time that it was done."""
    worlds = {record["step"]: record["world"] for record in scene.job.history(what="step", rank=0)}
    assert sorted(worlds) == list(range(1, case.steps + 1)), "a step is missing"
    done = 0
    for number in sorted(worlds):
        end = done + worlds[number] * case.batch
        done = min(end, (done // case.epoch + 1) * case.epoch) if case.epoch else end
    return done


@pytest.mark.parametrize("example", CASES)
def test_a_kill_a_join_and_a_leave(job: Job, example: str) -> None:
    case = CASES[example]
    scene = Scene(job, example)
    agents = {node: scene.join(node) for node in ("a", "b")}
    first = scene.trained(2)
    victim = next(worker for worker in job.workers("b") if "RANK" in worker.environment)
    os.kill(victim.pid, signal.SIGKILL)
    second = scene.trained(2, after=first.number)
    agents["c"] = scene.join("c")
    third = scene.trained(3, after=second.number)
    agents["b"].signal(signal.SIGTERM)
    assert agents["b"].exit_code() == 128 + signal.SIGTERM
    fourth = scene.trained(2, after=third.number)
    scene.slow.unlink()
    for node in ("a", "c"):
        assert agents[node].exit_code(TRAINED_S) == 0
    redone = scene.redone(first, second)
    print(f"{example}: steps done again after the kill: {redone}")
    assert redone <= case.lost
    assert scene.redone(second, third) == 0
    assert scene.redone(third, fourth) == 0
    step, state = scene.last_checkpoint()
    assert step == case.steps
    assert position(state, case) == samples(scene, case), "the position is not that of the steps"


@pytest.mark.parametrize("example", CASES)
def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(
    job: Job, second_job: Job, example: str
) -> None:
    undisturbed, disturbed = Scene(job, example), Scene(second_job, example)
    agents = [scene.start("a", "--nproc-per-node=2", TORCH_PRELOADED) for scene in (undisturbed, disturbed)]
    undisturbed.slow.unlink()
    disturbed.trained(2, steps=25)
    victim = next(worker for worker in second_job.workers() if worker.environment.get("RANK") == "1")
    os.kill(victim.pid, signal.SIGKILL)
    disturbed.trained(2, after=1)
    disturbed.slow.unlink()
    assert [agent.exit_code(TRAINED_S) for agent in agents] == [0, 0]
    ends = [scene.last_checkpoint()[1] for scene in (undisturbed, disturbed)]
    for part in [name for name in ends[0] if name.startswith(("model", "optimizer", "scheduler"))]:
        assert numbers(ends[1][part]) == numbers(ends[0][part])
    assert position(ends[1], CASES[example]) == position(ends[0], CASES[example])


@pytest.mark.parametrize("script", ["fuller_transformers.py", "fuller_lightning.py"])
def test_evaluations_accumulation_and_other_callbacks_go_on(job: Job, second_job: Job, script: str) -> None:
    """Early stopping and the choice of the best model, too, come to the same end as if there had been no kill."""
    ends = []
    for one, killed in ((job, False), (second_job, True)):
        scene = Scene(one, str(RECORDED.with_name(script)))
        agent = scene.start("a", "--nproc-per-node=2", TORCH_PRELOADED)
        if killed:
            scene.trained(2, steps=45)
            victim = next(worker for worker in one.workers() if worker.environment.get("RANK") == "1")
            os.kill(victim.pid, signal.SIGKILL)
            scene.trained(2, after=1)
        scene.slow.unlink()
        assert agent.exit_code(TRAINED_S) == 0
        end = agent.says(r"the end: .*")
        assert end is not None
        ends.append(end[0])
    assert ends[1] == ends[0]
