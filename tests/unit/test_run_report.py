"""Where the hours of a run went: journals that are written here, and what the report makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.agent.commands.report import (
    BLOCKED,
    PRODUCTIVE,
    REDONE,
    SAVING,
    Interval,
    Report,
    document,
    intervals_of,
    job_seconds,
    lines,
    report_of,
)
from elastic_agent.agent.observability.training_account import Activity
from elastic_agent.agent.output.journal import EventKind, JobEvent

EPOCH = 1_000_000.0


class Journal(list[JobEvent]):
    """What one agent after the other writes on a node. Instants count from EPOCH, by the node's clock."""

    def __init__(self, node: str, ahead_s: float = 0.0) -> None:
        super().__init__()
        self._node, self._ahead_s = node, ahead_s
        self._generation = 0
        self._spent = dict.fromkeys(Activity, 0.0)
        self._number = 0
        self._at = 0.0
        self.blocked_s = 0.0

    def begin(self, at: float) -> None:
        self._number, self._at, self._spent = 0, at, dict.fromkeys(Activity, 0.0)
        self.blocked_s = 0.0
        self.note(EventKind.AGENT_STARTED)

    def note(self, kind: EventKind, generation: int | None = None, **more: Any) -> None:
        self._generation = self._generation if generation is None else generation
        self._number += 1
        at = EPOCH + self._at + self._ahead_s
        self.append(
            JobEvent(
                number=self._number,
                at=at,
                node=self._node,
                generation=self._generation,
                kind=kind,
                text="",
                **more,
            )
        )

    def spend(self, *, told: bool = True, **seconds: float) -> None:
        """So many seconds go into these activities, and the account says so, if it is `told`."""
        for name, spent in seconds.items():
            self._spent[Activity[name.upper()]] += spent
            self._at += spent
        if told:
            self.note(
                EventKind.ACCOUNTING,
                seconds={
                    "blocked": self.blocked_s,
                    **{activity.value: spent for activity, spent in self._spent.items()},
                },
            )


def shown(report: Report) -> dict[str, float]:
    return {use: round(seconds, 6) for use, seconds in report.seconds.items() if seconds > 1e-9}


def report(*journals: Iterable[JobEvent]) -> Report:
    found = report_of("job-1", journals)
    assert found is not None
    return found


def failing_once() -> Journal:
    """A minute of training, a failure, a restart, ten seconds of steps done again, and another minute."""
    a = Journal("a")
    a.begin(0.0)
    a.spend(waiting=5.0)
    a.note(EventKind.WORLD, 1, cause="start", counts={"nodes": 1, "workers": 2})
    a.note(EventKind.LOAD)
    a.spend(start=1.0, init=3.0)
    a.spend(productive=60.0)
    a.note(EventKind.FAILURE, rank=1, about="a", cause="killed")
    a.spend(detect=0.5, stop=1.0, rendezvous=0.5)
    a.note(EventKind.WORLD, 2, cause="killed", about="a", counts={"nodes": 1, "workers": 2})
    a.note(EventKind.LOAD)
    a.spend(start=1.0, init=3.0, load=2.0, first_step=1.0)
    a.note(
        EventKind.RECOVERY,
        cause="process",
        seconds={"detect": 0.5, "stop": 1, "rendezvous": 0.5, "start": 1, "init": 3, "load": 2, "step": 1},
    )
    a.spend(recompute=10.0, productive=60.0)
    a.note(EventKind.JOB_ENDED, cause="succeeded")
    a.spend(waiting=7.0)
    a.note(EventKind.AGENT_ENDED, counts={"code": 0})
    return a


def test_the_seconds_of_one_node_are_those_of_the_job_until_its_end() -> None:
    found = report(failing_once())
    assert shown(found) == {
        "productive": 120.0,
        "recompute": 10.0,
        "detect": 0.5,
        "stop": 1.0,
        "rendezvous": 0.5,
        "start": 2.0,
        "init": 6.0,
        "load": 2.0,
        "step": 1.0,
        "waiting": 5.0,
    }
    assert found.wall_s == pytest.approx(148.0)
    assert found.ettr == pytest.approx(120.0 / 148.0)
    assert found.restarting_s == pytest.approx(13.0)
    assert (found.result, found.began_at) == ("succeeded", EPOCH)
    assert (found.nodes, found.generations) == (1, 2)
    assert found.troubles == {("killed", "a"): 1}


def test_a_run_that_all_nodes_have_left_is_stopped_and_one_of_which_a_node_is_silent_may_go_on() -> None:
    """As a job of a pool that was cancelled: no world says so."""
    a, b = Journal("a"), Journal("b")
    for node in (a, b):
        node.begin(0.0)
        node.spend(productive=10.0)
    a.note(EventKind.AGENT_ENDED, counts={"code": 143})
    assert report(a, b).result == ""
    b.note(EventKind.AGENT_ENDED, counts={"code": 143})
    assert report(a, b).result == "stopped"
    assert next(lines(report(a, b))).startswith("run job-1: stopped, ")
    b.begin(20.0)
    b.spend(productive=10.0)
    assert report(a, b).result == ""


def test_a_second_of_the_job_is_one_second_however_many_nodes_it_has() -> None:
    journals = []
    for name, stop in (("a", 1.0), ("b", 3.0)):
        node = Journal(name)
        node.begin(0.0)
        node.spend(productive=10.0)
        node.spend(stop=stop, rendezvous=4.0 - stop)
        node.spend(productive=6.0)
        journals.append(node)
    assert shown(report(*journals)) == {"productive": 16.0, "stop": 2.0, "rendezvous": 2.0}


def test_a_node_that_waits_beside_a_world_costs_the_job_nothing() -> None:
    a, spare = Journal("a"), Journal("spare")
    a.begin(10.0)
    a.spend(productive=20.0)
    spare.begin(0.0)
    spare.spend(waiting=40.0)
    assert shown(report(a, spare)) == {"waiting": 20.0, "productive": 20.0}


def test_time_without_any_agent_is_the_jobs_too() -> None:
    a = Journal("a")
    a.begin(0.0)
    a.spend(productive=10.0)
    a.begin(110.0)
    a.spend(productive=10.0)
    found = report(a)
    assert shown(found) == {"productive": 20.0, "absent": 100.0}


def test_what_an_agent_did_after_its_last_account_is_not_known() -> None:
    a = Journal("a")
    a.begin(0.0)
    a.spend(productive=10.0)
    a.spend(productive=30.0, told=False)
    a.note(EventKind.FAILURE, about="a")
    assert shown(report(a)) == {"productive": 10.0}


def test_training_stands_still_for_the_slowest_save() -> None:
    a, b = Journal("a"), Journal("b")
    for node, blocked in ((a, 4.0), (b, 1.0)):
        node.begin(0.0)
        node.blocked_s = blocked
        node.spend(productive=20.0)
        node.blocked_s += 99.0
        node.spend(recompute=5.0, stop=5.0)
    assert shown(report(a, b)) == {"productive": 16.0, "saving": 4.0 + 5.0, "stop": 5.0}


def test_each_event_counts_once_however_many_nodes_noted_it_and_the_most_frequent_is_first() -> None:
    journals = [Journal(name) for name in ("a", "b", "c")]
    for node in journals:
        node.begin(0.0)
        for generation, (cause, about) in enumerate(
            [("start", ""), ("killed", "b"), ("killed", "b"), ("lost", "c"), ("join", "c")], 1
        ):
            node.note(EventKind.WORLD, generation, cause=cause, about=about)
            node.spend(productive=10.0)
            node.note(EventKind.STRAGGLER, rank=0, about="a", cause="slow")
            node.note(EventKind.STRAGGLER, rank=0, about="a", cause="recovered")
            if generation in (1, 2):
                node.note(EventKind.FAILURE, rank=1, about="b", cause="killed")
        for times in (1, 2):
            node.note(EventKind.EXCLUSION, about="b", counts={"times": times})
        node.note(EventKind.FAILURE, rank=1, about="b", cause="hang")
        node.note(EventKind.JOB_ENDED, cause="restarts_exhausted")
    late = Journal("late")
    late.begin(45.0)
    late.note(EventKind.WORLD, 6, cause="join", about="late")
    late.note(EventKind.EXCLUSION, about="b", counts={"times": 2})
    late.begin(50.0)
    late.note(EventKind.EXCLUSION, about="b", counts={"times": 2})
    assert report(*journals, late).troubles == {
        ("slow", "a"): 5,
        ("excluded", "b"): 2,
        ("killed", "b"): 2,
        ("join", "c"): 1,
        ("join", "late"): 1,
        ("lost", "c"): 1,
    }


def test_a_hang_is_put_down_to_the_node_that_the_next_world_or_the_end_names() -> None:
    journals = [Journal(name) for name in ("a", "b")]
    for node in journals:
        node.begin(0.0)
        node.note(EventKind.WORLD, 1, cause="start")
        node.spend(productive=10.0)
        node.note(EventKind.VERDICT, cause="certain")
        node.note(EventKind.FAILURE, cause="hang")
        node.note(EventKind.WORLD, 2, cause="hang", about="b")
        node.spend(productive=10.0)
        node.note(EventKind.WORLD, 3, cause="join", about="a")
        node.note(EventKind.FAILURE, cause="hang")
        node.note(EventKind.JOB_ENDED, cause="crash_loop", about="b")
    assert report(*journals).troubles == {("hang", "b"): 2, ("join", "a"): 1}


def test_a_failure_that_ended_the_job_is_a_cause_like_the_others() -> None:
    a = failing_once()
    a.note(EventKind.FAILURE, 2, about="a", cause="disk_full")
    assert report(a).troubles == {("disk_full", "a"): 1, ("killed", "a"): 1}


def test_what_lies_between_two_accounts_is_mixed_but_for_what_came_before_the_world() -> None:
    a = Journal("a")
    a.begin(0.0)
    a.spend(waiting=2.0, start=1.0, init=3.0)
    a.spend(productive=5.0)
    found = [(one.began_at - EPOCH, one.ended_at - EPOCH, one.shares) for one in intervals_of(a)]
    assert [
        (at, until, {use: share for use, share in shares.items() if share}) for at, until, shares in found
    ] == [
        (0.0, 2.0, {}),
        (2.0, 6.0, {"start": 0.25, "init": 0.75}),
        (6.0, 11.0, {"productive": 1.0}),
    ]


def test_an_agents_clock_that_is_set_while_it_runs_loses_and_adds_no_second() -> None:
    a = Journal("a")
    a.begin(0.0)
    a.spend(productive=10.0)
    a._ahead_s = 5000.0
    a.spend(productive=10.0)
    assert shown(report(a)) == {"productive": 20.0}


def test_without_an_account_there_is_no_report() -> None:
    a = Journal("a")
    a.begin(0.0)
    for journals in ([], [[]], [a]):
        assert report_of("job-1", journals) is None


def test_without_steps_the_ratio_is_not_known() -> None:
    a = Journal("a")
    a.begin(0.0)
    a.spend(start=0.5, init=6.0, load=1.0, first_step=3.0, stop=1.0)
    found = report(a)
    assert found.ettr is None
    assert shown(found) == {"start": 0.5, "running": 10.0, "stop": 1.0}
    assert found.restarting_s == pytest.approx(1.5)
    rows = {line.strip().split("  ")[0]: line.split()[-1] for line in lines(found) if line}
    assert rows["running (no steps reported)"] == f"{10 / 11.5:.1%}"
    assert {rows[name] for name in ("productive", "done again", "saving")} == {"unknown"}
    assert cast(dict[str, object], document(found)["seconds"])["productive"] is None
    assert "ETTR unknown: no steps were reported" in "\n".join(lines(found))
    assert document(found)["ettr"] is None


def test_what_a_person_sees() -> None:
    assert (
        "\n".join(lines(report(failing_once())))
        == """\
run job-1: succeeded, 2 min 28 s, 1 node, 2 generations
ETTR 0.8108: productive time / wall-clock time

  productive                    2 min 00 s    81.1%
  done again                          10 s     6.8%
  saving                             0.0 s     0.0%
  starting, restarting                13 s     8.8%
    detect                           0.5 s     0.3%
    stop                             1.0 s     0.7%
    rendezvous                       0.5 s     0.3%
    start                            2.0 s     1.4%
    init                             6.0 s     4.1%
    load                             2.0 s     1.4%
    first step                       1.0 s     0.7%
  waiting for nodes                  5.0 s     3.4%
  no agent                           0.0 s     0.0%
  wall-clock                    2 min 28 s   100.0%

WHAT HAPPENED  NODE  TIMES
killed         a     1"""
    )


SECONDS = st.integers(0, 40).map(lambda eighths: eighths / 8)


@st.composite
def any_journals(draw: st.DrawFn) -> list[Journal]:
    journals = []
    for number in range(draw(st.integers(1, 4))):
        node = Journal(f"node{number}", draw(st.sampled_from([0.0, 0.0, 100.0])))
        at = 0.0
        for _ in range(draw(st.integers(1, 3))):
            at += draw(SECONDS)
            node.begin(at)
            for _ in range(draw(st.integers(0, 6))):
                generation = node._generation + draw(st.integers(0, 1))
                kind = draw(
                    st.sampled_from([EventKind.WORLD, EventKind.DRAIN, EventKind.LOAD, EventKind.FAILURE])
                )
                node.note(kind, generation, about=f"node{number}", cause=draw(st.sampled_from(["", "lost"])))
                node.blocked_s += draw(SECONDS)
                spent: Mapping[str, float] = draw(
                    st.dictionaries(
                        st.sampled_from([activity.name.lower() for activity in Activity]), SECONDS
                    )
                )
                node.spend(told=draw(st.booleans()), **spent)
            at = node._at
        journals.append(node)
    return journals


@given(any_journals())
def test_the_seconds_add_up_to_the_wall_clock_whatever_the_journals_say(journals: list[Journal]) -> None:
    found = report_of("job-1", journals)
    if found is None:
        spans = (span for journal in journals for event in journal for span in event.seconds.items())
        assert not any(seconds for name, seconds in spans if name != BLOCKED)
        return
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s, abs=1e-5)
    assert all(seconds >= 0.0 for seconds in found.seconds.values())
    spent = sum(
        event.seconds.get(PRODUCTIVE, 0.0)
        for journal in journals
        for event in journal
        if event.kind is EventKind.ACCOUNTING
    )
    assert found.seconds[PRODUCTIVE] <= spent + 1e-5, "a job has no second that none of its nodes has"
    assert list(lines(found))


def test_saves_take_of_productive_time_before_that_of_steps_done_again() -> None:
    intervals = [
        Interval(0.0, 10.0, {REDONE: 1.0}),
        Interval(0.0, 10.0, {PRODUCTIVE: 1.0}, saving=0.4),
    ]
    for order in (intervals, intervals[::-1]):
        found = job_seconds(order, 10.0)
        assert (found[PRODUCTIVE], found[REDONE], found[SAVING]) == (1.0, 5.0, 4.0)
