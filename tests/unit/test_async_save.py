"""Who writes a copy to disk: the agent's writer where it finds the copy, and else this process, which has it open."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.worker.storage.disk import async_save
from elastic_agent.worker.storage.disk.async_save import DiskSaver
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.disk.sharded_save import ShardedSave
from elastic_agent.worker.storage.memory.copy_header import Header
from elastic_agent.worker.storage.memory.slots import Slots
from elastic_agent.worker.wire.environment import Run, WorkerEnv
from elastic_agent.worker.wire.messages import WriteOutcome

PART = ShardedSave(1, "x", 1, 2, 5)
"""That of a rank which does not commit."""
WHOLE = ShardedSave(1, "x", 0, 1, 5, is_whole=True)


class Case:
    """A copy of step 1 in memory, and a writer that answers with `outcome`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, outcome: WriteOutcome) -> None:
        (folder / "memory").mkdir()
        self.slots = Slots(str(folder / "memory"), "/runs/x")
        opened = self.slots.begin(5)
        opened.trim()
        os.pwrite(opened.fd, b"state", 0)
        self.slots.seal(opened, Header(1, 1, 0, 1, 5))
        self.held = self.slots.hold(opened.name)
        self.disk = DiskSaver(
            CheckpointFiles(folder / "disk", keep=1, run=Run("a")), WorkerEnv(generation=1, writes="writer")
        )
        self.asked = 0
        self.wrote_here = 0

        def ask(*_: Any) -> socket.socket:
            self.asked += 1
            return socket.socket(socket.AF_UNIX)

        def write_here(_: Any) -> WriteOutcome:
            self.wrote_here += 1
            return WriteOutcome(1, 5)

        monkeypatch.setattr(self.disk, "_ask", ask)
        monkeypatch.setattr(
            self.disk, "_answer", lambda asked: outcome if asked.connection is not None else None
        )
        monkeypatch.setattr(self.disk, "_do_here", write_here)

    def begin(self, save: ShardedSave = PART) -> None:
        self.disk.promise(save)
        self.disk.begin(self.slots, self.held)

    def lose(self) -> None:
        self.slots.drop(lambda _: True)


REFUSED = WriteOutcome(1, error="SaveFailed", reason="no")


def test_a_copy_that_the_writer_finds_is_written_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, monkeypatch, REFUSED)
    case.begin()
    assert case.disk.finish() == REFUSED
    assert (case.asked, case.wrote_here) == (1, 0)


@pytest.mark.parametrize("lost", ["before", "meanwhile"])
def test_a_copy_that_the_writer_does_not_find_is_written_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    case = Case(tmp_path, monkeypatch, REFUSED)
    if lost == "before":
        case.lose()
    else:
        answer = case.disk._answer
        monkeypatch.setattr(case.disk, "_answer", lambda asked: case.lose() or answer(asked))
    case.begin()
    assert case.disk.finish() == WriteOutcome(1, 5)
    assert (case.asked, case.wrote_here) == (lost == "meanwhile", 1)


@pytest.mark.parametrize("lost", [True, False])
def test_a_writer_is_left_only_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    case = Case(tmp_path, monkeypatch, REFUSED)
    if lost:
        case.lose()
    case.disk.leave_to_writer(PART, case.slots, case.held)
    assert case.asked == (not lost)


def test_a_training_process_may_have_more_than_a_thousand_files_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, monkeypatch, REFUSED)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        case.begin()
        assert case.disk.finish() == REFUSED
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert case.asked == 1


def test_a_save_that_was_promised_and_never_began_is_an_error_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, monkeypatch, REFUSED)
    case.disk.promise(PART)
    outcome = case.disk.finish("the GPU is gone")
    assert outcome == WriteOutcome(1, error="SaveFailed", reason="the GPU is gone")
    assert case.disk.finish() is None
    assert not case.disk.is_durable


def test_a_fork_ends_without_the_write_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, answered = Case(tmp_path, monkeypatch, REFUSED), threading.Event()
    monkeypatch.setattr(case.disk, "_answer", lambda _: answered.wait() and REFUSED)
    case.begin()
    child = os.fork()
    if child == 0:
        case.disk.end()
        os._exit(0)
    ended = select.poll()
    ended.register(os.pidfd_open(child), select.POLLIN)
    if not (in_time := bool(ended.poll(20_000))):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    answered.set()
    assert (in_time, status) == (True, 0)
    assert case.disk.finish() == REFUSED, "the parent waits for it"


def test_an_order_that_cannot_be_made_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, monkeypatch, REFUSED)
    case.disk.files.good = {"no": "step"}  # type: ignore[assignment]
    with pytest.raises(ValueError, match="good"):
        case.begin(WHOLE)
    outcome = case.disk.finish()
    assert outcome is not None
    assert outcome.error == "SaveFailed"


def test_where_no_thread_can_be_started_the_save_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, monkeypatch, WriteOutcome(1, 5))

    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(async_save.threading.Thread, "start", start)
    case.begin()
    assert case.held.stream.closed
    assert case.disk.finish() == WriteOutcome(1, 5)
    assert case.disk.is_durable
