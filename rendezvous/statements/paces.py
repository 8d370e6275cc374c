"""How fast the ranks of each node work by themselves, and which of them are slower than the others.

Each node says in its record what its ranks took for a step, without their waits for other ranks (`Paces`). The
coordinator compares them all, and says in its own record what is usual and who is slower (`Comparison`): that record
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
    """What the ranks of one node took for the newest steps of `generation`."""

    generation: Positive
    timed: Count
    """Steps of this generation that were timed so far, on the rank with the fewest."""
    step_us: Count
    """From step to step: the same on all ranks of a synchronous job."""
    own_us: Annotated[tuple[Count, ...], AtMost(MAX_RANKS)]
    """By local rank: of a step, what is no wait for other ranks."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that works longer on each step than the others, which wait for it."""

    node: Name
    rank: Count
    own_us: Count


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the coordinator finds in the paces of all nodes."""

    generation: Positive
    usual_us: Count
    """The median over all ranks."""
    stragglers: Annotated[tuple[Straggler, ...], AtMost(MAX_STRAGGLERS)] = ()

    @property
    def names(self) -> tuple[int, frozenset[int]]:
        """Who is slower, whatever the figures are."""
        return self.generation, frozenset(straggler.rank for straggler in self.stragglers)
