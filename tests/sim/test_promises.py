"""Hundreds of seeded runs of the whole protocol under faults, and the proof that they would see a bug."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from .simulator import BUGS, Verdict, try_seed

SEEDS = int(os.environ.get("SIMULATOR_SEEDS", "600"))
CHUNK = 25

MUST_HAPPEN = (
    "fault kill",
    "fault pause",
    "fault cut",
    "fault requests",
    "fault replies",
    "fault clog",
    "fault outage",
    "fault crash",
    "fault reject",
    "fault leave",
    "request lost",
    "reply lost",
    "lease expired",
    "rejoined",
    "record refused",
    "world race lost",
    "commit fenced",
    "committed",
    "probe refused",
    "member evicted",
    "coordinator evicted",
    "eviction refused",
    "outage survived",
    "compacted",
    "world by start",
    "world by failure",
    "world by lost",
    "world by join",
    "world by withdrawn",
    "world by leave",
    "drained",
    "stop published",
    "stop published in a pause",
    "stranded",
    "rescued",
    "planned change without loss",
)
"""A batch in which one of these never happened has not tested what it claims to."""


@pytest.fixture(scope="module")
def workers() -> Iterator[multiprocessing.pool.Pool]:
    quiet = logging.disable, (logging.CRITICAL,)
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), *quiet) as pool:
        yield pool


@pytest.mark.timeout(600)
def test_no_seed_breaks_a_promise(workers: multiprocessing.pool.Pool) -> None:
    seen: Counter[str] = Counter()
    for verdict in workers.imap_unordered(try_seed, range(SEEDS), chunksize=CHUNK):
        assert verdict.broken is None, verdict.broken
        seen += verdict.seen
    if SEEDS >= 600:
        assert not [event for event in MUST_HAPPEN if not seen[event]], seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(workers: multiprocessing.pool.Pool, bug: str) -> None:
    for first in range(0, 200, CHUNK):
        tries = [(seed, bug) for seed in range(first, first + CHUNK)]
        verdicts = workers.starmap(try_seed, tries, chunksize=CHUNK // 5)
        if any((verdict.broken or "").startswith("I") for verdict in verdicts):
            return
    pytest.fail(f"200 seeds did not notice: {bug}")


def test_the_same_seed_gives_the_same_run() -> None:
    def run() -> Verdict:
        return try_seed(7)

    assert run() == run()
