"""Since when a job stands still whose first ranks have ended: what counts as life, what is said, when it is over."""

from __future__ import annotations

import logging
from collections.abc import Collection

import pytest

from elastic_agent.agent.workers.stopping import (
    AT_WORK,
    EXIT_LOOK_EVERY_S,
    ExitWatch,
    LateExits,
    session_processor_time,
)


def test_nothing_is_due_before_a_rank_has_ended_nor_without_a_limit() -> None:
    watch, never = ExitWatch(300.0), ExitWatch(None)
    watch.alive(0.0)
    assert (watch.due(1e6), watch.warning_due(1e6), watch.watching) == (False, False, False)
    for each in (watch, never):
        each.ended(100.0)
    assert (watch.due(399.0), watch.due(400.0), never.due(1e9)) == (False, True, False)


def test_signs_of_life_and_further_ends_put_it_off_and_older_ones_take_nothing_back() -> None:
    watch = ExitWatch(300.0)
    watch.ended(100.0)
    watch.alive(250.0)
    watch.ended(240.0)
    watch.alive(120.0)
    assert (watch.due(549.0), watch.due(550.0)) == (False, True)
    watch.ended(500.0)
    assert not watch.due(550.0)


def test_warnings_come_once_and_then_ever_more_rarely() -> None:
    watch = ExitWatch(None)
    watch.ended(0.0)
    assert [now for now in range(1200) if watch.warning_due(now)] == [10, 60, 120, 240, 480, 960]


def test_a_worker_that_reports_now_and_then_does_not_fill_the_log() -> None:
    watch = ExitWatch(300.0)
    watch.ended(0.0)
    words = 0
    for now in range(1000):
        words += watch.warning_due(now)
        if now % 15 == 0:
            watch.alive(now)
    assert words == 1


class Bench:
    def __init__(self, limit_s: float | None = 300.0) -> None:
        self.used_s = 0.0
        self.late_exits = LateExits(limit_s, self.processor_time)

    def processor_time(self, sessions: Collection[int]) -> float:
        assert sessions == [4711]
        return self.used_s

    def until(self, end: int, *, mute: bool = False, each_second_s: float = 0.0) -> tuple[int, str]:
        """The second in which rank 0 was taken for stuck, and why."""
        for now in range(end):
            self.used_s += each_second_s
            if why := self.late_exits.turn(float(now), [0], [4711] if mute else []):
                return now, why
        return end, ""


def test_ranks_that_live_on_are_named_and_then_they_hang(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    bench = Bench()
    bench.late_exits.ended(1, 0.0)
    bench.late_exits.ended(3, 2.0)
    assert bench.until(1000) == (
        302,
        "hang after the end of other ranks: ranks 1, 3 have ended with success; rank 0 still lives, without a step or"
        " checkpoint for 300 s (--exit-timeout)",
    )
    assert [record.message.partition("for ")[2] for record in caplog.records] == [
        "10 s: a hang after 300 s (--exit-timeout)",
        "60 s: a hang after 300 s (--exit-timeout)",
        "120 s: a hang after 300 s (--exit-timeout)",
        "240 s: a hang after 300 s (--exit-timeout)",
    ]


def test_ranks_of_other_nodes_count_from_when_their_end_is_known() -> None:
    bench = Bench()
    bench.late_exits.others_ended(7.0)
    bench.late_exits.others_ended(100.0)
    at, why = bench.until(1000)
    assert at == 307
    assert "ranks of other nodes have ended with success; rank 0 still lives" in why


def test_without_a_limit_it_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(None)
    bench.late_exits.ended(1, 0.0)
    assert bench.until(1000) == (1000, "")
    assert "waiting without a limit (--exit-timeout)" in caplog.text


def test_a_worker_that_reports_no_steps_is_at_work_while_it_uses_the_processor() -> None:
    """It may be writing a model for longer than the limit."""
    busy, idle = Bench(), Bench()
    for bench in (busy, idle):
        bench.late_exits.ended(1, 0.0)
    assert busy.until(1000, mute=True, each_second_s=2 * AT_WORK)[0] == 1000
    at, _ = idle.until(1000, mute=True, each_second_s=AT_WORK / 2)
    assert 300 <= at <= 300 + EXIT_LOOK_EVERY_S


def test_who_has_reported_steps_is_judged_by_them_alone() -> None:
    """A hang may spin."""
    bench = Bench()
    bench.late_exits.ended(1, 0.0)
    assert bench.until(1000, each_second_s=1.0)[0] == 300


def test_no_rank_is_stuck_where_all_have_ended_or_none_has() -> None:
    bench = Bench()
    assert bench.late_exits.turn(1e6, [0], []) == ""
    bench.late_exits.ended(0, 0.0)
    assert bench.late_exits.turn(1e6, [], []) == ""


def test_all_processes_are_looked_through_only_now_and_then() -> None:
    looks = []

    def look(sessions: Collection[int]) -> float:
        looks.append(sessions)
        return 0.0

    late_exits = LateExits(300.0, look)
    late_exits.ended(1, 0.0)
    for tenth in range(200):
        late_exits.turn(tenth / 10, [0], [4711])
    assert len(looks) == 20 / EXIT_LOOK_EVERY_S


def test_processor_time_is_that_of_the_whole_session() -> None:
    import os

    assert session_processor_time([os.getsid(0)]) > 0
    assert session_processor_time([]) == 0
