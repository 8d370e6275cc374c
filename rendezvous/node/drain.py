"""After which step the workers of a draining generation end: what a rank is answered that asks at a step's end.

    RUNNING g ──> DRAINING g: every member raises its workers' flags, and reports it
              ──> LAST_STEP g: all flags are up, so from now on every rank asks at the end of every step
    rank 0 asks at the end of step s: its node writes `StopAt(g, s + 1)` before rank 0 goes on
    any rank asks at the end of step n: it ends if `StopAt` names n, and goes on if it names a later step, or none yet

In synchronous training no rank can finish s + 1 before rank 0 has entered it, which is after the write; and every rank
asks at the end of s + 1. So all end there, and no rank waits for another but as in every step. Each of these matters:
the flags are up before the write, the write is before rank 0 goes on, and each answer comes from the store itself
(a linearizable read that began after the question), never from a watch.

Between two steps, while it evaluates, rank 0 names s itself, or takes s + 1 back for it: no rank can finish s + 1
without rank 0. Ranks that are in s + 1 already are *stranded* there. Their state after s is the others' too: their
agents end them, and if a broken collective has, it is no failure.

A rank that finds itself beyond `StopAt` is not in step with the others: its node ends the drain, and signals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..records import STOP_KEY, WORLD_KEY, Phase, StopAt, World
from ..store.interface import Compare, Entry, Read
from .session import NodeSnapshot
from .transactions import WriteStop


@dataclass(frozen=True, slots=True)
class Ask:
    """A rank has finished `step`, and would go on to the next one. May it?"""

    generation: int
    rank: int
    step: int
    pausing: bool = False
    """It is at work between two steps (evaluation), and has not entered the next."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """Not here."""


@dataclass(frozen=True, slots=True)
class End:
    """This was the last step; `alone`: some ranks may never come here."""

    step: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Beyond:
    """The last step was an earlier one: training is not synchronous. Go on, and be signalled."""

    step: int


Answer: TypeAlias = GoOn | End | Beyond
WHAT_STANDS = Read((STOP_KEY,))


def concerns(ask: Ask, latest: NodeSnapshot) -> bool:
    """Must the store be asked? Rank 0's node need not: it alone writes, and not before all flags are up."""
    world = latest.world
    if world is not None and world.generation > ask.generation:
        return False
    return ask.rank != 0 or _awaits_stop(ask, world)


def judge(ask: Ask, latest: NodeSnapshot, entry: Entry | None) -> Answer | WriteStop:
    """`latest` is what the asked node knows; `entry` stands under `STOP_KEY`, and was read after the question came.

    For rank 0 the answer may be a write to try first: if it succeeds, `written` is the answer; if it is refused the
    world or the key has changed meanwhile: judge again by them.
    """
    world = latest.world
    stop = StopAt.from_json(entry.value) if entry is not None else None
    if stop is not None and stop.generation == ask.generation:
        if stop.step < ask.step:
            return Beyond(stop.step)
        if stop.step == ask.step:
            return End(stop.step, stop.paused)
        if not (ask.rank == 0 and ask.pausing):
            return GoOn()
    if ask.rank != 0 or world is None or not _awaits_stop(ask, world):
        return GoOn()
    return WriteStop(
        Compare(WORLD_KEY, latest.world_revision),
        Compare(STOP_KEY, entry.mod_revision if entry is not None else 0),
        StopAt(ask.generation, ask.step if ask.pausing else ask.step + 1, ask.pausing),
    )


def written(ask: Ask, write: WriteStop) -> Answer:
    """The answer once this has been written."""
    return End(write.stop.step, write.stop.paused) if write.stop.step == ask.step else GoOn()


def stranded(step: int | None, stop: StopAt | None, generation: int) -> bool:
    """Does a worker whose newest finished step is `step` wait for one that has ended, if it is busy and asks nothing?

    Only ranks that began a step without rank 0 can. All others meet once more after the last step.
    """
    return (
        step is not None
        and stop is not None
        and stop.paused
        and stop.generation == generation
        and step >= stop.step
    )


def _awaits_stop(ask: Ask, world: World | None) -> bool:
    return world is not None and world.generation == ask.generation and world.phase is Phase.LAST_STEP
