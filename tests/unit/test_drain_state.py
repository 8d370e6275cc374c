"""What a node makes of its workers' ends in a drain, row by row."""

from __future__ import annotations

import signal

import pytest

from elastic_agent.agent.workers.stopping import LOOK_AGAIN_S, STRANDED_S, DrainState, Exit
from elastic_agent.rendezvous.records import StopAt
from elastic_agent.worker.steps.drain import DRAINED
from elastic_agent.worker.wire.shared_progress import Reading

NOW = 100.0
PAUSED = StopAt(4, 7, paused=True)
READ = {0: Reading(step=7, stepped_at=NOW), 1: Reading(step=7, stepped_at=NOW)}


@pytest.fixture
def draining() -> DrainState:
    draining = DrainState(4)
    assert draining.begin(NOW, stopping=False)
    assert not draining.begin(NOW + 1, stopping=True)
    assert draining.since == NOW
    return draining


@pytest.mark.parametrize("code", [DRAINED, 0, -signal.SIGTERM, 128 + signal.SIGTERM])
def test_a_worker_that_was_told_may_end(draining: DrainState, code: int) -> None:
    draining.finished = {0}
    assert draining.exited(0, code, NOW) is Exit.DRAINED
    assert draining.complete({0: code})
    assert not draining.keeps_all({0: code}), "it may have kept its state, or not"


@pytest.mark.parametrize("code", [1, -signal.SIGKILL, -signal.SIGSEGV])
def test_a_crash_before_the_state_is_kept_is_a_failure(draining: DrainState, code: int) -> None:
    draining.finished = {0}
    assert draining.exited(0, code, NOW) is Exit.FAILED
    assert not draining.complete({0: code})


@pytest.mark.parametrize("code", [DRAINED, 0, 1, -signal.SIGKILL])
def test_once_it_is_kept_the_end_is_the_scripts_own_business(draining: DrainState, code: int) -> None:
    draining.finished, draining.kept = {0, 1}, {0, 1}
    assert draining.exited(0, code, NOW) is Exit.DRAINED
    assert draining.complete({0: code, 1: DRAINED})
    assert draining.keeps_all({0: code, 1: DRAINED})


def test_one_that_has_not_kept_its_state_leaves_the_node_without(draining: DrainState) -> None:
    draining.finished, draining.kept = {0, 1}, {0}
    draining.exited(0, DRAINED, NOW)
    draining.exited(1, DRAINED, NOW)
    assert draining.complete({0: DRAINED, 1: DRAINED})
    assert not draining.keeps_all({0: DRAINED, 1: DRAINED})


def test_workers_that_are_signalled_before_they_have_kept_it_have_not_drained(draining: DrainState) -> None:
    draining.finished = {0}
    assert not draining.complete({0: 0}), "nobody has told that this one ended by itself"


def test_a_training_that_is_over_has_not_drained(draining: DrainState) -> None:
    assert draining.exited(0, 0, NOW) is Exit.ENDED
    assert not draining.complete({0: 0})


def test_without_a_drain_every_crash_is_a_failure() -> None:
    draining = DrainState(4)
    assert draining.exited(0, 1, NOW) is Exit.FAILED
    assert draining.undetermined == {}


@pytest.mark.parametrize(
    ("stop", "failed"),
    [(None, [0]), (StopAt(3, 7, True), [0]), (StopAt(4, 8, True), [0]), (StopAt(4, 7), [0]), (PAUSED, [])],
)
def test_a_crash_counts_unless_it_waited_for_ranks_that_have_ended(
    draining: DrainState, stop: StopAt | None, failed: list[int]
) -> None:
    assert draining.exited(0, 1, NOW) is Exit.UNDETERMINED, "the store has to be asked first"
    assert draining.undetermined == {0: (1, NOW)}
    assert list(draining.looked(stop, READ)) == failed
    assert draining.undetermined == {}
    assert draining.complete({0: 1}) == (not failed)


def test_who_takes_long_is_looked_after(draining: DrainState) -> None:
    soon = NOW + 1 + STRANDED_S
    assert draining.look_at() == soon
    assert not draining.wants_look(soon - 0.01, [0])
    assert draining.wants_look(soon, [0])
    assert not draining.wants_look(soon + LOOK_AGAIN_S / 2, [0])
    assert draining.wants_look(soon + LOOK_AGAIN_S, [0])
    draining.finished = {0}
    assert not draining.wants_look(soon + 9, [0]), "it keeps its state, which may take long"


@pytest.mark.parametrize(
    ("now", "running", "asking", "stop", "behind"),
    [
        (NOW + STRANDED_S, [0, 1], [], PAUSED, True),
        (NOW + STRANDED_S, [], [], PAUSED, False),
        (NOW + STRANDED_S - 0.01, [0, 1], [], PAUSED, False),
        (NOW + STRANDED_S, [0, 1], [1], PAUSED, False),
        (NOW + STRANDED_S, [0, 1, 2], [], PAUSED, False),
        (NOW + STRANDED_S, [0, 1], [], StopAt(4, 8, True), False),
        (NOW + STRANDED_S, [0, 1], [], StopAt(4, 7), False),
    ],
)
def test_only_who_waits_for_good_is_left_behind(
    draining: DrainState, now: float, running: list[int], asking: list[int], stop: StopAt, behind: bool
) -> None:
    draining.looked(stop, READ)
    assert draining.blocked(now, running, READ, asking) == behind
    draining.finished = {0}
    assert not draining.blocked(now, running, READ, asking) or 0 not in running
