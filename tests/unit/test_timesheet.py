"""Who owns each second: the table of activities, the sums that always hold, and what counts as one recovery."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.agent.accounting.timesheet import (
    NEXT,
    PHASES,
    STARTUP,
    STEPPING,
    Activity,
    News,
    Recovery,
    Timesheet,
)
from elastic_agent.health.metrics import LOST_TIME_CAUSES, RECOVERY_PHASES

WAITING, PRODUCTIVE, RECOMPUTE = Activity.WAITING, Activity.PRODUCTIVE, Activity.RECOMPUTE
START, INIT, LOAD, FIRST_STEP = STARTUP
DETECT, STOP, RENDEZVOUS, BACKOFF = Activity.DETECT, Activity.STOP, Activity.RENDEZVOUS, Activity.BACKOFF

WAYS = {
    WAITING: (),
    START: (News.STARTED,),
    INIT: (News.STARTED, News.BEGAN),
    LOAD: (News.STARTED, News.LOADING),
    FIRST_STEP: (News.STARTED, News.LOADING, News.LOADED),
    PRODUCTIVE: (News.STARTED, News.STEPPED),
    RECOMPUTE: (News.STARTED, News.STEPPED_AGAIN),
    DETECT: (News.STARTED, News.FAILED),
    STOP: (News.STARTED, News.STOPPING),
    RENDEZVOUS: (News.STARTED, News.STOPPING, News.GONE),
    BACKOFF: (News.STARTED, News.STOPPING, News.GONE, News.HELD_BACK),
}
"""How to get to each activity."""

EXPECTED = {
    (WAITING, News.STARTED): START,
    (RENDEZVOUS, News.STARTED): START,
    (BACKOFF, News.STARTED): START,
    (START, News.BEGAN): INIT,
    (START, News.LOADING): LOAD,
    (INIT, News.LOADING): LOAD,
    (LOAD, News.LOADED): FIRST_STEP,
    **dict.fromkeys(product(STARTUP, [News.STEPPED]), PRODUCTIVE),
    (RECOMPUTE, News.STEPPED): PRODUCTIVE,
    **dict.fromkeys(product(STARTUP, [News.STEPPED_AGAIN]), RECOMPUTE),
    (PRODUCTIVE, News.STEPPED_AGAIN): RECOMPUTE,
    **dict.fromkeys(product(STARTUP, [News.FAILED]), DETECT),
    (PRODUCTIVE, News.FAILED): DETECT,
    (RECOMPUTE, News.FAILED): DETECT,
    **dict.fromkeys(product(STARTUP, [News.STOPPING]), STOP),
    (PRODUCTIVE, News.STOPPING): STOP,
    (RECOMPUTE, News.STOPPING): STOP,
    (DETECT, News.STOPPING): STOP,
    (STOP, News.GONE): RENDEZVOUS,
    **dict.fromkeys(product(STARTUP, [News.GONE]), WAITING),
    (PRODUCTIVE, News.GONE): WAITING,
    (RECOMPUTE, News.GONE): WAITING,
    (RENDEZVOUS, News.HELD_BACK): BACKOFF,
    (BACKOFF, News.RELEASED): RENDEZVOUS,
    (RENDEZVOUS, News.SET_ASIDE): WAITING,
    (BACKOFF, News.SET_ASIDE): WAITING,
}
"""All that is not here changes nothing."""


def hear(sheet: Timesheet, *story: tuple[float, News]) -> list[Recovery]:
    heard = [sheet.hear(news, at) for at, news in story]
    return [recovery for recovery in heard if recovery is not None]


@pytest.mark.parametrize(("activity", "news"), list(product(Activity, News)))
def test_what_each_news_makes_of_each_activity(activity: Activity, news: News) -> None:
    sheet = Timesheet(0.0)
    hear(sheet, *((0.0, step) for step in WAYS[activity]))
    assert sheet.activity is activity
    sheet.hear(news, 0.0)
    assert sheet.activity is EXPECTED.get((activity, news), activity)


def test_the_labels_of_the_metrics_are_the_activities() -> None:
    startup = {activity.value for activity in STARTUP}
    assert {activity.value for activity in Activity} - startup == {"productive", *LOST_TIME_CAUSES} - {
        "startup"
    }
    assert tuple(phase.value for phase in PHASES) == RECOVERY_PHASES
    assert set(NEXT) == set(News)


FAILURE_HERE = [
    (10.0, News.STARTED),
    (10.5, News.BEGAN),
    (12.0, News.STEPPED),
    (13.0, News.STEPPED),
    (39.0, News.STEPPED),
    (40.0, News.FAILED),
    (40.5, News.STOPPING),
    (41.5, News.GONE),
    (42.0, News.HELD_BACK),
    (45.0, News.RELEASED),
    (45.25, News.STARTED),
    (45.5, News.BEGAN),
    (46.5, News.LOADING),
    (48.0, News.LOADED),
    (48.25, News.STEPPED_AGAIN),
    (50.25, News.STEPPED_AGAIN),
    (53.25, News.STEPPED),
    (54.25, News.STEPPED),
]


def test_each_second_belongs_to_what_happened_in_it() -> None:
    sheet = Timesheet(4.0)
    hear(sheet, *FAILURE_HERE)
    sheet.advance(60.0)
    assert sheet.seconds == {
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
    assert sheet.booked_until == 54.25, "nobody knows what the step under way will be good for"


@pytest.mark.parametrize(
    ("ending", "into"),
    [
        pytest.param(News.STEPPED, PRODUCTIVE, id="a long step"),
        pytest.param(News.FAILED, DETECT, id="a step that a failure cut short"),
        pytest.param(
            News.STOPPING, DETECT, id="a hang, a lost peer, a planned change in the middle of a step"
        ),
        pytest.param(News.GONE, STOP, id="what the script does after its last step"),
    ],
)
def test_the_time_since_the_last_step_is_booked_when_it_is_known_what_it_was_good_for(
    ending: News, into: Activity
) -> None:
    sheet = Timesheet(0.0)
    hear(sheet, (0.0, News.STARTED), (0.0, News.STEPPED))
    sheet.advance(99.0)
    assert not any(sheet.seconds.values())
    hear(sheet, (100.0, ending))
    assert {activity for activity, seconds in sheet.seconds.items() if seconds} == {into}
    assert sheet.seconds[into] == 100.0


def test_a_recovery_ends_with_the_first_step_whether_it_is_new_or_not() -> None:
    [recovery] = hear(Timesheet(4.0), *FAILURE_HERE)
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
        pytest.param([(45.5, News.BEGAN)], {START: 0.25, INIT: 2.75}, id="no load"),
        pytest.param(
            [(46.25, News.LOADING)], {START: 1.0, LOAD: 2.0}, id="a load that another step overtook"
        ),
        pytest.param(
            [(45.5, News.BEGAN), (46.5, News.LOADING), (47.0, News.LOADED)],
            {START: 0.25, INIT: 1.0, LOAD: 0.5, FIRST_STEP: 1.25},
            id="all",
        ),
    ],
)
def test_what_nobody_told_is_no_phase_of_the_recovery(
    told: list[tuple[float, News]], phases: dict[Activity, float]
) -> None:
    before = [*FAILURE_HERE[:10], (45.25, News.STARTED)]
    [recovery] = hear(Timesheet(4.0), *before, *told, (48.25, News.STEPPED))
    assert {phase: s for phase, s in recovery.phases.items() if phase in STARTUP} == phases
    assert recovery.duration_s == 48.25 - 40.0


def test_what_is_told_when_workers_step_changes_nothing() -> None:
    sheet = Timesheet(0.0)
    hear(
        sheet,
        (1.0, News.STARTED),
        (3.0, News.STEPPED),
        (3.5, News.LOADING),
        (4.0, News.LOADED),
        (5.0, News.STEPPED),
    )
    assert sheet.seconds[PRODUCTIVE] == 2.0


def test_generations_tried_in_vain_belong_to_the_recovery() -> None:
    tried = [
        (45.25, News.STARTED),
        (45.75, News.BEGAN),
        (46.25, News.FAILED),
        (46.5, News.STOPPING),
        (47.0, News.GONE),
        (47.5, News.STARTED),
        (50.0, News.STEPPED),
    ]
    [recovery] = hear(Timesheet(4.0), *FAILURE_HERE[:10], *tried)
    assert recovery.phases == {
        DETECT: 0.75,
        STOP: 1.5,
        RENDEZVOUS: 1.25,
        BACKOFF: 3.0,
        START: 0.5 + 2.5,
        INIT: 0.5,
    }
    assert recovery.duration_s == 10.0


def test_without_steps_a_recovery_ends_when_the_workers_start() -> None:
    sheet = Timesheet(0.0)
    story = [
        (1.0, News.STARTED),
        (5.0, News.STOPPING),
        (6.0, News.GONE),
        (8.0, News.STARTED),
        (9.0, News.STOPPING),
    ]
    [recovery] = hear(sheet, *story)
    assert (recovery.duration_s, recovery.phases) == (
        3.0,
        {DETECT: 0.0, STOP: 1.0, RENDEZVOUS: 2.0, BACKOFF: 0.0},
    )
    assert sheet.activity is STOP
    assert sheet.recovering


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param([(50.0, News.SET_ASIDE)], id="the others went on alone"),
        pytest.param([(50.0, News.STARTED), (51.0, News.GONE)], id="there were no steps left to do"),
    ],
)
def test_a_recovery_that_comes_to_nothing_is_none(ending: list[tuple[float, News]]) -> None:
    sheet = Timesheet(4.0)
    assert hear(sheet, *FAILURE_HERE[:8], *ending) == []
    assert not sheet.recovering
    assert hear(sheet, (60.0, News.STARTED), (61.0, News.STEPPED)) == []


def test_an_instant_that_is_booked_already_stays_booked() -> None:
    sheet = Timesheet(0.0)
    hear(sheet, (1.0, News.STARTED))
    sheet.advance(10.0)
    hear(sheet, (9.5, News.FAILED), (9.75, News.STOPPING))
    sheet.advance(11.0)
    assert (sheet.seconds[START], sheet.seconds[DETECT], sheet.seconds[STOP]) == (9.0, 0.0, 1.0)


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.sampled_from(News)), st.integers(-3, 10).map(lambda n: n / 8)))
)
def test_the_seconds_add_up_and_never_fall(story: list[tuple[News | None, float]]) -> None:
    sheet, now, latest = Timesheet(100.0), 100.0, 100.0
    standing_still_since: float | None = None
    for news, passed in story:
        now += passed  # at times backwards: events of several threads overtake each other
        before, booked = dict(sheet.seconds), sheet.booked_until
        latest = max(latest, now)
        recovery = sheet.hear(news, now) if news is not None else sheet.advance(now)
        if recovery is not None:
            assert standing_still_since is not None
            assert recovery.duration_s == sheet.booked_until - standing_still_since
        assert sum(sheet.seconds.values()) == sheet.booked_until - 100.0  # eighths: exact
        assert all(sheet.seconds[activity] >= before[activity] for activity in Activity)
        assert sheet.booked_until in (booked, now)
        assert sheet.activity in STEPPING or sheet.booked_until >= now
        if not sheet.recovering:
            standing_still_since = None
        elif standing_still_since is None:
            standing_still_since = sheet.booked_until
        assert not (sheet.recovering and sheet.activity in (WAITING, *STEPPING))
