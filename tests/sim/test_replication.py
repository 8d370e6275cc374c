"""Seeded runs of shards and their replicas under faults, and the proof that they would see a bug."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from .checks import PromiseBroken
from .replication import BUGS, Replicating

SEEDS = int(os.environ.get("REPLICATION_SEEDS", "80"))

SHOWN_BY = {
    "each rank overwrites its older slot": 2,
    "the first copy does not wait for the loaded version's replicas": 6,
    "a transfer goes on in another copy's bytes": 47,
    "the newest whole version is overwritten": 2,
    "who will have the same shards counts for the loaded version, too": 6,
    "nodes that stand by offer nothing": 56,
}
"""The first seed that shows the bug, where this is not 0."""

MUST_HAPPEN = (
    "fault node",
    "fault worker",
    "fault server",
    "fault cut",
    "fault leave",
    "fault join",
    "fault two nodes",
    "a connection broke",
    "went on after a break",
    "superseded",
    "given up",
    "went on without a partner",
    "had to copy",
    "had it already",
    "a replica was busy",
    "a slot was busy after all",
    "no room",
    "a rank took its old copy",
    "loaded from a replica alone",
    "loaded from memory",
    "loaded from a node that stands by",
    "loaded from disk",
    "abandoned",
    "dropped",
    "unusable",
)
"""A batch in which one of these never happened has not tested what it claims to."""


def test_no_seed_breaks_a_promise() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        run = Replicating(seed)
        run.play()
        seen += run.seen
    assert not [event for event in MUST_HAPPEN if not seen[event]], seen


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    with pytest.raises(PromiseBroken):
        Replicating(SHOWN_BY.get(bug, 0), bug).play()
