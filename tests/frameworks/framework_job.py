"""A job of one script of another library, and what its workers have done. Not a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.shards import state_on_disk
from tests.system.harness import TORCH_PRELOADED, Agent, Generation, Job

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORDED = Path(__file__).with_name("recorded.py")
TRAINED_S = 120.0
"""Importing these libraries takes a worker seconds, on two busy cores."""


class FrameworkJob:
    """A job of one script, with its arguments; examples need no path. Its files are in a folder of their own."""

    def __init__(self, job: Job, *script: str | Path, name: str = "files", quick: int = 1000) -> None:
        """`quick`: steps of each worker that take a tenth of a second; those after it wait for what the test does."""
        self.job = job
        self.script = (RECORDED, *(EXAMPLES / word for word in script))
        self.folder = job.folder / name
        self.folder.mkdir()
        self.slow = job.folder / f"slow-{name}"
        self.slow.write_text(str(quick))
        self.environment = {
            "TEST_FOLDER": str(self.folder),
            "TEST_SLOW": str(self.slow),
            # Each agent here believes that it has the machine for itself.
            "OMP_NUM_THREADS": "1",
        }

    def start(self, node: str, *options: str) -> Agent:
        return self.job.start(node, *options, script=self.script, environment=self.environment)

    def join(self, node: str) -> Agent:
        options = ("--nnodes=1:3", TORCH_PRELOADED)
        return self.job.join(node, *options, script=self.script, environment=self.environment)

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

    def last_checkpoint(self) -> tuple[int, dict[str, Any]]:
        """Its step, and the state."""
        newest = max(path.parent for path in self.folder.rglob("step-*/.metadata"))
        step = int(newest.name.split("-")[1])
        return step, state_on_disk(newest.parent, step)
