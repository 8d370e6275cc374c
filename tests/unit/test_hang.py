"""When silence is a hang: never before the first step, never without a limit, and said before it comes to that."""

from __future__ import annotations

from elastic_agent.agent.workers.supervision.hang import HangWatch


def test_nothing_is_due_before_the_first_step_nor_without_a_limit() -> None:
    watch, never = HangWatch(10.0), HangWatch(None)
    assert watch.due_at is None
    watch.alive(100.0)
    watch.silent(499.0)
    assert watch.due_at is None, "a checkpoint that was loaded or saved is no step"
    assert watch.stepped(0, 1, 500.0) is None
    never.stepped(0, 1, 500.0)
    assert (watch.due_at, never.due_at) == (510.0, None)


def test_every_sign_of_life_of_any_worker_puts_it_off() -> None:
    watch = HangWatch(10.0)
    watch.stepped(0, 1, 100.0)
    watch.stepped(1, 1, 103.0)
    assert watch.due_at == 113.0
    watch.alive(109.0)
    assert watch.due_at == 119.0


def test_what_is_seen_late_counts_from_when_it_happened() -> None:
    watch = HangWatch(10.0)
    watch.stepped(0, 1, 100.0)
    watch.silent(108.0)
    watch.stepped(0, 5, 107.0)
    assert watch.due_at == 117.0
    watch.stepped(1, 4, 105.0)
    assert watch.due_at == 117.0, "an older step of another worker takes nothing back"


def test_the_hindmost_worker_is_named() -> None:
    watch = HangWatch(10.0)
    for local_rank, step in ((2, 7), (0, 8), (1, 7), (0, 9)):
        watch.stepped(local_rank, step, 1.0)
    assert watch.hindmost == 1


def test_a_silence_that_comes_near_the_limit_is_reported_once() -> None:
    watch = HangWatch(10.0)
    silences = [watch.stepped(0, step, at) for step, at in enumerate((100.0, 105.0, 111.0, 118.0))]
    assert silences == [None, None, 6.0, None]
    assert HangWatch(None).stepped(0, 1, 1e6) is None


def test_steps_that_were_not_seen_may_have_broken_the_silence() -> None:
    watch = HangWatch(10.0)
    watch.stepped(0, 1, 100.0)
    assert watch.stepped(0, 9, 106.0) is None


def test_a_silence_that_was_watched_is_reported_whatever_came_after_it() -> None:
    watch = HangWatch(10.0)
    watch.stepped(0, 1, 100.0)
    for now in (101.0, 104.0, 105.5):
        watch.silent(now)
    assert watch.stepped(0, 4, 106.0) == 5.5
    watch.silent(107.0)
    assert watch.stepped(0, 5, 108.0) is None
