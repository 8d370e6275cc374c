"""Who owns each second: the table of activities, the sums that always hold, and what counts as one recovery."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.agent.observability.training_account import (
    NEXT,
    PHASES,
    STARTUP,
    STEPPING,
    Activity,
    GoodputAccount,
    Recovery,
    TrainingEvent,
)
from elastic_agent.health.metrics import LOST_TIME_CAUSES, RECOVERY_PHASES

WAITING, PRODUCTIVE, RECOMPUTE = Activity.WAITING, Activity.PRODUCTIVE, Activity.RECOMPUTE
START, INIT, LOAD, FIRST_STEP = STARTUP
DETECT, STOP, RENDEZVOUS, BACKOFF = Activity.DETECT, Activity.STOP, Activity.RENDEZVOUS, Activity.BACKOFF

WAYS = {
    WAITING: (),
    START: (TrainingEvent.STARTED,),
    INIT: (TrainingEvent.STARTED, TrainingEvent.BEGAN),
    LOAD: (TrainingEvent.STARTED, TrainingEvent.LOADING),
    FIRST_STEP: (TrainingEvent.STARTED, TrainingEvent.LOADING, TrainingEvent.LOADED),
    PRODUCTIVE: (TrainingEvent.STARTED, TrainingEvent.STEPPED),
    RECOMPUTE: (TrainingEvent.STARTED, TrainingEvent.STEPPED_AGAIN),
    DETECT: (TrainingEvent.STARTED, TrainingEvent.FAILED),
    STOP: (TrainingEvent.STARTED, TrainingEvent.STOPPING),
    RENDEZVOUS: (TrainingEvent.STARTED, TrainingEvent.STOPPING, TrainingEvent.GONE),
    BACKOFF: (TrainingEvent.STARTED, TrainingEvent.STOPPING, TrainingEvent.GONE, TrainingEvent.HELD_BACK),
}
"""How to get to each activity."""

EXPECTED = {
    (WAITING, TrainingEvent.STARTED): START,
    (RENDEZVOUS, TrainingEvent.STARTED): START,
    (BACKOFF, TrainingEvent.STARTED): START,
    (START, TrainingEvent.BEGAN): INIT,
    (START, TrainingEvent.LOADING): LOAD,
    (INIT, TrainingEvent.LOADING): LOAD,
    (LOAD, TrainingEvent.LOADED): FIRST_STEP,
    **dict.fromkeys(product(STARTUP, [TrainingEvent.STEPPED]), PRODUCTIVE),
    (RECOMPUTE, TrainingEvent.STEPPED): PRODUCTIVE,
    **dict.fromkeys(product(STARTUP, [TrainingEvent.STEPPED_AGAIN]), RECOMPUTE),
    (PRODUCTIVE, TrainingEvent.STEPPED_AGAIN): RECOMPUTE,
    **dict.fromkeys(product(STARTUP, [TrainingEvent.FAILED]), DETECT),
    (PRODUCTIVE, TrainingEvent.FAILED): DETECT,
    (RECOMPUTE, TrainingEvent.FAILED): DETECT,
    **dict.fromkeys(product(STARTUP, [TrainingEvent.STOPPING]), STOP),
    (PRODUCTIVE, TrainingEvent.STOPPING): STOP,
    (RECOMPUTE, TrainingEvent.STOPPING): STOP,
    (DETECT, TrainingEvent.STOPPING): STOP,
    (STOP, TrainingEvent.GONE): RENDEZVOUS,
    **dict.fromkeys(product(STARTUP, [TrainingEvent.GONE]), WAITING),
    (PRODUCTIVE, TrainingEvent.GONE): WAITING,
    (RECOMPUTE, TrainingEvent.GONE): WAITING,
    (RENDEZVOUS, TrainingEvent.HELD_BACK): BACKOFF,
    (BACKOFF, TrainingEvent.RELEASED): RENDEZVOUS,
    (RENDEZVOUS, TrainingEvent.SET_ASIDE): WAITING,
    (BACKOFF, TrainingEvent.SET_ASIDE): WAITING,
}
"""All that is not here changes nothing."""


def record(account: GoodputAccount, *story: tuple[float, TrainingEvent]) -> list[Recovery]:
    heard = [account.record(event, at) for at, event in story]
    return [recovery for recovery in heard if recovery is not None]


@pytest.mark.parametrize(("activity", "event"), list(product(Activity, TrainingEvent)))
def test_what_each_news_makes_of_each_activity(activity: Activity, event: TrainingEvent) -> None:
    account = GoodputAccount(0.0)
    record(account, *((0.0, step) for step in WAYS[activity]))
    assert account.activity is activity
    account.record(event, 0.0)
    assert account.activity is EXPECTED.get((activity, event), activity)


def test_the_labels_of_the_metrics_are_the_activities() -> None:
    startup = {activity.value for activity in STARTUP}
    assert {activity.value for activity in Activity} - startup == {"productive", *LOST_TIME_CAUSES} - {
        "startup"
    }
    assert tuple(phase.value for phase in PHASES) == RECOVERY_PHASES
    assert set(NEXT) == set(TrainingEvent)


FAILURE_HERE = [
    (10.0, TrainingEvent.STARTED),
    (10.5, TrainingEvent.BEGAN),
    (12.0, TrainingEvent.STEPPED),
    (13.0, TrainingEvent.STEPPED),
    (39.0, TrainingEvent.STEPPED),
    (40.0, TrainingEvent.FAILED),
    (40.5, TrainingEvent.STOPPING),
    (41.5, TrainingEvent.GONE),
    (42.0, TrainingEvent.HELD_BACK),
    (45.0, TrainingEvent.RELEASED),
    (45.25, TrainingEvent.STARTED),
    (45.5, TrainingEvent.BEGAN),
    (46.5, TrainingEvent.LOADING),
    (48.0, TrainingEvent.LOADED),
    (48.25, TrainingEvent.STEPPED_AGAIN),
    (50.25, TrainingEvent.STEPPED_AGAIN),
    (53.25, TrainingEvent.STEPPED),
    (54.25, TrainingEvent.STEPPED),
]


def test_each_second_belongs_to_what_happened_in_it() -> None:
    account = GoodputAccount(4.0)
    record(account, *FAILURE_HERE)
    account.advance(60.0)
    assert account.seconds == {
        WAITING: 6.0,
        START: 0.5 + 0.25,
        INIT: 1.5 + 1.0,
        LOAD: 1.5,
        FIRST_STEP: 0.25,
        PRODUCTIVE: 27.0 + 1.0,
        RECOMPUTE: 5.0,
        DETECT: 1.0 + 0.5,
        STOP: 1.0,
        RENDEZVOUS: 0.75,
        BACKOFF: 3.0,
    }
    assert account.booked_until == 54.25, "nobody knows what the step under way will be good for"


@pytest.mark.parametrize(
    ("ending", "into"),
    [
        pytest.param(TrainingEvent.STEPPED, PRODUCTIVE, id="a long step"),
        pytest.param(TrainingEvent.FAILED, DETECT, id="a step that a failure cut short"),
        pytest.param(
            TrainingEvent.STOPPING, DETECT, id="a hang, a lost peer, a planned change in the middle of a step"
        ),
        pytest.param(TrainingEvent.GONE, STOP, id="what the script does after its last step"),
    ],
)
def test_the_time_since_the_last_step_is_booked_when_it_is_known_what_it_was_good_for(
    ending: TrainingEvent, into: Activity
) -> None:
    account = GoodputAccount(0.0)
    record(account, (0.0, TrainingEvent.STARTED), (0.0, TrainingEvent.STEPPED))
    account.advance(99.0)
    assert not any(account.seconds.values())
    record(account, (100.0, ending))
    assert {activity for activity, seconds in account.seconds.items() if seconds} == {into}
    assert account.seconds[into] == 100.0


def test_a_recovery_ends_with_the_first_step_whether_it_is_new_or_not() -> None:
    [recovery] = record(GoodputAccount(4.0), *FAILURE_HERE)
    assert list(recovery.phases.items()) == [
        (DETECT, 0.5),
        (STOP, 1.0),
        (RENDEZVOUS, 0.75),
        (BACKOFF, 3.0),
        (START, 0.25),
        (INIT, 1.0),
        (LOAD, 1.5),
        (FIRST_STEP, 0.25),
    ]
    assert recovery.duration_s == 48.25 - 40.0


@pytest.mark.parametrize(
    ("told", "phases"),
    [
        pytest.param([], {START: 3.0}, id="nothing"),
        pytest.param([(45.5, TrainingEvent.BEGAN)], {START: 0.25, INIT: 2.75}, id="no load"),
        pytest.param(
            [(46.25, TrainingEvent.LOADING)], {START: 1.0, LOAD: 2.0}, id="a load that another step overtook"
        ),
        pytest.param(
            [(45.5, TrainingEvent.BEGAN), (46.5, TrainingEvent.LOADING), (47.0, TrainingEvent.LOADED)],
            {START: 0.25, INIT: 1.0, LOAD: 0.5, FIRST_STEP: 1.25},
            id="all",
        ),
    ],
)
def test_what_was_not_reported_is_no_phase_of_the_recovery(
    told: list[tuple[float, TrainingEvent]], phases: dict[Activity, float]
) -> None:
    before = [*FAILURE_HERE[:10], (45.25, TrainingEvent.STARTED)]
    [recovery] = record(GoodputAccount(4.0), *before, *told, (48.25, TrainingEvent.STEPPED))
    assert {phase: s for phase, s in recovery.phases.items() if phase in STARTUP} == phases
    assert recovery.duration_s == 48.25 - 40.0


def test_generations_tried_in_vain_belong_to_the_recovery() -> None:
    tried = [
        (45.25, TrainingEvent.STARTED),
        (45.75, TrainingEvent.BEGAN),
        (46.25, TrainingEvent.FAILED),
        (46.5, TrainingEvent.STOPPING),
        (47.0, TrainingEvent.GONE),
        (47.5, TrainingEvent.STARTED),
        (50.0, TrainingEvent.STEPPED),
    ]
    [recovery] = record(GoodputAccount(4.0), *FAILURE_HERE[:10], *tried)
    assert recovery.phases == {
        DETECT: 0.75,
        STOP: 1.5,
        RENDEZVOUS: 1.25,
        BACKOFF: 3.0,
        START: 0.5 + 2.5,
        INIT: 0.5,
    }
    assert recovery.duration_s == 10.0


def test_without_steps_a_recovery_ends_when_the_scripts_begin() -> None:
    account = GoodputAccount(0.0)
    story = [
        (1.0, TrainingEvent.STARTED),
        (5.0, TrainingEvent.STOPPING),
        (6.0, TrainingEvent.GONE),
        (8.0, TrainingEvent.STARTED),  # in vain: the machine lacks something
        (8.5, TrainingEvent.STOPPING),
        (9.0, TrainingEvent.GONE),
        (10.0, TrainingEvent.STARTED),
        (10.5, TrainingEvent.BEGAN),
        (12.0, TrainingEvent.STOPPING),
    ]
    [recovery] = record(account, *story)
    assert (recovery.duration_s, recovery.phases) == (
        5.5,
        {DETECT: 0.0, STOP: 1.5, RENDEZVOUS: 3.0, BACKOFF: 0.0, START: 1.0},
    )
    assert account.activity is STOP
    assert account.recovering


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param([(50.0, TrainingEvent.SET_ASIDE)], id="the others went on alone"),
        pytest.param(
            [(50.0, TrainingEvent.STARTED), (51.0, TrainingEvent.GONE)], id="there were no steps left to do"
        ),
    ],
)
def test_a_recovery_that_comes_to_nothing_is_none(ending: list[tuple[float, TrainingEvent]]) -> None:
    account = GoodputAccount(4.0)
    assert record(account, *FAILURE_HERE[:8], *ending) == []
    assert not account.recovering
    assert record(account, (60.0, TrainingEvent.STARTED), (61.0, TrainingEvent.STEPPED)) == []


def test_an_instant_that_is_booked_already_stays_booked() -> None:
    account = GoodputAccount(0.0)
    record(account, (1.0, TrainingEvent.STARTED))
    account.advance(10.0)
    record(account, (9.5, TrainingEvent.FAILED), (9.75, TrainingEvent.STOPPING))
    account.advance(11.0)
    assert (account.seconds[START], account.seconds[DETECT], account.seconds[STOP]) == (9.0, 0.0, 1.0)


@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.sampled_from(TrainingEvent)), st.integers(-3, 10).map(lambda n: n / 8)
        )
    )
)
def test_the_seconds_add_up_and_never_fall(story: list[tuple[TrainingEvent | None, float]]) -> None:
    account, now, latest = GoodputAccount(100.0), 100.0, 100.0
    standing_still_since: float | None = None
    for event, passed in story:
        now += passed  # at times backwards: events of several threads overtake each other
        before, booked = dict(account.seconds), account.booked_until
        latest = max(latest, now)
        recovery = account.record(event, now) if event is not None else account.advance(now)
        if recovery is not None:
            assert standing_still_since is not None
            assert recovery.duration_s == account.booked_until - standing_still_since
        assert sum(account.seconds.values()) == account.booked_until - 100.0  # eighths: exact
        assert all(account.seconds[activity] >= before[activity] for activity in Activity)
        assert account.booked_until in (booked, now)
        assert account.activity in STEPPING or account.booked_until >= now
        if not account.recovering:
            standing_still_since = None
        elif standing_still_since is None:
            standing_still_since = account.booked_until
        assert not (account.recovering and account.activity in (WAITING, *STEPPING))
