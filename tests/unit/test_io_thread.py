"""The thread that waits for descriptors and pauses: it calls what belongs to each, and nothing that was forgotten."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Iterator

import pytest

from elastic_agent import threads
from elastic_agent.agent.common.events import IoThread

PATIENCE_S = 20.0


class Scene:
    def __init__(self) -> None:
        self.io = IoThread()
        self.called: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read(self, descriptor: int, name: str) -> None:
        os.read(descriptor, 1)
        self.called.put(name)

    def next(self) -> str:
        return self.called.get(timeout=PATIENCE_S)

    def settle(self) -> None:
        """All that was ready has been called."""
        self.io.post(lambda: self.io.post(lambda: self.called.put("settled")))
        assert self.next() == "settled"


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.io.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_function_is_called_as_long_as_there_is_something_to_read(
    scene: Scene, pipe: tuple[int, int]
) -> None:
    ours, theirs = pipe
    scene.io.start()
    scene.io.watch(ours, lambda: scene.read(ours, "old"))
    scene.io.watch(ours, lambda: scene.read(ours, "new"))
    os.write(theirs, b"12")
    assert [scene.next(), scene.next()] == ["new", "new"]
    scene.io.forget(ours)
    scene.io.forget(ours)
    scene.settle()
    os.write(theirs, b"3")
    scene.settle()


def test_what_one_function_forgets_is_not_called_though_it_was_ready(scene: Scene) -> None:
    """All are ready before the thread begins: whichever is called first forgets the others."""
    pipes = [os.pipe() for _ in range(3)]

    def first(chosen: int) -> None:
        for ours, _ in pipes:
            scene.io.forget(ours)
        scene.read(chosen, "first")

    for ours, theirs in pipes:
        scene.io._watch(ours, lambda ours=ours: first(ours))  # type: ignore[misc]
        os.write(theirs, b"1")
    scene.io.start()
    assert scene.next() == "first"
    scene.settle()
    for ends in pipes:
        for end in ends:
            os.close(end)


def test_a_descriptor_that_is_closed_before_it_is_watched_harms_nothing(
    scene: Scene, pipe: tuple[int, int]
) -> None:
    closed = os.dup(pipe[0])
    scene.io.watch(closed, lambda: scene.called.put("never"))
    os.close(closed)
    scene.io.watch(-1, lambda: scene.called.put("never"))  # of a socket that is closed
    scene.io.start()
    scene.io.forget(closed)
    scene.settle()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EPERM])
def test_a_descriptor_that_cannot_be_watched_fails_the_thread(
    scene: Scene, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """An exit that is never noticed would be waited for without end."""

    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(scene.io._selector, "register", refused)
    threads.listen(lambda name, error: scene.called.put(f"{name} failed: {error}"))
    try:
        scene.io.start()
        scene.io.watch(pipe[0], lambda: None)
        assert scene.next() == f"io failed: [Errno {number}] {os.strerror(number)}"
    finally:
        threads.listen()


def test_a_descriptor_that_another_thread_has_forgotten_is_closed_after_that(scene: Scene) -> None:
    """Closed before, its number could be that of a new descriptor, and a duplicate would wake the thread for ever."""
    ours, theirs = os.pipe()
    duplicate = os.dup(ours)
    watched: list[bool] = []

    def close() -> None:
        watched.append(ours in scene.io._selector.get_map())
        os.close(ours)
        scene.called.put(threading.current_thread().name)

    scene.io.start()
    scene.io.watch(ours, lambda: scene.called.put("called"))
    scene.settle()
    scene.io.forget(ours, close)
    assert scene.next() == "io"
    os.write(theirs, b"1")
    scene.settle()
    assert watched == [False]
    assert scene.called.empty()
    for end in (theirs, duplicate):
        os.close(end)


def test_pauses_end_in_their_order(scene: Scene) -> None:
    scene.io.later(0.02, lambda: scene.called.put("last"))
    for name in ("one", "two"):
        scene.io.later(0.0, lambda name=name: scene.called.put(name))  # type: ignore[misc]
    scene.io.start()
    assert [scene.next() for _ in range(3)] == ["one", "two", "last"]


def test_closed_it_has_done_what_was_posted_before_and_leaves_no_descriptor(scene: Scene) -> None:
    before = os.listdir("/proc/self/fd")
    io = IoThread()
    io.start()
    io.post(lambda: scene.called.put("done"))
    io.close()
    io.post(lambda: scene.called.put("too late"))
    assert scene.next() == "done"
    assert scene.called.empty()
    assert os.listdir("/proc/self/fd") == before
