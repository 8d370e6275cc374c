"""Since when a job stands still whose first ranks have ended: what counts as life, what is said, when it is over."""

from __future__ import annotations

import logging
from collections.abc import Collection

import pytest

from elastic_agent.agent.workers import stopping
from elastic_agent.agent.workers.stopping import (
    AT_WORK,
    EXIT_LOOK_EVERY_S,
    LateExits,
    session_processor_time,
)


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit_s: float | None = 300.0) -> None:
        self.used_s = 0.0
        self.looks = 0
        self.late_exits = LateExits(limit_s)
        monkeypatch.setattr(stopping, "session_processor_time", self.processor_time)

    def processor_time(self, sessions: Collection[int]) -> float:
        assert sessions == [4711]
        self.looks += 1
        return self.used_s

    def until(self, end: int, *, mute: bool = False, each_second_s: float = 0.0) -> tuple[int, str]:
        """The second in which rank 0 was taken for stuck, and why."""
        for now in range(end):
            self.used_s += each_second_s
            if why := self.late_exits.turn(float(now), [0], [4711] if mute else []):
                return now, why
        return end, ""


def test_signs_of_life_and_further_ends_put_it_off_and_older_ones_take_nothing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = Bench(monkeypatch).late_exits
    late.alive(0.0)
    assert not late.turn(1e6, [0], []), "no rank has ended"
    late.ended(1, 100.0)
    late.alive(250.0)
    late.ended(2, 240.0)
    late.alive(120.0)
    assert not late.turn(549.0, [0], [])
    assert late.turn(550.0, [0], [])
    late.ended(3, 500.0)
    assert not late.turn(550.0, [0], [])


def test_a_worker_that_reports_now_and_then_does_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late = Bench(monkeypatch).late_exits
    late.ended(1, 0.0)
    for now in range(1000):
        late.turn(now, [0], [])
        if now % 15 == 0:
            late.alive(now)
    assert len(caplog.records) == 1


def test_ranks_that_live_on_are_named_and_then_they_hang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    bench = Bench(monkeypatch)
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


def test_ranks_of_other_nodes_count_from_when_their_end_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.late_exits.others_ended(7.0)
    bench.late_exits.others_ended(100.0)
    at, why = bench.until(1000)
    assert at == 307
    assert "ranks of other nodes have ended with success; rank 0 still lives" in why


def test_without_a_limit_it_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(monkeypatch, None)
    bench.late_exits.ended(1, 0.0)
    assert bench.until(1000) == (1000, "")
    assert "waiting without a limit (--exit-timeout)" in caplog.text


def test_a_worker_that_reports_no_steps_is_at_work_while_it_uses_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be writing a model for longer than the limit."""
    busy = Bench(monkeypatch)
    busy.late_exits.ended(1, 0.0)
    assert busy.until(1000, mute=True, each_second_s=2 * AT_WORK)[0] == 1000
    idle = Bench(monkeypatch)
    idle.late_exits.ended(1, 0.0)
    at, _ = idle.until(1000, mute=True, each_second_s=AT_WORK / 2)
    assert 300 <= at <= 300 + EXIT_LOOK_EVERY_S


def test_who_has_reported_steps_is_judged_by_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang may spin."""
    bench = Bench(monkeypatch)
    bench.late_exits.ended(1, 0.0)
    assert bench.until(1000, each_second_s=1.0)[0] == 300


def test_no_rank_is_stuck_where_all_have_ended_or_none_has(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    assert bench.late_exits.turn(1e6, [0], []) == ""
    bench.late_exits.ended(0, 0.0)
    assert bench.late_exits.turn(1e6, [], []) == ""


def test_all_processes_are_looked_through_only_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.late_exits.ended(1, 0.0)
    for tenth in range(200):
        bench.late_exits.turn(tenth / 10, [0], [4711])
    assert bench.looks == 20 / EXIT_LOOK_EVERY_S


def test_processor_time_is_that_of_the_whole_session() -> None:
    import os

    assert session_processor_time([os.getsid(0)]) > 0
    assert session_processor_time([]) == 0
