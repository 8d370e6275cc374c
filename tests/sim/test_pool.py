"""Seeded runs of a whole pool under faults, and the proof that they would see a bug."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from .checks import PromiseBroken
from .pool import BUGS, PoolSimulation

SEEDS = int(os.environ.get("POOL_SEEDS", "60"))

MUST_HAPPEN = (
    "fault kill",
    "fault cut",
    "fault leave",
    "request lost",
    "request late",
    "reply lost",
    "lease expired",
    "another attempt",
    "gave back",
    "grew to a multiple",
    "too large a job was passed",
    "allocation unable",
    "result succeeded",
    "result failed",
    "result cancelled",
)
"""A batch in which one of these never happened has not tested what it claims to."""


def _play(seed: int, bug: str | None = None) -> tuple[str | None, Counter[str]]:
    simulation = PoolSimulation(seed, bug)
    try:
        simulation.play()
    except PromiseBroken as broken:
        return str(broken), simulation.seen
    return None, simulation.seen


@pytest.fixture(scope="module")
def workers() -> Iterator[multiprocessing.pool.Pool]:
    quiet = logging.disable, (logging.CRITICAL,)
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), *quiet) as pool:
        yield pool


@pytest.mark.timeout(300)
def test_no_seed_breaks_a_promise(workers: multiprocessing.pool.Pool) -> None:
    seen: Counter[str] = Counter()
    for broken, happened in workers.imap_unordered(_play, range(SEEDS), chunksize=5):
        assert broken is None, broken
        seen += happened
    assert not [event for event in MUST_HAPPEN if not seen[event]], seen


SLOW = "a second attempt gets no allocations"
"""Each of its jobs is played until its last hour."""


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=pytest.mark.long if bug == SLOW else ()) for bug in BUGS]
)
def test_a_planted_bug_is_caught(workers: multiprocessing.pool.Pool, bug: str) -> None:
    at_once = os.cpu_count() or 1  # a pool that stands still is played until its last hour
    for first in range(0, 60, at_once):
        seeds = range(first, first + at_once)
        if any(broken for broken, _ in workers.starmap(_play, [(seed, bug) for seed in seeds])):
            return
    pytest.fail(f"60 seeds did not notice: {bug}")
