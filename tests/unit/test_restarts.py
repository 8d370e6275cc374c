"""The restart budget: which failure is one too many, what it is called then, and how long the others wait."""

from __future__ import annotations

import random

import pytest

from elastic_agent.rendezvous.coordinator.restarts import (
    FREE_BACKOFF_S,
    FREE_RETRIES,
    Ended,
    GiveUp,
    RestartPolicy,
    Retry,
    after_failure,
)
from elastic_agent.rendezvous.records import Action, BadState, Restarts, Result

CAPPED = RestartPolicy(max_failures=2)
DEFAULT = RestartPolicy()


def fail_through(story: list[tuple[str, bool]], policy: RestartPolicy) -> tuple[int, Retry | GiveUp]:
    """How many of these failures (fingerprint, progress before it) the job survives, and the last verdict."""
    used, rng = Restarts(), random.Random(0)
    for survived, (fingerprint, progressed) in enumerate(story):
        verdict = after_failure(used, Ended(1, fingerprint, progressed), policy, rng)
        if isinstance(verdict, GiveUp):
            return survived, verdict
        used = verdict.restarts
    return len(story), verdict


def given_up(story: list[tuple[str, bool]], policy: RestartPolicy) -> tuple[int, Result]:
    survived, verdict = fail_through(story, policy)
    assert isinstance(verdict, GiveUp)
    return survived, verdict.result


@pytest.mark.parametrize("max_failures", [0, 1, 2, 5])
@pytest.mark.parametrize("progressed", [True, False])
def test_an_explicit_cap_counts_every_failure(max_failures: int, progressed: bool) -> None:
    story = [(f"f{i}", progressed) for i in range(10)]
    policy = RestartPolicy(max_failures=max_failures)
    assert given_up(story, policy) == (max_failures, Result.RESTARTS_EXHAUSTED)


def test_an_explicit_cap_alone_decides_also_without_progress() -> None:
    survived, verdict = fail_through([("same", False)] * 50, RestartPolicy(max_failures=100))
    assert survived == 50
    assert isinstance(verdict, Retry)


def test_without_a_cap_a_job_that_makes_progress_goes_on_for_ever() -> None:
    survived, verdict = fail_through([("same", True)] * 1000, DEFAULT)
    assert (survived, verdict) == (1000, Retry(Restarts(1000, 0, "same", 0), 0.0))


@pytest.mark.parametrize("policy", [DEFAULT, RestartPolicy(max_failures=100)], ids=str)
@pytest.mark.parametrize("progressed", [True, False])
def test_what_no_restart_helps_ends_the_job_at_once(policy: RestartPolicy, progressed: bool) -> None:
    verdict = after_failure(
        Restarts(), Ended(1, "f", progressed, action=Action.END), policy, random.Random(1)
    )
    assert isinstance(verdict, GiveUp)
    assert (verdict.result, verdict.reason) == (Result.FINAL_FAILURE, "no restart helps")


def test_progress_starts_the_count_of_fruitless_failures_again() -> None:
    story = [("same", False)] * 3 + [("same", True)] + [("same", False)] * 10
    assert given_up(story, DEFAULT) == (7, Result.CRASH_LOOP)


@pytest.mark.parametrize(
    ("fingerprints", "policy", "result"),
    [
        ("aaaa", DEFAULT, Result.CRASH_LOOP),
        ("abab", DEFAULT, Result.RESTARTS_EXHAUSTED),
        ("baaa", DEFAULT, Result.RESTARTS_EXHAUSTED),
        ("aaab", DEFAULT, Result.RESTARTS_EXHAUSTED),
        ("aaa", CAPPED, Result.CRASH_LOOP),
        ("aba", CAPPED, Result.RESTARTS_EXHAUSTED),
        ("a", RestartPolicy(max_failures=0), Result.RESTARTS_EXHAUSTED),
        ("a", RestartPolicy(max_without_progress=0), Result.RESTARTS_EXHAUSTED),
    ],
)
def test_only_the_same_failure_again_and_again_is_a_crash_loop(
    fingerprints: str, policy: RestartPolicy, result: Result
) -> None:
    story = [(fingerprint, False) for fingerprint in fingerprints]
    assert given_up(story, policy) == (len(story) - 1, result)


@pytest.mark.parametrize(
    ("used", "fingerprint", "progressed", "then"),
    [
        (Restarts(), "a", False, Restarts(1, 1, "a", 1)),
        (Restarts(), "", False, Restarts(1, 1, "", 1)),
        (Restarts(1, 1, "a", 1), "a", False, Restarts(2, 2, "a", 2)),
        (Restarts(1, 1, "a", 1), "b", False, Restarts(2, 2, "b", 1)),
        (Restarts(1, 1, "a", 1), "a", True, Restarts(2, 0, "a", 0)),
        (Restarts(2, 0, "a", 0), "a", False, Restarts(3, 1, "a", 1)),
    ],
)
def test_what_a_failure_adds_to_the_budget(
    used: Restarts, fingerprint: str, progressed: bool, then: Restarts
) -> None:
    assert after_failure(used, Ended(1, fingerprint, progressed), DEFAULT, random.Random(0)).restarts == then


LOADED_30 = Restarts(2, 1, "nan", 1, at_load=1)
BAD_30 = Restarts(3, 2, "nan", 2, at_load=2, bad_state=BadState(6, 30))


@pytest.mark.parametrize(
    ("used", "ended", "then"),
    [
        (Restarts(1, 0, "nan"), Ended(5, "nan", False, 30), LOADED_30),
        (LOADED_30, Ended(6, "nan", False, 30), BAD_30),
        # another failure, or one after some steps, says nothing of the state
        (LOADED_30, Ended(6, "oom", False, 30), Restarts(3, 2, "oom", 1, 1)),
        (LOADED_30, Ended(6, "nan", False), Restarts(3, 2, "nan", 2)),
        # there is none before the first
        (LOADED_30, Ended(6, "nan", False, 0), Restarts(3, 2, "nan", 2)),
        # one older again
        (BAD_30, Ended(7, "nan", False, 29), Restarts(4, 3, "nan", 3, 3, BadState(7, 29))),
        # what was found bad stays so until there is progress
        (BAD_30, Ended(7, "oom", False), Restarts(4, 3, "oom", 1, 0, BadState(6, 30))),
        (BAD_30, Ended(7, "nan", True), Restarts(4, 0, "nan")),
    ],
)
def test_a_state_that_ends_whoever_loads_it_is_left_aside(
    used: Restarts, ended: Ended, then: Restarts
) -> None:
    assert after_failure(used, ended, DEFAULT, random.Random(0)).restarts == then


def backoffs(policy: RestartPolicy, seed: int) -> list[float]:
    """The waits after the first, second, ... failure in a row without progress."""
    used, rng, waits = Restarts(), random.Random(seed), []
    for _ in range(100):
        verdict = after_failure(used, Ended(1, "same", False), policy, rng)
        assert isinstance(verdict, Retry)
        used = verdict.restarts
        waits.append(verdict.backoff_s)
    return waits


PATIENT = RestartPolicy(max_without_progress=1000, first_backoff_s=0.5, max_backoff_s=30.0)


def test_the_first_try_comes_at_once_and_then_the_wait_doubles_up_to_its_cap() -> None:
    full = [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0] + [30.0] * 93
    for wait, longest in zip(backoffs(PATIENT, seed=1), full, strict=True):
        assert longest / 2 <= wait <= longest


def test_the_wait_is_drawn_from_the_upper_half() -> None:
    """So that many jobs hit by one outage do not come back in step, and none comes back at once."""
    waits = sorted(backoffs(PATIENT, seed)[1] for seed in range(200))
    assert 0.25 <= waits[0] < 0.28
    assert 0.47 < waits[-1] <= 0.5


def test_a_port_that_is_taken_costs_nothing_twice() -> None:
    policy, rng, used = RestartPolicy(max_failures=1), random.Random(0), Restarts(1, 1, "other", 1)
    waits = []
    for _ in range(FREE_RETRIES):
        verdict = after_failure(used, Ended(1, "port", False, action=Action.FREE), policy, rng)
        assert isinstance(verdict, Retry)
        assert verdict.free
        waits.append(verdict.backoff_s)
        used = verdict.restarts
    assert used == Restarts(1, 1, "other", 1, free_retries=2)
    assert waits[0] == 0.0
    assert FREE_BACKOFF_S / 2 <= waits[1] <= FREE_BACKOFF_S
    third = after_failure(used, Ended(1, "port", False, action=Action.FREE), policy, rng)
    assert third == GiveUp(
        Restarts(2, 2, "port", 1, free_retries=2),
        Result.RESTARTS_EXHAUSTED,
        "2 failures, --max-restarts allows 1",
    )


@pytest.mark.parametrize("progressed", [True, False])
def test_no_progress_gives_these_retries_back(progressed: bool) -> None:
    used = Restarts(1, 1, "a", 1, free_retries=2)
    verdict = after_failure(used, Ended(1, "b", progressed, action=Action.FREE), DEFAULT, random.Random(0))
    assert isinstance(verdict, Retry)
    assert (verdict.free, verdict.restarts.failures, verdict.restarts.free_retries) == (False, 2, 2)


def test_progress_before_a_taken_port_is_progress() -> None:
    used = Restarts(3, 3, "a", 3)
    verdict = after_failure(used, Ended(1, "b", True, action=Action.FREE), DEFAULT, random.Random(0))
    assert verdict == Retry(Restarts(3, 0, "a", free_retries=1), 0.0, free=True)


@pytest.mark.parametrize("policy", [DEFAULT, RestartPolicy(max_failures=100)], ids=str)
@pytest.mark.parametrize(
    ("story", "survived"),
    [
        ("aa", 1),
        ("ba", 2),
        ("aba", 3),
        ("baa", 2),
        ("a+a", 2),  # progress in between
        ("a+aaa", 3),
    ],
)
def test_an_error_of_the_script_that_comes_again_ends_the_job_whatever_the_cap(
    policy: RestartPolicy, story: str, survived: int
) -> None:
    used, rng = Restarts(), random.Random(0)
    failures = [(one, story[at - 1] == "+") for at, one in enumerate(story) if one != "+"]
    for count, (fingerprint, progressed) in enumerate(failures):
        ended = Ended(count + 1, fingerprint, progressed, action=Action.STOP, cause="import_error")
        verdict = after_failure(used, ended, policy, rng)
        if isinstance(verdict, GiveUp):
            assert verdict.result is Result.CRASH_LOOP
            assert (
                "the same error of the script (import_error) 2 times in a row without progress"
                in verdict.reason
            )
            break
        used = verdict.restarts
    else:
        count = len(failures)
    assert count == survived


def test_an_error_of_the_script_that_a_loaded_state_may_have_brought_about_lets_an_older_one_be_tried() -> (
    None
):
    used, rng = Restarts(), random.Random(0)
    for generation in (1, 2, 3):
        verdict = after_failure(used, Ended(generation, "nan", False, 30, Action.STOP), DEFAULT, rng)
        assert isinstance(verdict, Retry)
        used = verdict.restarts
    assert used.bad_state == BadState(3, 30)


def killed(used: Restarts, policy: RestartPolicy, *, progressed: bool = False) -> Retry | GiveUp:
    return after_failure(used, Ended(1, "signal 9", progressed, outside=True), policy, random.Random(0))


def test_what_comes_from_outside_never_makes_the_job_wait() -> None:
    """Five kills within a minute, of a script that reports no steps."""
    used = Restarts()
    for _ in range(5):
        verdict = killed(used, DEFAULT)
        assert isinstance(verdict, Retry)
        assert verdict.backoff_s == 0.0
        used = verdict.restarts
    assert used == Restarts(5, from_outside=5)
    assert after_failure(used, Ended(1, "a", False), DEFAULT, random.Random(0)) == Retry(
        Restarts(6, 1, "a", 1, from_outside=5), 0.0
    )


def test_a_kill_between_two_failures_neither_hides_nor_lengthens_their_row() -> None:
    looping = Restarts(2, 2, "a", 2)
    verdict = killed(looping, DEFAULT)
    assert verdict == Retry(Restarts(3, 2, "a", 2, from_outside=1), 0.0)


@pytest.mark.parametrize(
    ("policy", "survived"),
    [(DEFAULT, 20), (RestartPolicy(max_failures=3), 3), (RestartPolicy(max_failures=0), 0)],
)
def test_kills_without_end_end_the_job(policy: RestartPolicy, survived: int) -> None:
    used = Restarts()
    for _ in range(100):
        verdict = killed(used, policy)
        if isinstance(verdict, GiveUp):
            break
        used = verdict.restarts
    assert isinstance(verdict, GiveUp)
    assert (verdict.restarts.failures, verdict.result) == (survived + 1, Result.RESTARTS_EXHAUSTED)
    assert isinstance(killed(Restarts(99, from_outside=20), DEFAULT, progressed=True), Retry)


def test_steps_give_the_free_retries_back() -> None:
    policy = RestartPolicy(max_failures=1)
    ended = Ended(1, "port", True, action=Action.FREE, stepped=True)
    verdict = after_failure(
        Restarts(1, 1, "a", 1, free_retries=FREE_RETRIES), ended, policy, random.Random(0)
    )
    assert verdict == Retry(Restarts(1, 0, "a", free_retries=1), 0.0, free=True)
