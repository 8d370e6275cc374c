"""When workers are suspected to hang: limits, what counts as life, and never before there was any."""

from __future__ import annotations

import random

import pytest

from elastic_agent.agent.workers.hang_detector import (
    ALONE_S,
    ENOUGH,
    VERDICT_S,
    ActivitySample,
    Durations,
    HangDetector,
    HangTimeout,
    Stall,
    ends_alone,
)
from elastic_agent.health.hang_report import HangFinding, HangProbe, Urgency

EARLY, OVERDUE, LAST = Urgency


def detector(timeout: HangTimeout = "auto") -> HangDetector:
    return HangDetector(timeout, Durations(), 0.0)


def stepping(count: int, step_s: float, timeout: HangTimeout = "auto") -> HangDetector:
    """Two workers that have finished so many steps; the last at `count * step_s`."""
    watch = detector(timeout)
    for step in range(1, count + 1):
        for local_rank in (0, 1):
            watch.stepped(local_rank, step, step * step_s)
    return watch


def urgency(watch: HangDetector, now: float, running: tuple[int, ...] = (0, 1)) -> Urgency | None:
    stall = watch.stall(running, now)
    return stall.urgency if stall is not None else None


# ---------------------------------------------------------------- steps


def test_no_limit_is_ever_passed_where_it_is_off() -> None:
    watch = stepping(50, 1.0, None)
    assert (watch.stall((0, 1), 1e9), watch.due_at((0, 1), 60.0), watch.limit_s()) == (None, None, None)
    assert watch.state(None) == "off"


def test_with_steps_known_a_stall_is_suspicious_so_early_that_a_look_fits_into_five_seconds_or_three_steps() -> (
    None
):
    for step_s, early_s, overdue_s in (
        (0.1, 3.5, 30.0),
        (1.0, 3.5, 30.0),
        (4.0, 10.5, 30.0),
        (20.0, 58.5, 100.0),
    ):
        watch, last = stepping(40, step_s), 40 * step_s
        assert urgency(watch, last + early_s - 0.01) is None
        assert watch.due_at((0, 1), last) == pytest.approx(last + early_s)
        assert urgency(watch, last + early_s + 0.01) is EARLY
        assert urgency(watch, last + overdue_s + 0.01) is OVERDUE
        assert watch.limit_s() == pytest.approx(overdue_s)
        assert urgency(watch, last + 600.01) is LAST


def test_what_is_rare_but_usual_makes_the_limits_longer() -> None:
    watch, at = detector(), 0.0
    for step in range(1, 400):
        at += 40.0 if step % 50 == 0 else 0.5
        watch.stepped(0, step, at)
    assert watch.limit_s() == pytest.approx(200.0)


def test_before_enough_is_known_the_limits_are_far() -> None:
    watch = stepping(ENOUGH // 2, 0.1)
    assert watch.state(None) == "watching"
    limits = [urgency(watch, 0.5 + s) for s in (26.4, 26.6, 296.0, 301.0, 1799.0, 1801.0)]
    assert limits == [None, EARLY, EARLY, OVERDUE, OVERDUE, LAST]


def test_while_workers_save_or_evaluate_the_limits_are_far() -> None:
    watch = stepping(40, 0.5)
    watch.marked({1}, None)
    assert [urgency(watch, 20.0 + s) for s in (26.4, 296.4, 296.6)] == [None, EARLY, OVERDUE]
    watch.marked((), None)
    assert urgency(watch, 51.0) is OVERDUE
    watch.marked((), 60.0)
    assert [urgency(watch, 60.0 + s) for s in (26.4, 296.4, 296.6)] == [None, EARLY, OVERDUE]
    watch.stepped(0, 41, 400.0)
    assert urgency(watch, 404.0) is EARLY


def test_every_sign_of_life_of_any_worker_puts_it_off_and_none_takes_back() -> None:
    watch = stepping(40, 0.5)
    watch.reported(33.0)
    watch.stepped(1, 41, 21.0)
    assert urgency(watch, 36.4) is None


def test_ones_own_limit_holds_from_the_first_step_on_and_is_the_last() -> None:
    watch = detector(10.0)
    assert watch.stall((0,), 1e6) is None
    assert watch.limit_s() == 10.0
    watch.stepped(0, 1, 500.0)
    assert (urgency(watch, 509.9, (0,)), urgency(watch, 510.0, (0,))) == (None, LAST)
    stall = watch.stall((0,), 510.0)
    assert stall is not None
    assert stall.why == "no step or checkpoint reported for 10 s (--hang-timeout)"


# ---------------------------------------------------------------- without steps


def looks(
    watch: HangDetector, start: float, count: int, used: float, processor_s: float
) -> tuple[float, float]:
    """So many looks, 2 s apart, with `used` seconds of processor time each."""
    at = start
    for _ in range(count):
        at += 2.0
        processor_s += used
        watch.sampled(at, {0: ActivitySample(processor_s, 0, 0)})
    return at, processor_s


def test_without_steps_a_worker_that_uses_nothing_is_suspected_so_early_that_it_is_named_within_thirty_seconds() -> (
    None
):
    """It may have stopped right after a look, and the inquiry takes 1.5 s."""
    watch = detector()
    at, used = looks(watch, 0.0, 30, 1.0, 0.0)
    still_at, _ = looks(watch, at, 20, 0.0, used)
    assert watch.state(None) == "watching"
    limits = [urgency(watch, at + still_s, (0,)) for still_s in (26.4, 26.6, 296.4, 296.6)]
    assert limits == [None, EARLY, EARLY, OVERDUE], "and ended within five minutes: it may wait for a service"
    assert watch.still_s(0, still_at) == still_at - at


@pytest.mark.parametrize(
    "moving",
    [
        ActivitySample(0.1, 0, 0),
        ActivitySample(0.0, 10**6, 0),
        ActivitySample(0.0, 0, 1),
        ActivitySample(0.0, 0, 0, wakes=2),
    ],
)
def test_processor_time_bytes_and_output_are_signs_of_life(moving: ActivitySample) -> None:
    watch = detector()
    at, used = looks(watch, 0.0, 30, 1.0, 0.0)
    for look in range(1, 3000):
        at += 2.0
        signs = ActivitySample(
            used + look * moving.processor_s,
            look * moving.moved_bytes,
            look * moving.output_bytes,
            look * moving.wakes,
        )
        watch.sampled(at, {0: signs})
        assert watch.stall((0,), at) is None


def test_a_thread_or_child_that_moves_is_work_for_a_worker_that_waits_and_no_sign_of_life() -> None:
    """An upload in a thread uses no processor to speak of. Threads that report to a service do so in a hang, too."""
    watch = detector()
    at, used = looks(watch, 0.0, 30, 1.0, 0.0)
    for look in range(1, 21):
        watch.sampled(at + 2.0 * look, {0: ActivitySample(used, 0, 0, threads_active=look <= 10)})
    assert urgency(watch, at + 40.0, (0,)) is EARLY
    assert watch.still_s(0, at + 40.0) == 20.0


def test_what_libraries_use_while_they_wait_is_no_sign_of_life() -> None:
    """Seen of gloo's threads: two or three ticks in six seconds, now and then two in one look."""
    watch = detector()
    at, used = looks(watch, 0.0, 40, 2.0, 0.0)
    still_since = at
    for ticks in (0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 0, 2, 0, 1, 0, 2, 1) * 3:
        at += 2.0
        used += 0.01 * ticks
        watch.sampled(at, {0: ActivitySample(used, 0, 0)})
    assert watch.stalled_s((0,), at) == at - still_since
    assert watch.still_s(0, at) == at - still_since


def test_what_an_inquiry_makes_a_worker_do_is_no_sign_of_life() -> None:
    """Its stacks are asked for by two signals: it wakes for each, and uses a tick."""
    watch = detector()
    at, used = looks(watch, 0.0, 30, 1.0, 0.0)
    still_since, wakes = at, 0
    while at < still_since + 1900.0:
        if int(at) % 60 == 0:
            watch.asked(at + 1.0)
            used, wakes = used + 0.03, wakes + 2
        at += 2.0
        watch.sampled(at, {0: ActivitySample(used, 0, 0, wakes)})
    assert urgency(watch, at, (0,)) is LAST
    assert watch.still_s(0, at) == at - still_since
    watch.sampled(at + 2.0, {0: ActivitySample(used + 1.0, 0, 0, wakes)})
    assert watch.stall((0,), at + 2.0) is None


def test_no_healthy_job_is_overdue_in_two_hundred_random_ones() -> None:
    """Steps of any length with rare pauses, up to four times as long."""
    for seed in range(200):
        rng = random.Random(seed)
        watch, at = detector(), 0.0
        step_s, pause = rng.uniform(0.01, 20.0), rng.uniform(1.0, 4.0)
        for step in range(1, 600):
            took_s = step_s * rng.uniform(0.8, 1.2) * (pause if step % 25 == 0 else 1.0)
            assert urgency(watch, at + took_s, (0,)) not in (OVERDUE, LAST), seed
            at += took_s
            watch.stepped(0, step, at)


def test_a_pause_of_the_whole_machine_is_over_with_the_first_step_after_it() -> None:
    """Its workers stood still with the agent, and are asked at once; they step before all have answered."""
    watch = stepping(40, 0.5)
    assert urgency(watch, 3600.0) is LAST
    watch.stepped(1, 41, 3600.4)
    assert urgency(watch, 3601.5) is None


# ---------------------------------------------------------------- the parts


def test_what_is_usual_is_learned_of_the_newest_steps() -> None:
    durations = Durations()
    assert durations.usual_s is None
    for second in range(1, 101):
        durations.add(float(second))
    assert durations.usual_s == 99.0
    for _ in range(512):
        durations.add(1.0)
    assert durations.usual_s == 1.0


def stall(urgency: Urgency, *, steps: bool = True) -> Stall:
    return Stall(urgency, 0, steps, "")


HEALTHY = HangProbe(3, LAST, HangFinding.HEALTHY)


@pytest.mark.parametrize(
    ("one", "timeout", "inquiry", "waited_s", "still", "ends"),
    [
        (stall(LAST), 10.0, None, VERDICT_S, False, True),
        (stall(LAST), 10.0, HEALTHY, VERDICT_S, False, True),  # the user has said so
        (stall(LAST), 10.0, None, VERDICT_S - 1, True, False),
        (stall(OVERDUE), "auto", None, 1e6, True, False),
        (stall(LAST), "auto", None, ALONE_S, True, True),  # the store is away
        (stall(LAST), "auto", None, ALONE_S, False, False),
        (stall(LAST), "auto", HEALTHY, 1e6, True, False),
        (stall(LAST), "auto", HangProbe(4, LAST), ALONE_S - 1, True, False),  # the verdict is to come
        (stall(LAST), "auto", HangProbe(4, LAST), ALONE_S, True, True),  # the coordinator cannot write it
        (stall(LAST, steps=False), 10.0, HangProbe(4, LAST), VERDICT_S, True, False),
        (stall(LAST, steps=False), 10.0, HangProbe(4, LAST), ALONE_S, True, True),
        (stall(LAST), "auto", HangProbe(3, LAST, HangFinding.UNCLEAR), ALONE_S, True, True),
        (stall(LAST), "auto", HangProbe(3, EARLY, HangFinding.HEALTHY), ALONE_S, True, True),  # long ago
        (stall(LAST, steps=False), 10.0, HEALTHY, 1e6, True, False),
        (stall(LAST, steps=False), 10.0, None, ALONE_S, True, True),
    ],
)
def test_a_node_without_a_verdict_ends_its_workers_by_itself(
    one: Stall, timeout: HangTimeout, inquiry: HangProbe | None, waited_s: float, still: bool, ends: bool
) -> None:
    assert ends_alone(one, timeout, inquiry, 100.0, 100.0 + waited_s, all_still=still) == ends


def test_the_worker_that_is_behind_is_named() -> None:
    watch = stepping(40, 0.5)
    watch.stepped(0, 41, 20.5)
    assert watch.stall((0, 1), 60.0).local_rank == 1  # type: ignore[union-attr]
