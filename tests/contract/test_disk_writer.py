"""Saves that a process of the agent brings to disk: the real one, with a commit fence that says what the test wants."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elastic_agent.agent.checkpoints import processes, writer
from elastic_agent.agent.checkpoints.processes import DiskWriter
from elastic_agent.agent.common.events import Event
from elastic_agent.codec import Invalid
from elastic_agent.worker import Checkpointer, Fenced, SaveFailed
from elastic_agent.worker.steps import progress
from elastic_agent.worker.storage.disk import async_save
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.disk.commit import new_attempt
from elastic_agent.worker.storage.disk.parts import Part, write_held
from elastic_agent.worker.wire.channel import receive, send
from elastic_agent.worker.wire.environment import WORKER_VARIABLES, Run
from elastic_agent.worker.wire.messages import (
    FROM_WORKERS,
    MAX_BYTES,
    REPORTS,
    CancelWrite,
    CommitAnswer,
    CommitGranted,
    CommitOrder,
    CommitRefused,
    CommitUndecided,
    SaveReport,
    ShardOrder,
    encode,
)
from tests.io_threads import started_io
from tests.stopping import stop

PATIENCE_S = 20.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)
    return found


class Gate(threading.Thread):
    """Answers who asks whether a generation may commit; first waits for `open`."""

    def __init__(self, path: Path) -> None:
        super().__init__(name="gate", daemon=True)
        self.answer: CommitAnswer = CommitGranted(60.0)
        self.open = threading.Event()
        self.open.set()
        self.asked = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError, Invalid):  # who asked was killed
                receive(connection, FROM_WORKERS, 5.0)
                self.asked += 1
                self.open.wait()
                send(connection, self.answer, 5.0)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Agent:
    """The agent's side: its disk writer, whose process this thread starts, as the main loop would."""

    def __init__(self, folder: Path) -> None:
        self.gate = Gate(folder / "commits")
        self.gate.start()
        self._reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._reports.bind(str(folder / "reports"))
        self._reports.settimeout(PATIENCE_S)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.writer = DiskWriter(
            folder / "writes",
            str(folder / "commits"),
            str(folder / "reports"),
            dict(os.environ),
            started_io(),
            self._events.put,
        )
        self.writer.start()

    def turn(self, expected: Event | None = None) -> None:
        """The next call, which is `wanted` if no other is expected."""
        event = self._events.get(timeout=PATIENCE_S)
        assert event == (expected or self.writer.wanted)
        assert callable(event)
        event()

    def heard(self) -> SaveReport:
        while True:
            report = REPORTS.decode(self._reports.recv(MAX_BYTES + 1))
            if isinstance(report, SaveReport) and report.tier == "local":
                return report

    def close(self) -> None:
        self.gate.open.set()
        self.writer.close()
        self.gate.close()
        self._reports.close()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    for name in WORKER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(processes, "PAUSE_S", 0.0)
    monkeypatch.setattr(progress, "_reporter", None)
    monkeypatch.setattr(async_save.atexit, "register", lambda *_: None)
    # Each Checkpointer stands for that of a process of its own.
    monkeypatch.setattr("elastic_agent.worker.steps.drain.Checkpointers.claim", lambda *_: None)
    agent = Agent(tmp_path)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "ELASTIC_AGENT_MEMORY": str(tmp_path / "memory"),
        "ELASTIC_AGENT_MEMORY_BYTES": str(1 << 30),
        "ELASTIC_AGENT_WRITES": str(tmp_path / "writes"),
        "ELASTIC_AGENT_SOCKET": str(tmp_path / "commits"),
        "ELASTIC_AGENT_REPORTS": str(tmp_path / "reports"),
        "ELASTIC_AGENT_NODE": "a",
        "ELASTIC_AGENT_LOCAL_RANK": "0",
        "ELASTIC_AGENT_GENERATION": "7",
        "ELASTIC_AGENT_RUN": "run-a",
    }.items():
        monkeypatch.setenv(name, value)
    yield agent
    agent.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def on_disk(directory: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in directory.glob("step-*.json"))


def attempts_in(directory: Path) -> list[str]:
    """The directories with data."""
    return [path.name for path in directory.iterdir() if path.is_dir()]


def table_on_disk(directory: Path) -> torch.Tensor:
    meta: dict[str, Any] = {}
    Checkpointer(directory, {"meta": meta}, read_only=True).load()
    table: torch.Tensor = meta["table"]
    return table


def test_a_save_returns_before_the_disk_is_done_and_is_durable_in_the_end(
    agent: Agent, directory: Path
) -> None:
    agent.gate.open.clear()
    checkpoints = Checkpointer(directory, {"meta": {"table": torch.arange(1000)}})
    assert checkpoints.save(10)
    agent.turn()
    wait_for(lambda: agent.gate.asked, "the writer to ask whether it may commit")
    assert on_disk(directory) == []
    agent.gate.open.set()
    assert checkpoints.wait()
    assert on_disk(directory) == [10]
    report = agent.heard()
    manifest = CheckpointFiles(directory, keep=2, run=Run("reader")).newest_manifest()
    assert manifest is not None
    assert (report.generation, report.step, report.result) == (7, 10, "ok")
    assert report.bytes == manifest.size
    assert torch.equal(table_on_disk(directory), torch.arange(1000))


def test_training_copies_on_while_a_save_is_written_and_the_slot_is_left_alone(
    agent: Agent, directory: Path
) -> None:
    agent.gate.open.clear()
    meta = {"table": torch.zeros(1000)}
    checkpoints = Checkpointer(directory, {"meta": meta})
    checkpoints.save(10)
    agent.turn()
    for step in range(11, 20):
        meta["table"] += 1
        assert checkpoints.save_to_memory(step)
    agent.gate.open.set()
    assert checkpoints.wait()
    assert not table_on_disk(directory).any()
    assert Checkpointer(directory, {"meta": meta}).load() == 19


def test_the_writer_of_a_sharded_state_is_there_before_its_first_save(
    agent: Agent, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a writer starts, what was ordered holds one of two slots, the other one has the version that must stay:
    for as long there are no copies, however short a step is."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(torch.nn.Linear(2, 2), mesh=DeviceMesh("cpu", [0]))
        with Checkpointer(directory, {"model": model}) as checkpoints:
            agent.turn()
            (pid,) = agent.writer.pids
            saver = checkpoints._state._disk
            saver._look_for_writer()  # it is awake, before anything was ordered
            assert checkpoints.load() == 0
            assert checkpoints.save_to_memory(9)
            assert checkpoints.save(10)
            assert checkpoints.save_to_memory(11)
            wait_for(lambda: checkpoints.save_to_memory(12), "a slot that no writer reads")
            assert checkpoints.wait()
        assert (on_disk(directory), agent.writer.pids) == ([10], (pid,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("who", ["the writer", "this process"])
def test_what_the_script_drops_is_written_before_and_takes_no_room(
    agent: Agent, directory: Path, who: str
) -> None:
    checkpoints = Checkpointer(directory, {"meta": {}})
    checkpoints.save(10)
    if who == "the writer":
        agent.turn()
    else:
        agent.writer.close()
    memory = checkpoints._state._memory
    assert memory is not None
    del checkpoints
    assert on_disk(directory) == [10]
    assert all(memory._slots.is_free(name) for name in memory._slots.headers())


def test_a_step_that_the_disk_has_refused_meanwhile_may_be_saved_again(agent: Agent, directory: Path) -> None:
    agent.gate.answer = CommitUndecided("the store is away")
    checkpoints = Checkpointer(directory, {"meta": {}})
    assert checkpoints.save(10)
    agent.turn()
    assert not checkpoints.wait()
    agent.gate.answer = CommitGranted(60.0)
    assert checkpoints.save(10)
    assert checkpoints.save(10)
    assert on_disk(directory) == [10]


def test_the_next_save_waits_for_the_one_before(agent: Agent, directory: Path) -> None:
    checkpoints = Checkpointer(directory, {"meta": {}})
    assert checkpoints.save(1)
    agent.turn()
    for step in range(2, 6):
        assert checkpoints.save(step)
        assert on_disk(directory)[-1] >= step - 1  # the disk may already have this one, too
    assert checkpoints.wait()
    assert on_disk(directory) == [4, 5], "two are kept"


def test_what_a_dead_rank_0_has_ordered_is_written_all_the_same(agent: Agent, directory: Path) -> None:
    pid = os.fork()
    if pid == 0:
        checkpoints = Checkpointer(directory, {"meta": {}})
        checkpoints.save(10)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert on_disk(directory) == []
    agent.turn()
    assert agent.heard().result == "ok"
    assert on_disk(directory) == [10]


def test_the_end_of_the_agent_waits_for_what_was_ordered(agent: Agent, directory: Path) -> None:
    pid = os.fork()
    if pid == 0:
        checkpoints = Checkpointer(directory, {"meta": {}})
        checkpoints.save(10)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert agent.writer.finish(PATIENCE_S) == ""
    assert on_disk(directory) == [10]
    assert agent.writer.pids == ()


def test_the_end_of_the_agent_does_not_wait_for_ever(
    agent: Agent, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent.gate.open.clear()
    checkpoints = Checkpointer(directory, {"meta": {}})
    checkpoints.save(10)
    agent.turn()
    wait_for(lambda: agent.gate.asked, "the writer to ask")
    agent.writer.finish(3.0)
    assert f"step 10 is not known to be on disk in {directory}: it was not written within 3 s" in errors(
        caplog
    )


def ordered_and_left(directory: Path, step: int = 10) -> None:
    """A rank 0 orders the last save, and is gone before anything becomes of it."""
    pid = os.fork()
    if pid == 0:
        checkpoints = Checkpointer(directory, {"meta": {}})
        checkpoints._state.floor = -1
        checkpoints.save(step)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("begun", [False, True], ids=["not begun", "failed before the end"])
def test_a_last_save_that_fails_is_tried_again_and_logged_with_step_directory_and_reason(
    agent: Agent, directory: Path, caplog: pytest.LogCaptureFixture, begun: bool
) -> None:
    directory.write_text("no directory")
    ordered_and_left(directory)
    if begun:
        agent.turn()
        assert agent.heard().result == "error"
    assert agent.writer.finish(1.0 if begun else 5.0) in errors(caplog)
    (error,) = (one for one in errors(caplog) if one.startswith(f"step 10 is NOT on disk in {directory}: "))
    assert "Not a directory" in error
    assert f"step 10 is not on disk in {directory} yet" in caplog.text
    assert agent.writer.pids == ()


def test_a_disk_that_takes_the_last_save_in_time_loses_nothing(
    agent: Agent, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.write_text("no directory")
    ordered_and_left(directory)
    ends = threading.Thread(target=agent.writer.finish, args=(PATIENCE_S,))
    ends.start()
    wait_for(lambda: "tried again" in caplog.text, "the writer to try again")
    directory.unlink()
    ends.join(PATIENCE_S)
    assert on_disk(directory) == [10]
    assert errors(caplog) == []
    assert [agent.heard().result, agent.heard().result] == ["error", "ok"]


def test_a_last_save_that_another_run_has_made_impossible_is_logged_at_once(
    agent: Agent, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = CheckpointFiles(directory, keep=2, run=Run("another"))
    ordered_and_left(directory)
    (directory / "owner.lock").unlink()
    other.claim.take(0)
    started = time.monotonic()
    agent.writer.finish(PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S / 2
    (error,) = (one for one in errors(caplog) if one.startswith(f"step 10 is NOT on disk in {directory}: "))
    assert "another" in error


def test_a_last_save_that_is_not_needed_any_more_is_no_error(
    agent: Agent, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another generation goes on."""
    agent.gate.answer = CommitRefused("generation 8 has replaced it")
    ordered_and_left(directory)
    agent.turn()
    assert agent.heard().result == "error"
    agent.writer.finish(PATIENCE_S)
    assert errors(caplog) == []
    assert on_disk(directory) == []


def test_a_last_save_that_rank_0_has_written_itself_is_no_error(
    agent: Agent, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory.write_text("no directory")
    ordered_and_left(directory)
    agent.turn()
    assert agent.heard().result == "error"
    directory.unlink()
    monkeypatch.delenv("ELASTIC_AGENT_WRITES")
    checkpoints = Checkpointer(directory, {"meta": {}})
    checkpoints._state._disk._writer = ""
    assert checkpoints.save(10)
    written = attempts_in(directory)
    agent.writer.finish(PATIENCE_S)
    assert errors(caplog) == []
    assert attempts_in(directory) == written, "written once"


def test_an_earlier_save_that_failed_does_not_count_where_a_later_one_is_on_disk(
    agent: Agent, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.write_text("no directory")
    ordered_and_left(directory, 10)
    agent.turn()
    assert agent.heard().result == "error"
    directory.unlink()
    ordered_and_left(directory, 20)
    assert agent.heard().result == "ok"
    agent.writer.finish(PATIENCE_S)
    assert errors(caplog) == []
    assert on_disk(directory) == [20]


def test_a_save_of_the_past_is_refused_and_reported_at_the_next(agent: Agent, directory: Path) -> None:
    agent.gate.answer = CommitRefused("generation 8 has replaced it")
    checkpoints = Checkpointer(directory, {"meta": {}})
    assert checkpoints.save(10)
    agent.turn()
    with pytest.raises(Fenced, match="generation 7 is over"):
        checkpoints.save(20)
    assert on_disk(directory) == []


def test_an_unconfirmed_save_ends_nothing_however_often(agent: Agent, directory: Path) -> None:
    agent.gate.answer = CommitUndecided("the store is away")
    checkpoints = Checkpointer(directory, {"meta": {}}, max_failed_saves=1)
    assert checkpoints.save(1)
    agent.turn()
    assert checkpoints.save(2)
    assert not checkpoints.wait()
    agent.gate.answer = CommitGranted(60.0)
    assert checkpoints.save(3)
    assert checkpoints.wait()
    assert on_disk(directory) == [3]


def test_a_disk_that_refuses_ends_training_at_the_limit_only(agent: Agent, directory: Path) -> None:
    directory.write_text("no directory")
    checkpoints = Checkpointer(directory, {"meta": {}}, max_failed_saves=3)
    checkpoints._state.floor = -1
    assert checkpoints.save(1)
    agent.turn()
    assert checkpoints.save(2)
    assert checkpoints.save(3)
    with pytest.raises(SaveFailed, match="step 3 not saved"):
        checkpoints.save(4)
    assert [agent.heard().result for _ in range(3)] == ["error"] * 3


def test_a_disk_that_fills_up_in_the_middle_of_a_file_ends_neither_writer_nor_training(
    agent: Agent, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent.gate.open.clear()
    checkpoints = Checkpointer(directory, {"meta": {"table": torch.zeros(10_000)}})
    assert checkpoints.save(10)
    agent.turn()
    wait_for(lambda: agent.gate.asked, "the writer to ask")
    (pid,) = agent.writer.pids
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    agent.gate.open.set()
    assert agent.heard().result == "error"
    assert not checkpoints.wait()
    assert on_disk(directory) == []
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert checkpoints.save(20)
    assert checkpoints.wait()
    assert "itself" not in caplog.text
    assert on_disk(directory) == [20]


def test_a_writer_that_dies_makes_rank_0_write_and_the_next_is_written_behind_again(
    agent: Agent, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent.gate.open.clear()
    checkpoints = Checkpointer(directory, {"meta": {}})
    checkpoints.save(10)
    agent.turn()
    wait_for(lambda: agent.gate.asked, "the writer to ask")
    os.kill(agent.writer.pids[0], signal.SIGKILL)
    agent.turn(agent.writer.ended)
    agent.gate.open.set()
    assert checkpoints.save_to_memory(11)
    wait_for(lambda: on_disk(directory) == [10], "this process to write it, while training goes on")
    assert "this process writes its checkpoint itself: step=10" in caplog.text
    caplog.clear()
    assert checkpoints.save(20)
    agent.turn()
    assert checkpoints.wait()
    assert on_disk(directory) == [10, 20]
    assert "itself" not in caplog.text


def test_a_writer_that_is_only_slow_is_waited_for(
    agent: Agent, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(async_save, "ASKING_S", 1.5)
    agent.gate.open.clear()
    checkpoints = Checkpointer(directory, {"meta": {}})
    checkpoints.save(10)
    agent.turn()
    wait_for(lambda: agent.gate.asked, "the writer to ask")
    threading.Timer(2.0, agent.gate.open.set).start()
    assert checkpoints.wait()
    assert "itself" not in caplog.text


def test_a_writer_that_stands_still_is_not_waited_for_and_changes_nothing_when_it_wakes(
    agent: Agent, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent.gate.open.clear()
    monkeypatch.setattr(async_save, "LEAST_S", 3600.0)
    checkpoints = Checkpointer(directory, {"meta": {}})
    checkpoints.save(10)
    agent.turn()
    wait_for(lambda: agent.gate.asked, "the writer to ask")
    (pid,) = agent.writer.pids
    stop(pid)
    agent.gate.open.set()
    monkeypatch.setattr(async_save, "ASKING_S", 0.2)
    assert checkpoints.wait()
    assert "itself: step=10" in caplog.text
    monkeypatch.delenv("ELASTIC_AGENT_WRITES")
    further = Checkpointer(directory, {"meta": {}})
    further._state._disk._writer = ""
    assert further.load() == 10
    for step in (20, 30):
        assert further.save(step)
    os.kill(pid, signal.SIGCONT)
    assert agent.writer.finish(PATIENCE_S) == ""
    reports = [agent.heard() for _ in range(3)]
    assert [(one.step, one.result) for one in reports] == [(10, "ok"), (20, "ok"), (30, "ok")]
    assert on_disk(directory) == [20, 30]


def test_what_rank_0_has_taken_back_is_not_published(
    agent: Agent, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a writer that stood still where nothing else stops it: the data in place, the manifest to come."""
    checkpoints = Checkpointer(directory, {"meta": {}})
    checkpoints.save_to_memory(10)
    memory = checkpoints._state._memory
    assert memory is not None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        attempt = new_attempt(checkpoints._files, 10, 7)
        with memory.hold((7, 10)) as copy:
            write_held(checkpoints._files, Part(attempt, 7), memory._slots, copy, lambda: None)
        order = CommitOrder(str(directory), 10, 7, "run-a", attempt, 1, 1, 2, (), 5.0)
        task = writer._Task(order, b"what torch pickles", theirs, None)
        publish = writer.CheckpointFiles.publish

        def too_late(*args: Any) -> None:
            send(ours, CancelWrite(), 5.0)
            publish(*args)

        monkeypatch.setattr(writer.CheckpointFiles, "publish", too_late)
        outcome = writer._Writer(os.environ["ELASTIC_AGENT_SOCKET"], "")._carry_out(task)
    assert outcome.error == "SaveFailed"
    assert "no longer waits" in outcome.reason
    assert on_disk(directory) == []


def test_without_a_writer_rank_0_writes_while_training_goes_on(
    agent: Agent, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_AGENT_WRITES", str(directory))
    checkpoints = Checkpointer(directory, {"meta": {}})
    assert checkpoints.save(10)
    assert checkpoints.wait()
    assert on_disk(directory) == [10]


def test_what_was_loaded_from_memory_is_brought_to_disk(
    agent: Agent, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation that saved it ended in the middle: only the present one may commit."""
    agent.gate.answer = CommitRefused("generation 8 has replaced it")
    Checkpointer(directory, {"meta": {}}).save(10)
    agent.turn()
    assert agent.heard().result == "error"
    agent.gate.answer = CommitGranted(60.0)
    monkeypatch.setenv("ELASTIC_AGENT_GENERATION", "8")
    checkpoints = Checkpointer(directory, {"meta": {}})
    assert checkpoints.load() == 10
    assert checkpoints.wait()
    assert on_disk(directory) == [10]
    while (report := agent.heard()).generation == 7:  # what the writer has tried, and what that process has
        assert report.result == "error"
    assert (report.generation, report.step, report.result) == (8, 10, "ok")


def test_a_memory_that_goes_before_the_writer_looks_costs_no_save(
    agent: Agent, directory: Path, tmp_path: Path
) -> None:
    checkpoints = Checkpointer(directory, {"meta": {"is": 10}})
    assert checkpoints.save(10)
    shutil.rmtree(tmp_path / "memory")
    agent.turn()
    assert checkpoints.wait()
    assert on_disk(directory) == [10]
    assert checkpoints.save(11), "at once"
    assert on_disk(directory) == [10, 11]


def test_a_slot_that_was_written_knows_its_checksums(agent: Agent, directory: Path) -> None:
    checkpoints = Checkpointer(directory, {"meta": {"table": torch.zeros(100_000)}})
    checkpoints.save(10)
    agent.turn()
    checkpoints.wait()
    assert checkpoints._state._memory is not None
    (header,) = checkpoints._state._memory._slots.headers().values()
    assert header.sums


def test_a_drain_does_not_wait_for_the_disk(agent: Agent, directory: Path) -> None:
    agent.gate.open.clear()
    checkpoints = Checkpointer(directory, {"meta": {}})
    checkpoints.save(10)
    agent.turn()
    checkpoints._state.save_last_step(11, leaves=False)
    checkpoints._state.order_write(11)
    checkpoints._state._disk.end()
    assert on_disk(directory) == []
    agent.gate.open.set()
    assert [(agent.heard().step, agent.heard().step)] == [(10, 11)]
    assert on_disk(directory) == [10, 11]


def test_unsaved_steps_of_many_directories_are_all_logged(
    agent: Agent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their list is longer than any other message. The copies are nowhere, so that no try can succeed."""
    directories = [str(tmp_path / f"{number}-{'x' * 200}" / "disk") for number in range(40)]
    for directory in directories:
        order = ShardOrder(
            str(tmp_path / "memory"), directory, "3b9e0c51d7aa91c2", "a", 10, 7, 7, "run-a", "x", 0, None
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(agent.writer.path))
            client.sendall(encode(order))
    agent.turn()
    agent.writer.finish(PATIENCE_S)
    said = errors(caplog)
    assert len(said) == len(directories)
    for directory, error in zip(directories, said, strict=True):
        assert error.startswith(f"rank 0's part of step 10 is NOT on disk in {directory}: ")


def test_nonsense_on_the_socket_disturbs_no_other(agent: Agent, directory: Path) -> None:
    for line in (b"", b"x\n", b"{}\n", b'{"v": 1, "memory": 1}\n', b"[" * 5000 + b"\n", b"y" * 9000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(agent.writer.path))
            client.sendall(line)
    agent.turn()
    checkpoints = Checkpointer(directory, {"meta": {}})
    checkpoints.save(10)
    assert checkpoints.wait()


def test_the_writer_needs_no_torch_and_starts_in_no_time(agent: Agent, directory: Path) -> None:
    checkpoints = Checkpointer(directory, {"meta": {}})
    checkpoints.save(10)
    agent.turn()
    checkpoints.wait()
    (pid,) = agent.writer.pids
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
