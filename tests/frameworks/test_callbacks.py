"""The examples for other libraries lose no step in planned changes, little to a kill, and end as they must."""

from __future__ import annotations

import ast
import os
import signal
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.system.harness import TORCH_PRELOADED, Job

from .framework_job import RECORDED, TRAINED_S, FrameworkJob

pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True)
class Case:
    ends_epochs: bool = False
    """A step ends where its epoch does; otherwise a batch may span two."""
    lost: int = 1
    """Steps that a kill costs at most. 1: the copies of a step are not made by all nodes at one instant."""


def numbers(state: Any) -> Any:
    """To the last bit."""
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, state)


STEPS, LENGTH = 120, 1024
"""Of each example: its steps, and the samples of its dataset."""
MOST_RANKS = 3
LEFT = 128 + signal.SIGTERM
"""The exit code of an agent that has left, whoever has asked it to."""

CASES = {
    "transformers_trainer.py": Case(),
    "lightning_fit.py": Case(),
    "accelerate_loop.py": Case(ends_epochs=True),
    "fsdp2_dcp.py": Case(ends_epochs=True, lost=20),
}


def position(state: dict[str, Any], case: Case) -> int:
    """Samples that are finished, as the checkpoint has it."""
    if not case.ends_epochs:
        found: int = state["trainer"]["data"]["position"]
        return found
    sampler = state["sampler"]
    return sampler["epoch"] * LENGTH + sampler["position"]


def trained_on(run: FrameworkJob) -> list[list[int]]:
    """The samples of each step that counts, in the order in which the ranks have them: of each step the last time."""
    counts: dict[int, int] = {}
    """The generation by step."""
    firsts: dict[int, int] = {}
    for record in run.job.history(what="step", rank=0):
        counts[record["step"]] = record["generation"]
        firsts.setdefault(record["generation"], record["step"])
    assert sorted(counts) == list(range(1, len(counts) + 1)), "a step is missing"
    ranks: dict[int, dict[int, list[int]]] = {step: {} for step in sorted(counts)}
    for record in run.job.history(what="samples"):
        generation, after = record["generation"], record["after"]
        step = after + 1 if after is not None else firsts.get(generation)
        if counts.get(step) == generation:
            ranks[step].setdefault(record["rank"], []).extend(record["samples"])
    return [[sample for _, samples in sorted(of.items()) for sample in samples] for of in ranks.values()]


def each_once(steps: list[list[int]], case: Case) -> int:
    """How many samples were trained on. In each epoch each of the dataset comes once: none is left out or repeated.

    Where an epoch ends with a step, the ranks are given equal shares of the last one: ranks but the first may repeat
    one sample each.
    """
    everything = {sample for step in steps for sample in step}
    assert len(everything) == LENGTH
    done, epoch = 0, []
    for step in steps:
        for sample in step:
            epoch.append(sample)
            if not case.ends_epochs and len(epoch) == LENGTH:
                assert set(epoch) == everything
                done, epoch = done + LENGTH, []
        if len(epoch) >= LENGTH:
            assert set(epoch) == everything
            assert len(epoch) < LENGTH + MOST_RANKS
            done, epoch = done + LENGTH, []
    assert len(set(epoch)) == len(epoch)
    return done + len(epoch)


@pytest.mark.parametrize("example", CASES)
def test_a_kill_a_join_and_two_leaves(job: Job, example: str) -> None:
    case = CASES[example]
    run = FrameworkJob(job, example, quick=8)
    agents = {node: run.join(node) for node in ("a", "b")}
    first = run.trained(2)
    victim = next(worker for worker in job.workers("b") if "RANK" in worker.environment)
    os.kill(victim.pid, signal.SIGKILL)
    second = run.trained(2, after=first.number)
    agents["c"] = run.join("c")
    third = run.trained(3, after=second.number)
    agents["b"].signal(signal.SIGTERM)
    fourth = run.trained(2, after=third.number)
    agents["c"].signal(signal.SIGTERM)
    fifth = run.trained(1, after=fourth.number)
    run.slow.unlink()
    assert [agents[node].exit_code(TRAINED_S) for node in "abc"] == [0, LEFT, LEFT]
    redone = run.redone(first, second)
    print(f"{example}: steps done again after the kill: {redone}")
    assert redone <= case.lost
    assert [run.redone(*pair) for pair in pairwise((second, third, fourth, fifth))] == [0, 0, 0]
    steps = trained_on(run)
    seen = each_once(steps, case)
    positions = [
        sum(map(len, steps[: run.steps(one.number)[0] - 1])) % LENGTH for one in (second, third, fourth)
    ]
    print(f"{example}: {seen} samples, each once in an epoch; changes at {positions} of {LENGTH}")
    assert any(positions), "no change came within an epoch"
    step, state = run.last_checkpoint()
    assert step == len(steps) == STEPS
    assert position(state, case) == seen, "the position is not that of the samples"


@pytest.mark.parametrize("example", CASES)
def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(
    job: Job, second_job: Job, example: str
) -> None:
    undisturbed, disturbed = FrameworkJob(job, example), FrameworkJob(second_job, example)
    agents = [run.start("a", "--nproc-per-node=2", TORCH_PRELOADED) for run in (undisturbed, disturbed)]
    undisturbed.slow.unlink()
    disturbed.trained(2, steps=25)
    victim = next(worker for worker in second_job.workers() if worker.environment.get("RANK") == "1")
    os.kill(victim.pid, signal.SIGKILL)
    disturbed.trained(2, after=1)
    disturbed.slow.unlink()
    assert [agent.exit_code(TRAINED_S) for agent in agents] == [0, 0]
    ends = [run.last_checkpoint()[1] for run in (undisturbed, disturbed)]
    for part in [name for name in ends[0] if name.startswith(("model", "optimizer", "scheduler"))]:
        assert numbers(ends[1][part]) == numbers(ends[0][part])
    assert position(ends[1], CASES[example]) == position(ends[0], CASES[example])


@pytest.mark.parametrize("script", ["fuller_transformers.py", "fuller_lightning.py"])
def test_evaluations_accumulation_and_other_callbacks_go_on(job: Job, second_job: Job, script: str) -> None:
    """Early stopping and the choice of the best model, too, come to the same end as if there had been no kill."""
    ends = []
    for one, killed in ((job, False), (second_job, True)):
        run = FrameworkJob(one, str(RECORDED.with_name(script)))
        agent = run.start("a", "--nproc-per-node=2", TORCH_PRELOADED)
        if killed:
            run.trained(2, steps=45)
            victim = next(worker for worker in one.workers() if worker.environment.get("RANK") == "1")
            os.kill(victim.pid, signal.SIGKILL)
            run.trained(2, after=1)
        run.slow.unlink()
        assert agent.exit_code(TRAINED_S) == 0
        end = agent.says(r"the end: .*")
        assert end is not None
        ends.append(end[0])
    assert ends[1] == ends[0]


@pytest.mark.parametrize("script", ["fuller_transformers.py", "fuller_lightning.py"])
def test_early_stopping_and_the_best_model_in_a_changing_world(job: Job, script: str) -> None:
    """1 -> 2 -> 1 workers, within an epoch."""
    run = FrameworkJob(job, RECORDED.with_name(script), quick=8)
    first = run.join("a")
    alone = run.trained(1)
    second = run.join("b")
    together = run.trained(2, after=alone.number)
    second.signal(signal.SIGTERM)
    again = run.trained(1, after=together.number)
    assert [run.redone(*pair) for pair in ((alone, together), (together, again))] == [0, 0]
    run.slow.unlink()
    assert (first.exit_code(TRAINED_S), second.exit_code()) == (0, LEFT)
    end = first.says(r"the end: (.*)")
    assert end is not None
    print(f"{script}: {end[1]}")
    if script == "fuller_lightning.py":
        _, _, epochs, _, _, waited = ast.literal_eval(end[1])
        assert epochs == 8 or waited == 5
        return
    best, losses = ast.literal_eval(end[1])[1:]
    assert [step for step, _ in losses] == [20, 40, 60], (
        "each evaluation once, and the early stop after the third"
    )
    assert best == min(losses, key=lambda each: each[1])[0]
