"""What a script keeps in two Checkpointers goes on from one step, whatever ended the generation before. Of two
trainings one after the other, the first keeps what it had."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from .harness import TORCH_PRELOADED, Job, planted

pytestmark = pytest.mark.usefixtures("in_etcd")

SCRIPT = Path(__file__).with_name("paired_ddp.py")

OPTIONS = ("--nnodes=1:2", "--last-call=2", "--max-restarts=100", TORCH_PRELOADED)


class Pair:
    """One training of the script on up to two nodes."""

    def __init__(self, job: Job, argument: object, script: Path = SCRIPT) -> None:
        self.job = job
        self._file = job.folder / "steps"
        self._file.touch()
        self._more: dict[str, Any] = {
            "script": (script, job.folder / "checkpoints", str(argument)),
            "environment": {
                **planted("constants just_in_time_grace_s=20"),
                "STEPS_FILE": str(self._file),
            },
        }

    def join(self, name: str) -> Any:
        return self.job.join(name, *OPTIONS, **self._more)

    def notes(self, **wanted: Any) -> list[dict[str, Any]]:
        *lines, _ = self._file.read_text().split("\n")
        return [note for note in map(json.loads, lines) if wanted.items() <= note.items()]

    def newest(self, generation: int) -> int:
        return max((note["step"] for note in self.notes(what="finished", generation=generation)), default=0)

    def trains(self, world: int, after: int = 0) -> int:
        """The generation beyond `after` with this world, as soon as its ranks have finished steps there."""

        def found() -> int:
            steps: dict[int, set[int]] = {}
            for note in self.notes(what="finished", world=world):
                if note["generation"] > after:
                    steps.setdefault(note["generation"], set()).add(note["rank"])
            return max((number for number, ranks in steps.items() if len(ranks) == world), default=0)

        return self.job.wait_for(found, f"{world} ranks to train after generation {after}", 90.0)

    def kill(self, generation: int, rank: int) -> None:
        (worker,) = [
            worker
            for worker in self.job.workers()
            if worker.generation == generation and worker.environment["RANK"] == str(rank)
        ]
        os.kill(worker.pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("memory_every", [0, 3])
def test_a_model_and_its_average_go_on_from_one_step(job: Job, memory_every: int) -> None:
    pair = Pair(job, memory_every)
    agents = {name: pair.join(name) for name in ("a", "b")}
    both = pair.trains(world=2)
    pair.kill(both, rank=1)
    again = pair.trains(world=2, after=both)
    agents["b"].signal(signal.SIGTERM)
    alone = pair.trains(world=1, after=again)
    assert agents["b"].exit_code() == 143
    pair.join("c")
    joined = pair.trains(world=2, after=alone)

    begun = pair.notes(what="begun")
    assert {note["generation"] for note in begun} >= {both, again, alone, joined}
    for note in begun:
        assert note["average"] == note["updates"] == note["step"], note
        before = note["generation"] - 1
        assert note["step"] >= pair.newest(before), "no finished step is done again"


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["drop", "keep"])
def test_a_training_that_is_over_is_not_overwritten_by_the_next_one(job: Job, way: str) -> None:
    """In the process that ended it, and in later ones, which begin after it."""
    pair = Pair(job, way, SCRIPT.with_name("pretraining.py"))
    agents = {name: pair.join(name) for name in ("a", "b")}

    def finetunes(world: int, after: int = 0) -> int:
        generation = pair.trains(world, after)
        job.wait_for(lambda: pair.newest(generation) > 10, "finetuning to go beyond pretraining", 90.0)
        return generation

    both = finetunes(world=2)
    agents["b"].signal(signal.SIGTERM)
    alone = finetunes(world=1, after=both)
    assert agents["b"].exit_code() == 143
    pair.kill(alone, rank=0)
    again = pair.trains(world=1, after=alone)
    pair.join("c")
    joined = pair.trains(world=2, after=again)

    for generation in (alone, again, joined):
        (*_, begun) = pair.notes(what="begun pretrained", generation=generation)
        assert (begun["step"], begun["weights"]) == (10, "pretrained")
        (*_, begun) = pair.notes(what="begun finetuned", generation=generation)
        assert begun["weights"] == "finetuned"
        assert begun["step"] > 10
