"""The checksums of copies in memory: each copy gets them, a changed bit is found, and who changes a slot is first."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from elastic_agent.worker.checkpointing.loading.checkpoint_selection import Offer, choose_source
from elastic_agent.worker.storage.memory import checksums
from elastic_agent.worker.storage.memory.checksums import ChecksumThreads
from elastic_agent.worker.storage.memory.copy_header import Copy, Header
from elastic_agent.worker.storage.memory.slots import Slots, sums_of
from tests.unit.threads import join_threads

CONTENT = bytes(range(250)) * 10


@pytest.fixture
def slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slots]:
    for module in ("slots", "checksums"):
        monkeypatch.setattr(f"elastic_agent.worker.storage.memory.{module}.PIECE_BYTES", 1000)
    monkeypatch.setattr(checksums, "_STRIDE", 300)
    slots = Slots(str(tmp_path), "/runs/x")
    yield slots
    slots.close()


def write(slots: Slots, step: int) -> str:
    opened = slots.begin(len(CONTENT))
    opened.trim()
    with open(opened.path, "r+b") as stream:
        stream.write(CONTENT)
    slots.seal(opened, Header(step, 1, 0, 1, len(CONTENT)))
    return opened.name


def test_a_copy_gets_the_checksums_that_a_load_computes(slots: Slots) -> None:
    threads = ChecksumThreads(slots)
    name = write(slots, 1)
    threads.start(name)
    join_threads("memory-sums")
    with slots.hold(name) as held:
        assert held.header.sums == sums_of(held.stream, len(CONTENT))
        assert len(held.header.sums) == 3


def test_who_changes_a_slot_does_not_wait_for_its_checksums(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = threading.Event()
    threads = ChecksumThreads(slots)
    really = checksums.zlib.crc32

    def crc32(*given: object) -> int:
        thread = threading.current_thread()
        if isinstance(thread, checksums._ChecksumThread):
            reading.set()
            thread.given_up.wait()
        return really(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(checksums.zlib, "crc32", crc32)
    name = write(slots, 1)
    threads.start(name)
    reading.wait()
    threads.stop("a", "b")
    assert not slots.headers()[name].sums
    assert write(slots, 2) != name
    assert write(slots, 3) == name, "nobody holds it"


def test_where_copies_follow_each_other_at_once_every_fourth_gets_its_checksums(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    run = checksums._ChecksumThread.run

    def running(thread: checksums._ChecksumThread) -> None:
        run(thread)
        ended.set()

    monkeypatch.setattr(checksums._ChecksumThread, "run", running)
    threads, summed = ChecksumThreads(slots), []
    for step in range(1, 13):
        with checksums.undisturbed():
            name = write(slots, step)
            ended.clear()
            threads.start(name)
            if step % 4 == 0:  # it goes on, so the next copy cannot come too early for it
                assert ended.wait(60)
            threads.stop(name)
        if slots.headers()[name].sums:
            summed.append(step)
    assert summed == [4, 8, 12]
    for step in range(13, 16):
        name = write(slots, step)
        threads.start(name)
        join_threads("memory-sums")
        assert slots.headers()[name].sums


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_a_state_is_copied_lets_the_childs_checksums_be_computed() -> None:
    copying, forked = threading.Event(), threading.Event()

    def copy() -> None:
        with checksums.undisturbed():
            copying.set()
            forked.wait()

    thread = threading.Thread(target=copy)
    thread.start()
    copying.wait()
    child = os.fork()
    if not child:
        os._exit(len(checksums._copying))
    _, status = os.waitpid(child, 0)
    forked.set()
    thread.join()
    assert status == 0


def test_an_exception_out_of_a_signal_leaves_no_checksums_waiting() -> None:
    """At each line up to the one at which the copy begins."""
    code = inspect.unwrap(checksums.undisturbed).__code__
    lines = []

    def tracer_until(left: int) -> Any:
        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code is code and event == "line":
                left -= 1
                if left == 0:
                    lines.append(frame.f_lineno)
                    raise KeyboardInterrupt
            return trace

        return trace

    before = sys.gettrace()
    for left in range(1, 20):
        sys.settrace(tracer_until(left))
        try:
            with checksums.undisturbed():
                sys.settrace(before)
                break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert not checksums._copying
    assert len(lines) > 2


def test_a_header_that_went_meanwhile_does_not_come_back(slots: Slots) -> None:
    threads = ChecksumThreads(slots)
    name = write(slots, 1)
    threads.start(name)
    threads.stop(name)
    slots.drop(lambda _: True)
    threads.start(name)
    join_threads("memory-sums")
    assert slots.headers() == {}


def test_no_thread_and_no_room_mean_no_checksums_and_nothing_else(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def cannot(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    threads = ChecksumThreads(slots)
    name = write(slots, 1)
    with monkeypatch.context() as patch:
        patch.setattr(slots, "put_header", fail)
        threads.start(name)
        join_threads("memory-sums")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot)
        threads.start(name)
    assert not slots.headers()[name].sums


def test_of_equal_copies_one_with_checksums_is_sent() -> None:
    def offer(node: str, *sums: int) -> Offer:
        return Offer(copies=(Copy(Header(5, 1, 0, 2, 100, sums=sums)),), node=node)

    owner = choose_source([offer("a"), offer("b", 7), offer("c", 7)])
    assert owner is not None
    assert owner.rank == 1
