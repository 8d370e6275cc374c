"""The examples for other libraries lose no step in planned changes, little to a kill, and end as they must."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_map

from tests.system.harness import TORCH_PRELOADED, Agent, Generation, Job

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORDED = Path(__file__).with_name("recorded.py")
TRAINED_S = 120.0
"""Importing these libraries takes a worker seconds, on two busy cores."""

pytestmark = pytest.mark.timeout(400)


class Scene:
    """A job of one example. Its files are in a folder of their own."""

    def __init__(self, job: Job, example: str, name: str = "files") -> None:
        self.job = job
        self.example = EXAMPLES / example
        self.folder = job.folder / name
        self.folder.mkdir()
        self.slow = job.folder / f"slow-{name}"
        self.slow.touch()

    def start(self, node: str, *options: str) -> Agent:
        return self.job.start(node, *options, **self._worker())

    def join(self, node: str) -> Agent:
        return self.job.join(node, "--nnodes=1:3", TORCH_PRELOADED, **self._worker())

    def _worker(self) -> dict[str, Any]:
        environment = {
            "TEST_FOLDER": str(self.folder),
            "TEST_SLOW": str(self.slow),
            # Each agent here believes that it has the machine for itself.
            "OMP_NUM_THREADS": "1",
        }
        return {"script": (RECORDED, self.example), "environment": environment}

    def trained(self, world: int, *, after: int = 0, steps: int = 5) -> Generation:
        """The newest generation beyond `after`, when it has this size and has done so many steps."""

        def found() -> Generation | None:
            for generation in self.job.generations()[-1:]:
                done = self.steps(generation.number)
                if generation.number > after and len(generation.starts) == world and len(done) >= steps:
                    return generation
            return None

        generation = self.job.wait_for(found, f"{world} workers to train after {after}", TRAINED_S)
        assert generation is not None
        return generation

    def steps(self, generation: int) -> list[int]:
        """Those that rank 0 has finished in that generation."""
        return [record["step"] for record in self.job.history(what="step", rank=0, generation=generation)]

    def redone(self, before: Generation, after: Generation) -> int:
        """Steps that were done again in the second generation."""
        return max(self.steps(before.number)) + 1 - min(self.steps(after.number))

    def samples(self, case: Case) -> int:
        """How many samples the steps that count had: of each step the last time that it was done."""
        worlds = {record["step"]: record["world"] for record in self.job.history(what="step", rank=0)}
        assert sorted(worlds) == list(range(1, case.steps + 1)), "a step is missing"
        done = 0
        for number in sorted(worlds):
            end = done + worlds[number] * case.batch
            done = min(end, (done // case.epoch + 1) * case.epoch) if case.epoch else end
        return done

    def last_checkpoint(self) -> tuple[int, dict[str, Any]]:
        """Its step, and the state."""
        if whole := sorted(self.folder.rglob("step-*/.metadata")):
            dcp_to_torch_save(whole[-1].parent, self.folder / "whole.pt")
            state: dict[str, Any] = torch.load(self.folder / "whole.pt", weights_only=True)
            return state["done"], state
        (*_, newest) = sorted(self.folder.rglob("step-*.pt"))
        loaded = torch.load(newest, weights_only=True)
        return loaded["step"], loaded["state"]


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
    assert position(state, case) == scene.samples(case), "the position is not that of the steps"


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
