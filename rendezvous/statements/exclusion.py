"""Nodes that no world includes for a while, and the check by which they come back.

An exclusion is a row of the world, written by the coordinator or by `elastic-agent exclude`. The excluded node reports
its check in its own record (`Recheck`), and the coordinator then ends the exclusion. No field holds an instant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ...codec import Positive
from ..text import CauseName, Name, NameOrNone, line

MAX_EXCLUSIONS = 64
"""Nodes of which a world remembers that they are excluded, or were."""
MAX_EXCLUSION_REASON = 200


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A node that is, or was, left out of all worlds, though its agent goes on and stands ready."""

    node: Name
    life: NameOrNone
    """The life of the node's agent at the exclusion. An agent started later need not wait for the cool-down. Empty: the
    job knew nothing of the node when an operator excluded it."""
    cause: CauseName
    """The cause of the failure, or `operator`."""
    reason: Annotated[str, line(MAX_EXCLUSION_REASON)]
    """A sentence for people."""
    fingerprint: Annotated[str, line(32)] = ""
    """`blame.digest` of the failure: the same failure on another node shows that this node is not to blame."""
    times: Positive = 1
    """How often this node has been excluded in this job: the cool-down is twice as long each time."""
    by_operator: bool = False
    """Until an operator readmits it."""
    readmitted: bool = False
    """The exclusion is over; the row is history."""


@dataclass(frozen=True, slots=True)
class Recheck:
    """How an excluded node's newest check of itself went, after its cool-down."""

    times: Positive
    """The number of the node's exclusion that the check is about (`Exclusion.times`)."""
    passed: bool
    summary: Annotated[str, line(MAX_EXCLUSION_REASON)] = ""
