"""When workers are suspected to hang: limits that are learned, what counts as life, and never before there was any."""

from __future__ import annotations

import random

import pytest

from elastic_agent.agent.workers.hangs.detector import (
    ALONE_S,
    MOST_PATIENCE,
    PATIENCE_WINDOW_S,
    REMEMBERED,
    VERDICT_S,
    Durations,
    HangDetector,
    HangTimeout,
    Learned,
    Limits,
    Stall,
    State,
    ends_alone,
    patience,
)
from elastic_agent.agent.workers.hangs.signs import WARM_LOOKS, Signs, Stillness
from elastic_agent.rendezvous.statements.inquiry import Finding, Inquiry, Stage, Urgency

EARLY, OVERDUE, LAST = Urgency


def detector(timeout: HangTimeout = "auto", learned: Learned | None = None) -> HangDetector:
    return HangDetector(timeout, learned or Learned(), 0.0)


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
    assert (watch.stall((0, 1), 1e9), watch.due_at((0, 1), 60.0), watch.limit_s((0, 1))) == (None, None, None)
    assert watch.state(None) is State.OFF


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
        assert watch.limit_s((0, 1)) == pytest.approx(overdue_s)
        assert urgency(watch, last + 600.01) is LAST


def test_what_is_rare_but_usual_makes_the_limits_longer() -> None:
    watch, at = detector(), 0.0
    for step in range(1, 400):
        at += 40.0 if step % 50 == 0 else 0.5
        watch.stepped(0, step, at)
    assert watch.limit_s((0,)) == pytest.approx(200.0)


def test_before_enough_is_known_the_limits_are_far() -> None:
    watch = stepping(5, 0.1)
    assert watch.state(None) is State.LEARNING
    assert [urgency(watch, 0.5 + s) for s in (59.0, 299.0, 301.0, 1801.0)] == [None, EARLY, OVERDUE, LAST]


def test_the_first_step_may_take_half_an_hour_unless_one_rank_keeps_the_others_waiting() -> None:
    watch = detector()
    watch.loaded = True
    watch.signs(0.0, {0: Signs(10.0, 0, 0)})
    watch.signs(2.0, {0: Signs(10.0, 0, 0)})
    assert [urgency(watch, at, (0,)) for at in (299.0, 1700.0, 1900.0)] == [EARLY, OVERDUE, LAST]
    assert watch.stall((0,), 1700.0).stage is Stage.FIRST_STEP  # type: ignore[union-attr]


def test_a_save_and_an_evaluation_have_limits_of_their_own() -> None:
    watch = stepping(40, 0.5)
    watch.marked({1}, None)
    assert urgency(watch, 70.0) is None, "a save may take a minute before anything is asked"
    stall = watch.stall((0, 1), 90.0)
    assert stall is not None
    assert (stall.stage, stall.urgency) == (Stage.SAVE, EARLY)
    watch.marked((), None)
    watch.stepped(0, 41, 100.0)
    watch.stepped(1, 41, 100.0)
    assert len(watch.learned.durations[Stage.SAVE]) == 2
    assert watch.learned.durations[Stage.STEPS].percentile() == pytest.approx(0.5), "a save is no step"
    watch.marked((), 110.0)
    assert urgency(watch, 150.0) is None
    assert watch.stall((0, 1), 171.0).stage is Stage.EVALUATION  # type: ignore[union-attr]


def test_every_sign_of_life_of_any_worker_puts_it_off_and_none_takes_back() -> None:
    watch = stepping(40, 0.5)
    watch.reported(33.0, saved=True)
    watch.stepped(1, 41, 21.0)
    assert urgency(watch, 37.0) is None


def test_ones_own_limit_holds_from_the_first_step_on_and_is_the_last() -> None:
    watch = detector(10.0)
    assert watch.stall((0,), 1e6) is None
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
        watch.signs(at, {0: Signs(processor_s, 0, 0)})
    return at, processor_s


def test_without_steps_a_worker_that_uses_nothing_is_suspected_so_early_that_it_is_named_within_thirty_seconds() -> (
    None
):
    """It may have stopped right after a look, and the inquiry takes 1.5 s."""
    watch = detector()
    at, used = looks(watch, 0.0, 30, 1.0, 0.0)
    still_at, _ = looks(watch, at, 20, 0.0, used)
    assert watch.state(None) is State.WATCHING
    limits = [urgency(watch, at + still_s, (0,)) for still_s in (26.4, 26.6, 299.9, 300.1)]
    assert limits == [None, EARLY, EARLY, OVERDUE], "and ended late: it may wait for a service"
    assert watch.still_s(0, still_at) == still_at - at


@pytest.mark.parametrize(
    "moving", [Signs(0.1, 0, 0), Signs(0.0, 10**6, 0), Signs(0.0, 0, 1), Signs(0.0, 0, 0, wakes=2)]
)
def test_processor_time_bytes_and_output_are_signs_of_life(moving: Signs) -> None:
    watch = detector()
    at, used = looks(watch, 0.0, 30, 1.0, 0.0)
    for look in range(1, 3000):
        at += 2.0
        signs = Signs(
            used + look * moving.processor_s,
            look * moving.moved_bytes,
            look * moving.output_bytes,
            look * moving.wakes,
        )
        watch.signs(at, {0: signs})
        assert watch.stall((0,), at) is None


def test_a_thread_or_child_that_moves_is_work_for_a_worker_that_waits_and_no_sign_of_life() -> None:
    """An upload in a thread uses no processor to speak of. Threads that report to a service do so in a hang, too."""
    watch = detector()
    at, used = looks(watch, 0.0, 30, 1.0, 0.0)
    for look in range(1, 21):
        watch.signs(at + 2.0 * look, {0: Signs(used, 0, 0, stirs=look <= 10)})
    assert urgency(watch, at + 40.0, (0,)) is EARLY
    assert watch.still_s(0, at + 40.0) == 20.0


def test_what_libraries_use_while_they_wait_is_no_sign_of_life_of_a_worker_that_computes() -> None:
    watch = detector()
    at, used = looks(watch, 0.0, 40, 2.0, 0.0)
    end, _ = looks(watch, at, 20, 0.005, used)
    assert urgency(watch, end, (0,)) is EARLY


def test_a_hang_before_its_usual_use_is_known_leaves_a_worker_still() -> None:
    """Gloo's threads use some ticks while they wait."""
    watch = stepping(40, 0.05)
    for look in range(1, 20):
        watch.signs(2.0 * look, {0: Signs(0.02 * look, 0, 0)})
    assert watch.still_s(0, 40.0) == 38.0


def test_nor_is_a_worker_still_that_always_sleeps_most_of_its_time() -> None:
    """As a script for tests does: 5 ms in a second, in ticks of 10 ms."""
    watch, at, used = detector(), 0.0, 0.0
    for look in range(2000):
        at += 2.0
        used = round(0.01 * look, 2)
        watch.signs(at, {0: Signs(used, 0, 0)})
        assert watch.stall((0,), at) is None


def test_what_an_inquiry_makes_a_worker_do_is_no_sign_of_life() -> None:
    """Its stacks are asked for by two signals: it wakes for each, and uses a tick."""
    watch = detector()
    at, used = looks(watch, 0.0, 30, 1.0, 0.0)
    still_since, wakes = at, 0
    while at < still_since + 700.0:
        if int(at) % 60 == 0:
            watch.asked(at + 1.0)
            used, wakes = used + 0.03, wakes + 2
        at += 2.0
        watch.signs(at, {0: Signs(used, 0, 0, wakes)})
    assert urgency(watch, at, (0,)) is LAST
    assert watch.still_s(0, at) == at - still_since
    watch.signs(at + 2.0, {0: Signs(used + 1.0, 0, 0, wakes)})
    assert watch.stall((0,), at + 2.0) is None


@pytest.mark.parametrize("looks_of_work", [WARM_LOOKS // 2, WARM_LOOKS * 2])
def test_nor_is_a_tick_now_and_then(looks_of_work: int) -> None:
    """Threads that wait for sockets and timers use one in eight seconds; a worker that works little uses ten."""
    watch = detector()
    at, used = looks(watch, 0.0, looks_of_work, 0.02, 0.0)
    still_since = at
    for look in range(1, 200):
        at += 2.0
        used += 0.01 * (look % 4 == 2)
        watch.signs(at, {0: Signs(used, 0, 0)})
    assert watch.stalled_s((0,), at) == pytest.approx(at - still_since, abs=6.0)


@pytest.mark.parametrize("usual", [0.02, 0.06, 0.3])
def test_what_gloos_threads_use_is_no_sign_of_life_of_a_worker_that_sleeps_most_of_its_time(
    usual: float,
) -> None:
    """Seen of one that computed 6 % of its time: two or three ticks in six seconds, now and then two in one look."""
    watch = detector()
    at, used = looks(watch, 0.0, 2 * WARM_LOOKS, 2.0 * usual, 0.0)
    still_since = at
    for ticks in (0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 0, 2, 0, 1, 0, 2, 1) * 3:
        at += 2.0
        used += 0.01 * ticks
        watch.signs(at, {0: Signs(used, 0, 0)})
    assert watch.stalled_s((0,), at) == pytest.approx(at - still_since, abs=6.0)


def test_before_it_has_begun_to_work_a_worker_may_be_still_for_five_minutes() -> None:
    watch = detector()
    at, used = looks(watch, 0.0, WARM_LOOKS // 2, 1.0, 0.0)
    end, _ = looks(watch, at, 145, 0.0, used)
    stall = watch.stall((0,), end)
    assert stall is not None
    assert (stall.stage, stall.urgency) == (Stage.INITIALIZATION, EARLY)


def test_pauses_that_ended_make_the_limit_longer() -> None:
    watch, at, used = detector(), 0.0, 0.0
    for _ in range(5):
        at, used = looks(watch, at, 20, 1.0, used)
        at, used = looks(watch, at, 10, 0.0, used)
    at, used = looks(watch, at, 20, 1.0, used)
    assert watch.limit_s((0,)) == pytest.approx(300.0), "longer than the pauses ask for"
    for _ in range(2):
        at, used = looks(watch, at, 45, 0.0, used)
        at, used = looks(watch, at, 20, 1.0, used)
    assert watch.limit_s((0,)) == pytest.approx(450.0)


def test_a_child_that_ended_unseen_is_a_sign_of_life() -> None:
    still = Stillness(0.0)
    still.look(2.0, Signs(5.0, 0, 0))
    still.look(4.0, Signs(3.0, 0, 0))
    assert still.active_at == 4.0


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


def test_under_a_debugger_nothing_is_a_stall_and_nothing_is_learned() -> None:
    watch, at = stepping(40, 0.5), 20.0
    for _ in range(500):
        at += 2.0
        watch.signs(at, {0: Signs(1.0, 0, 0, 0, "process 7 (gdb)"), 1: Signs(1.0, 0, 0)})
        assert (watch.stall((0, 1), at), watch.due_at((0, 1), at)) == (None, None)
    watch.stepped(0, 41, at + 0.5)
    assert watch.limit_s((0, 1)) == 30.0
    watch.signs(at + 2.0, {0: Signs(1.0, 0, 0), 1: Signs(1.0, 0, 0)})
    assert (urgency(watch, at + 3.9), urgency(watch, at + 4.1)) == (None, EARLY)


def test_nor_is_it_without_steps() -> None:
    watch = detector()
    at, used = looks(watch, 0.0, 30, 1.0, 0.0)
    for _ in range(100):
        at += 2.0
        watch.signs(at, {0: Signs(used, 0, 0, 0, "process 7 (gdb)")})
        assert watch.stall((0,), at) is None
    assert len(watch.learned.pauses) == 0
    looks(watch, at, 20, 0.0, used)
    assert (urgency(watch, at + 26.0, (0,)), urgency(watch, at + 31.0, (0,))) == (None, EARLY)


# ---------------------------------------------------------------- the parts


def test_a_quantile_of_the_newest_durations() -> None:
    durations = Durations()
    assert durations.percentile() == 0.0
    for second in range(1, 101):
        durations.add(float(second))
    assert durations.percentile() == 99.0
    for _ in range(REMEMBERED):
        durations.add(1.0)
    assert (len(durations), durations.percentile()) == (REMEMBERED, 1.0)


def test_hangs_in_a_row_make_learned_limits_longer_for_an_hour() -> None:
    hangs = [0.0, 100.0, 200.0]
    assert patience(hangs, 201.0) == 8.0
    assert patience(hangs, PATIENCE_WINDOW_S + 150.0) == 2.0
    assert patience([0.0] * 16, 1.0) == MOST_PATIENCE
    assert Limits(5.0, 30.0, 600.0).patient(8.0) == Limits(5.0, 240.0, 4800.0)


def stall(urgency: Urgency, *, steps: bool = True) -> Stall:
    return Stall(Stage.STEPS, urgency, 700.0, 600.0, 0, steps, "")


HEALTHY = Inquiry(3, LAST, Finding.HEALTHY)


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
        (stall(LAST), "auto", Inquiry(3, LAST, Finding.UNCLEAR), ALONE_S, True, True),
        (stall(LAST), "auto", Inquiry(3, EARLY, Finding.HEALTHY), ALONE_S, True, True),  # long ago
        (stall(LAST, steps=False), 10.0, HEALTHY, 1e6, True, False),
        (stall(LAST, steps=False), 10.0, None, VERDICT_S, True, True),
    ],
)
def test_a_node_without_a_verdict_ends_its_workers_by_itself(
    one: Stall, timeout: HangTimeout, inquiry: Inquiry | None, waited_s: float, still: bool, ends: bool
) -> None:
    assert ends_alone(one, timeout, inquiry, 100.0, 100.0 + waited_s, all_still=still) == ends


def test_while_all_are_asked_a_node_does_not_end_its_workers_for_want_of_an_answer() -> None:
    """One inquiry after the other finds a rank elsewhere at work."""
    asked = Inquiry(7, LAST)

    def ends(waited_s: float) -> bool:
        at = 1000.0
        return ends_alone(stall(LAST), "auto", asked, 100.0, at + waited_s, all_still=True, asked_at=at)

    assert (ends(1.0), ends(ALONE_S)) == (False, True)


def test_the_worker_that_is_behind_is_named() -> None:
    watch = stepping(40, 0.5)
    watch.stepped(0, 41, 20.5)
    assert watch.stall((0, 1), 60.0).local_rank == 1  # type: ignore[union-attr]
