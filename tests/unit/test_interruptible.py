"""Work before the main loop runs: a signal ends the wait, and nothing else does."""

from __future__ import annotations

import queue
import signal
import threading
import time

import pytest

from elastic_agent.agent.common.events import Event, Signalled, unless_stopped
from elastic_agent.agent.common.exits import CannotStart, ExitCode


def test_calls_are_made_meanwhile_in_their_order() -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    found, called = threading.Event(), []

    def look() -> None:
        if len(called) == 2:
            found.set()

    events.put(lambda: called.append(1))
    events.put(lambda: called.append(2))
    assert unless_stopped(lambda: found.wait(30), events, "looking", look)
    assert called == [1, 2]


@pytest.mark.parametrize(("takes_s", "lines"), [(0.0, 0), (1.4, 1)])
def test_only_what_takes_long_is_announced_and_once(
    takes_s: float, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    unless_stopped(lambda: time.sleep(takes_s), queue.SimpleQueue(), "looking for it")
    assert [record.getMessage() for record in caplog.records] == ["looking for it"] * lines


@pytest.mark.parametrize(
    ("number", "requeues", "code"),
    [
        (signal.SIGINT, False, ExitCode.STOPPED_BY_SIGINT),
        (signal.SIGTERM, False, ExitCode.STOPPED_BY_SIGTERM),
        (signal.SIGTERM, True, ExitCode.STOPPED_BY_SIGTERM),
        (signal.SIGUSR1, False, ExitCode.STOPPED_BY_SIGTERM),
        (signal.SIGUSR1, True, ExitCode.LEFT_IN_TIME),
    ],
)
def test_a_signal_behind_other_events_ends_the_wait(number: int, requeues: bool, code: ExitCode) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    for event in (threading.Event().set, Signalled(number)):
        events.put(event)
    never = threading.Event()
    with pytest.raises(CannotStart, match="stopped while looking") as refusal:
        unless_stopped(lambda: never.wait(30), events, "looking", requeues=requeues)
    assert refusal.value.code is code
    never.set()
