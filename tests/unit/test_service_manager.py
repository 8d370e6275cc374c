"""What the service manager hears, on a real socket and by a clock that the test turns."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.agent.main.process import LONGEST_STATUS, ServiceManager


class Ear:
    """Stands in for systemd: what was said to it since it was last asked."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0"))
        self.socket.setblocking(False)

    def heard(self) -> list[list[str]]:
        said = []
        while True:
            try:
                said.append(self.socket.recv(4096).decode().splitlines())
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


def take(ear: Ear, clock: Clock) -> ServiceManager:
    return ServiceManager({"NOTIFY_SOCKET": ear.address}, clock)


def test_ready_turns_and_the_end_are_told_in_their_order(ear: Ear, clock: Clock) -> None:
    manager = take(ear, clock)
    manager.ready()
    manager.turn("joining")
    manager.stopping("leaving")
    manager.stopping("gone")
    assert ear.heard() == [
        ["READY=1", "STATUS="],
        ["WATCHDOG=1", "STATUS=joining"],
        ["STOPPING=1", "STATUS=leaving"],
        ["STOPPING=1", "STATUS=gone"],
    ]


def test_what_a_full_socket_refused_of_ready_is_sent_at_the_next_turn(ear: Ear, clock: Clock) -> None:
    manager, other = take(ear, clock), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with other, contextlib.suppress(BlockingIOError):
        while True:
            other.sendto(b"of another unit", socket.MSG_DONTWAIT, ear.address.replace("@", "\0"))
    manager.ready()
    assert not any("READY=1" in said for said in ear.heard())
    manager.turn("a")
    manager.turn("a")
    assert ear.heard() == [["READY=1", "WATCHDOG=1", "STATUS=a"]]


def test_turns_are_told_twice_a_second_at_most_with_the_newest_status(ear: Ear, clock: Clock) -> None:
    manager = take(ear, clock)
    manager.turn("a")
    manager.turn("b")
    clock.now += 0.4
    manager.turn("c")
    assert ear.heard() == [["WATCHDOG=1", "STATUS=a"]]
    clock.now += 0.2
    manager.turn("d")
    assert ear.heard() == [["WATCHDOG=1", "STATUS=d"]]


def test_a_status_is_one_line_of_bounded_length(ear: Ear, clock: Clock) -> None:
    take(ear, clock).turn("why:\nREADY=1 " + "x" * 1000)
    [[_, said]] = ear.heard()
    assert said.startswith("STATUS=why: READY=1 xxx")
    assert len(said) == len("STATUS=") + LONGEST_STATUS


def test_no_child_inherits_the_variables(ear: Ear, clock: Clock) -> None:
    environ = {"NOTIFY_SOCKET": ear.address, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "PATH": "/bin"}
    ServiceManager(environ, clock)
    assert environ == {"PATH": "/bin"}


def test_a_manager_that_is_away_is_told_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ear = Ear(str(tmp_path / "notify"))
    manager = take(ear, clock)
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
    assert again.heard() == [["READY=1", "WATCHDOG=1", "STATUS=looking"]]
    again.socket.close()


def test_a_manager_that_does_not_read_holds_nothing_up(tmp_path: Path, clock: Clock) -> None:
    ear = Ear(str(tmp_path / "notify"))
    manager = take(ear, clock)
    for _ in range(2000):  # more than a socket's queue
        clock.now += 1.0
        manager.turn(f"at {clock.now}")
    assert ear.heard()
    ear.socket.close()
