"""How fast the ranks of each node work by themselves, and which of them are slower than the others.

Each node writes into its record how long its ranks work on a step, without their waits for other ranks (`Paces`). The
coordinator compares them all, and writes the median and the slower ranks into its own record (`Comparison`), which
every node follows. Durations are microseconds; no field holds an instant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ...codec import AtMost, Count, Positive
from ..text import Name

MAX_RANKS = 4096
"""Of a node."""
MAX_STRAGGLERS = 16
"""Where more ranks are slower than the others, these are the slowest."""


@dataclass(frozen=True, slots=True)
class Paces:
    """How long the ranks of one node worked on the newest steps of `generation`."""

    generation: Positive
    timed: Count
    """Steps of this generation that were timed so far, on the rank with the fewest."""
    step_us: Count
    """From step to step: the same on all ranks of a synchronous job."""
    own_us: Annotated[tuple[Count, ...], AtMost(MAX_RANKS)]
    """By local rank: the time of a step without the waits for other ranks."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that works longer on each step than the others, which wait for it."""

    node: Name
    rank: Count
    own_us: Count


@dataclass(frozen=True, slots=True)
class Comparison:
    """The coordinator's result from the paces of all nodes."""

    generation: Positive
    usual_us: Count
    """The median over all ranks."""
    stragglers: Annotated[tuple[Straggler, ...], AtMost(MAX_STRAGGLERS)] = ()

    @property
    def names(self) -> tuple[int, frozenset[int]]:
        """Which ranks are slower, without the figures."""
        return self.generation, frozenset(straggler.rank for straggler in self.stragglers)
