"""The progress of this node's workers together, from the shared progress of each.

A generation's scripts have begun when the last one has, and the same goes for loading. A step is done when the first
worker has finished it; one that is still loading then is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from ....worker.wire.shared_progress import Reading


class Step(NamedTuple):
    number: int
    at: float


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """Instants are seconds, monotonic. None: not yet."""

    began_at: float | None = None
    """The script of each worker had begun."""
    load_at: float | None = None
    """Each had asked for its checkpoint."""
    loaded: Step | None = None
    """Each had loaded this step's checkpoint; step 0 is that there was none."""
    first: Step | None = None
    """The first that any worker finished."""
    newest: Step | None = None


def node_progress(readings: Collection[Reading]) -> NodeProgress:
    firsts = [
        Step(reading.first_step, reading.first_at)
        for reading in readings
        if reading.first_step is not None and reading.first_at is not None
    ]
    steps = [
        Step(reading.step, reading.stepped_at)
        for reading in readings
        if reading.step is not None and reading.stepped_at is not None
    ]
    first = min(firsts, key=lambda step: step.at, default=None)

    def all_at(instant: Callable[[Reading], float | None]) -> float | None:
        known = [at for reading in readings if (at := instant(reading)) is not None]
        if not known or (first is None and len(known) < len(readings)):
            return None
        return max(known) if first is None else min(max(known), first.at)

    loaded_at = all_at(lambda reading: reading.loaded_at)
    loaded_step = max((each.loaded_step for each in readings if each.loaded_step is not None), default=0)
    return NodeProgress(
        began_at=all_at(lambda reading: reading.script_at),
        load_at=all_at(lambda reading: reading.load_at),
        loaded=Step(loaded_step, loaded_at) if loaded_at is not None else None,
        first=first,
        newest=max(steps, key=lambda step: (step.number, -step.at), default=None),
    )
