"""Workers killed at random moments: no finished step is done again, and the end is that of an undisturbed run."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shards import state_on_disk

from .harness import TORCH_PRELOADED, Agent, Job, planted

SCRIPT = Path(__file__).with_name("guarded_ddp.py")

KILLS = int(os.environ.get("JUST_IN_TIME_KILLS", "2"))
"""50 takes a while: JUST_IN_TIME_KILLS=50 pytest tests/system/test_just_in_time.py"""

STEPS_PER_KILL = 150
SEED = int(os.environ.get("JUST_IN_TIME_SEED", "1"))


undisturbed: dict[int, dict[str, str]] = {}
"""By the number of steps, the end of a run of two workers that nobody killed."""


class Run:
    """One training of the script, on one node with two workers or two with one each."""

    script = SCRIPT

    def __init__(
        self,
        job: Job,
        name: str,
        nodes: int,
        steps: int,
        *,
        preload: str = TORCH_PRELOADED,
        **environment: str,
    ) -> None:
        self.job = job
        self.steps = steps
        self.directory = job.folder / f"{name}-checkpoints"
        self._file = job.folder / f"{name}-steps"
        self._file.touch()
        # A machine that runs three tests at once may take longer than the usual 2 s.
        options = ("--max-restarts=1000", preload)
        self._options = (
            f"--nproc-per-node={2 // nodes}",
            f"--min-nodes={nodes}",
            f"--max-nodes={nodes}",
            *options,
        )
        self._more: dict[str, Any] = {
            "script": (self.script, self.directory, str(steps)),
            "environment": {
                **planted("constants just_in_time_grace_s=8"),
                "STEPS_FILE": str(self._file),
                **environment,
            },
        }
        start = self.join if nodes > 1 else self.start
        self.agents: list[Agent] = [start(f"{name}{node}") for node in range(nodes)]

    def start(self, name: str) -> Agent:
        """The node of a run on one."""
        return self.job.start(name, *self._options, **self._more)

    def join(self, name: str) -> Agent:
        """A node of a run on several."""
        return self.job.join(name, *self._options, **self._more)

    def notes(self, **wanted: Any) -> list[dict[str, Any]]:
        *lines, _ = self._file.read_text().split("\n")
        return [note for note in map(json.loads, lines) if wanted.items() <= note.items()]

    def newest(self, generation: int) -> int:
        return max((note["step"] for note in self.notes(what="finished", generation=generation)), default=0)

    def last(self, generation: int) -> int:
        """Where a planned change has ended it: in `step`, before the script could note that, or while it was held."""
        return self.newest(generation) + (not self.notes(what="held", generation=generation))

    def go(self) -> None:
        """It is held no more."""
        self._file.with_name(f"{self._file.name}.go").touch()

    def begun(self, generation: int) -> int:
        return max((note["step"] for note in self.notes(what="begun", generation=generation)), default=0)

    def kill(self, generation: int, rank: int) -> None:
        for worker in self.job.workers():
            environment = worker.environment
            if worker.generation == generation and environment["RANK"] == str(rank):
                os.kill(worker.pid, signal.SIGKILL)
                return
        raise AssertionError(f"rank {rank} of generation {generation} is not there")

    def ended(self) -> dict[str, str]:
        """The digest of each part of the final state."""
        self.go()
        for agent in self.agents:
            assert agent.exit_code(120) == 0
        return {name: digest(part) for name, part in state_on_disk(self.directory, self.steps).items()}


def digest(state: Any) -> str:
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in value.items():
                found.update(repr(key).encode())
                add(item)
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(state)
    return found.hexdigest()


@pytest.mark.long
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.timeout(240 + 20 * KILLS)
@pytest.mark.usefixtures("in_etcd")
def test_no_finished_step_is_done_again(job: Job, nodes: int) -> None:
    steps = STEPS_PER_KILL * (KILLS + 1)
    if steps not in undisturbed:
        undisturbed[steps] = Run(job, "undisturbed", 1, steps).ended()
    rng = random.Random(SEED)
    run = Run(job, "disturbed", nodes, steps, HOLD_EVERY=str(STEPS_PER_KILL))
    for generation in range(1, KILLS + 1):
        begun = job.wait_for(
            lambda g=generation: run.newest(g) - run.begun(g) > 2 and run.newest(g),  # type: ignore[misc]
            f"three steps of generation {generation}",
        )
        time.sleep(rng.uniform(0.0, 0.3))  # anywhere within a step
        run.kill(generation, rng.randrange(2))
        assert begun <= run.newest(generation) < steps, "the kill hit while it trained"
    end = run.ended()
    redone = {}
    for generation in range(1, KILLS + 1):
        begins = {note["step"] for note in run.notes(what="begun", generation=generation + 1)}
        redone[generation] = (run.newest(generation), begins)
    assert all(begins == {finished} for finished, begins in redone.values()), redone
    assert end == undisturbed[steps]


def test_a_step_that_only_the_dead_rank_had_finished_is_not_done_again(job: Job) -> None:
    run = Run(job, "disturbed", 1, 20, RANK_0_DIES_AFTER="10")
    run.ended()
    assert run.newest(1) == 10
    assert {note["step"] for note in run.notes(what="begun", generation=2)} == {10}
