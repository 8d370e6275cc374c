"""What the service manager hears, on a real socket and by a clock that the test turns."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.agent.main.service_manager import LONGEST_STATUS, ServiceManager

PID = 4711


class Ear:
    """Stands in for systemd: what was said to it since it was last asked."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0"))
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        said = []
        while True:
            try:
                said.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return said


@pytest.fixture(params=["path", "abstract"])
def ear(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ear]:
    ear = Ear(str(tmp_path / "notify") if request.param == "path" else f"@{uuid.uuid4().hex}")
    yield ear
    ear.socket.close()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def take(ear: Ear, clock: Clock, **more: str) -> ServiceManager:
    return ServiceManager.take({"NOTIFY_SOCKET": ear.address, **more}, PID, clock)


def running(ear: Ear, clock: Clock, **more: str) -> ServiceManager:
    manager = take(ear, clock, **more)
    manager.ready()
    assert ear.heard() == ["READY=1"]
    return manager


def test_ready_status_beat_and_stop_are_sent_each_in_its_own_datagram(ear: Ear, clock: Clock) -> None:
    manager = take(ear, clock, WATCHDOG_USEC="30000000", WATCHDOG_PID=str(PID))
    manager.ready()
    manager.turn("joining")
    manager.stopping("leaving")
    manager.stopping("gone")
    assert ear.heard() == [
        "READY=1", "STATUS=joining", "WATCHDOG=1", "STOPPING=1", "STATUS=leaving", "STATUS=gone",
    ]  # fmt: skip


def test_what_a_full_socket_refused_of_ready_is_sent_at_the_next_turn(ear: Ear, clock: Clock) -> None:
    manager, other = take(ear, clock), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with other, contextlib.suppress(BlockingIOError):
        while True:
            other.sendto(b"of another unit", socket.MSG_DONTWAIT, ear.address.replace("@", "\0"))
    manager.ready()
    assert "READY=1" not in ear.heard()
    manager.turn("a")
    manager.turn("a")
    assert ear.heard() == ["READY=1", "STATUS=a"]


def test_a_status_is_sent_when_it_changes_and_at_most_once_a_second(ear: Ear, clock: Clock) -> None:
    manager = running(ear, clock)
    manager.turn("a")
    manager.turn("b")
    clock.now += 0.9
    manager.turn("c")
    assert ear.heard() == ["STATUS=a"]
    clock.now += 0.2
    manager.turn("c")
    clock.now += 5.0
    manager.turn("c")
    assert ear.heard() == ["STATUS=c"], "the newest, once"


def test_a_status_is_one_line_of_bounded_length(ear: Ear, clock: Clock) -> None:
    running(ear, clock).turn("why:\nREADY=1 " + "x" * 1000)
    [said] = ear.heard()
    assert said.startswith("STATUS=why: READY=1 xxx")
    assert len(said) == len("STATUS=") + LONGEST_STATUS


def test_a_status_that_is_no_unicode_text_fails_nothing(ear: Ear, clock: Clock) -> None:
    running(ear, clock).turn("a path of bytes: \udcff")
    assert ear.heard() == ["STATUS=a path of bytes: ?"]


def test_beats_come_at_less_than_half_the_watchdogs_time_and_not_at_every_turn(
    ear: Ear, clock: Clock
) -> None:
    manager = running(ear, clock, WATCHDOG_USEC="6000000")
    beats = []
    for _ in range(600):
        clock.now += 0.01
        manager.turn("")
        beats += [clock.now] * ear.heard().count("WATCHDOG=1")
    gaps = [after - before for before, after in itertools.pairwise(beats)]
    assert 1.5 < min(gaps) <= max(gaps) < 3.0
    assert manager.next_beat == pytest.approx(beats[-1] + 2.0)


@pytest.mark.parametrize(
    ("variables", "watched"),
    [
        ({}, False),
        ({"WATCHDOG_USEC": "1000000"}, True),
        ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(PID)}, True),
        ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(PID + 1)}, False),
        ({"WATCHDOG_USEC": "0"}, False),
        ({"WATCHDOG_USEC": "30s"}, False),
    ],
)
def test_the_watchdog_is_fed_only_by_the_process_that_it_watches(
    ear: Ear, clock: Clock, variables: dict[str, str], watched: bool
) -> None:
    manager = take(ear, clock, **variables)
    manager.turn("")
    assert ("WATCHDOG=1" in ear.heard()) is watched
    assert (manager.next_beat is not None) is watched


def test_no_child_inherits_the_variables(ear: Ear, clock: Clock) -> None:
    environ = {"NOTIFY_SOCKET": ear.address, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "PATH": "/bin"}
    ServiceManager.take(environ, PID, clock)
    assert environ == {"PATH": "/bin"}


def test_without_a_service_manager_nothing_is_sent_and_nothing_fails(clock: Clock) -> None:
    manager = ServiceManager.take({"WATCHDOG_USEC": "1000000"}, PID, clock)
    manager.ready()
    manager.turn("a")
    manager.stopping("b")
    assert manager.next_beat is None


def test_a_manager_that_is_away_is_told_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ear = Ear(str(tmp_path / "notify"))
    manager = take(ear, clock, WATCHDOG_USEC="3000000")
    ear.socket.close()
    manager.ready()
    for _ in range(10):
        clock.now += 1.0
        manager.turn("looking")
    assert len(caplog.messages) == 1
    assert "NOTIFY_SOCKET" in caplog.messages[0]
    os.unlink(ear.address)
    again = Ear(ear.address)
    manager.turn("looking")
    assert again.heard() == ["READY=1", "STATUS=looking", "WATCHDOG=1"]
    again.socket.close()


def test_a_manager_that_does_not_read_holds_nothing_up(tmp_path: Path, clock: Clock) -> None:
    ear = Ear(str(tmp_path / "notify"))
    manager = take(ear, clock, WATCHDOG_USEC="3000000")
    for _ in range(2000):  # more than a socket's queue
        clock.now += 1.0
        manager.turn(f"at {clock.now}")
    assert ear.heard()
    ear.socket.close()
