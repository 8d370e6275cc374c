"""A job of `lockstep.py`, whose planned changes cost no step. Not a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .harness import LOCKSTEP, Generation, Job


class LockstepJob:
    """A job whose workers train in lockstep, and what has become of its generations."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.state = job.folder / "state"
        self.state.mkdir()

    @property
    def script(self) -> tuple[str | Path, ...]:
        return LOCKSTEP, self.state

    def join(self, name: str, *options: str, worker: tuple[str, ...] = (), **more: Any) -> Any:
        return self.job.join(name, "--nnodes=1:3", *options, script=(*self.script, *worker), **more)

    def last_step(self, generation: Generation) -> int:
        return max(record["step"] for record in self.job.history(what="step", generation=generation.number))

    def first_step(self, generation: Generation) -> int:
        return min(record["step"] for record in self.job.history(what="step", generation=generation.number))

    def ends(self, generation: Generation) -> set[int]:
        """The steps after which the workers of a generation ended by themselves."""
        return {record["step"] for record in self.job.history(what="drained", generation=generation.number)}

    def check_nothing_lost(self, before: Generation, after: Generation, *, ended: int | None = None) -> None:
        """All ended after the same step, nobody was signalled, and the next generation went on there."""
        assert after.number == before.number + 1, "one planned change, one new generation"
        assert not self.job.history(what="sigterm", generation=before.number)
        assert self.ends(before) == {self.last_step(before)}
        expected = len(before.starts) if ended is None else ended
        assert len(self.job.history(what="drained", generation=before.number)) == expected
        assert self.first_step(after) == self.last_step(before) + 1
