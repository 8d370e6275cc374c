"""Two runs and one checkpoint directory, as real processes: what each may count on. In all orders: `test_ownership`."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import tarfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_agent.agent.configuration.stopping import StopConfig, whole_stop_s
from elastic_agent.worker import Checkpointer, OtherRun
from elastic_agent.worker.steps.drain import Checkpointers
from elastic_agent.worker.storage.disk import ownership
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.wire.environment import WORKER_VARIABLES

PATIENCE_S = 30.0
WAIT_S = 1.0
"""Of a run for another one, where a test wants it to be refused."""


def work(pipe: Connection, run: str, directory: str, wait_s: float, locks: bool, read_only: bool) -> None:
    """A script without an agent that does what it is told, and says what came of it."""
    for name in WORKER_VARIABLES:
        os.environ.pop(name, None)
    os.environ["ELASTIC_AGENT_RUN"] = run
    ownership.LOCK_WAIT_S = wait_s
    if not locks:
        fcntl.flock = no_lock  # type: ignore[assignment]
    state = {"numbers": {"done": torch.zeros(3)}}
    checkpoints = Checkpointer(directory, state, read_only=read_only)
    while True:
        try:
            what, *args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(checkpoints, what)(*args))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def no_lock(*_: object) -> None:
    raise OSError("no locks on this file system")


class Run:
    def __init__(
        self,
        name: str,
        directory: Path,
        *,
        wait_s: float = PATIENCE_S,
        locks: bool = True,
        read_only: bool = False,
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        args = (other, name, str(directory), wait_s, locks, read_only)
        self.process = context.Process(target=work, args=args)
        self.process.start()
        other.close()

    def begin(self, what: str, *args: Any) -> None:
        self._pipe.send((what, *args))

    def hears(self, within_s: float = 0.0) -> bool:
        return self._pipe.poll(within_s)

    def ends(self) -> Any:
        assert self._pipe.poll(PATIENCE_S)
        return self._pipe.recv()

    def does(self, what: str, *args: Any) -> Any:
        self.begin(what, *args)
        return self.ends()

    def close(self, how: int = signal.SIGKILL) -> None:
        self._pipe.close()
        if self.process.is_alive():
            assert self.process.pid is not None
            os.kill(self.process.pid, how)
        self.process.join(PATIENCE_S)


@pytest.fixture
def started() -> Iterator[list[Run]]:
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.close()


def on_disk(directory: Path) -> list[str]:
    """The step and the run of each checkpoint."""
    attempts = [path.name for path in directory.glob("step-*") if path.is_dir()]
    return sorted("-".join(name.split("-")[1:-2]).lstrip("0") for name in attempts)


def everything(directory: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_job_that_is_started_again_goes_on_and_deletes_what_was_before_it_in_time(
    tmp_path: Path, started: list[Run]
) -> None:
    step = 0
    for name in ("first", "second", "third"):
        started.append(run := Run(name, tmp_path))
        assert run.does("load") == step
        for _ in range(3):
            step += 10
            assert run.does("save", step) is True
        assert on_disk(tmp_path) == [f"{step - 10}-{name}", f"{step}-{name}"]
        run.close()
    assert len(list(tmp_path.iterdir())) == 6, "two checkpoints, the owner and the lock"


def test_a_job_that_still_terminates_is_waited_for(tmp_path: Path, started: list[Run]) -> None:
    started += [first := Run("first", tmp_path), second := Run("second", tmp_path)]
    assert first.does("load") == 0
    assert first.does("save", 10) is True
    second.begin("load")
    assert not second.hears(0.5)
    assert first.does("save", 20) is True, "its last one"
    first.close()
    assert second.ends() == 20
    assert second.does("save", 30) is True
    assert on_disk(tmp_path) == ["20-first", "30-second"]


def test_of_two_jobs_that_live_the_second_is_refused_with_the_name_of_the_first(
    tmp_path: Path, started: list[Run]
) -> None:
    started += [first := Run("first", tmp_path), second := Run("second", tmp_path, wait_s=WAIT_S)]
    assert first.does("load") == 0
    assert first.does("save", 10) is True
    before = everything(tmp_path)
    for what in (("load",), ("save", 90)):
        began = time.monotonic()
        text = second.does(*what)
        assert WAIT_S <= time.monotonic() - began < WAIT_S + 10.0
        assert text.startswith(f"OtherRun: {tmp_path} is in use: run first (process {first.process.pid} on ")
        assert everything(tmp_path) == before
    assert first.does("save", 20) is True
    assert on_disk(tmp_path) == ["10-first", "20-first"]


def test_a_run_waits_longer_than_another_may_take_to_end() -> None:
    """The stop of an agent, and what a file server waits for a machine that is gone."""
    nfs_server_s = 90.0
    assert max(whole_stop_s(StopConfig().grace_s), nfs_server_s) < ownership.LOCK_WAIT_S <= 120.0


def test_where_no_lock_works_two_jobs_that_live_never_delete_what_the_other_saves(
    tmp_path: Path, started: list[Run]
) -> None:
    first, second = (Run(name, tmp_path, locks=False) for name in ("first", "second"))
    started += [first, second]
    assert first.does("load") == 0
    assert first.does("save", 10) is True
    assert first.does("save", 20) is True
    assert second.does("load") == 20
    assert first.does("save", 30).startswith(f"OtherRun: {tmp_path} has been taken over by run second")
    assert on_disk(tmp_path) == ["10-first", "20-first"]
    assert second.does("save", 25) is True
    assert second.does("save", 35) is True
    assert on_disk(tmp_path) == ["25-second", "35-second"]
    assert first.does("load").startswith(f"OtherRun: {tmp_path} has been taken over by run second")
    assert on_disk(tmp_path) == ["25-second", "35-second"]


def test_what_a_job_saves_while_another_loads_is_what_that_one_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old pod's last save, where no lock shows that it lives."""
    monkeypatch.setattr(fcntl, "flock", no_lock)
    monkeypatch.setattr(
        Checkpointers, "claim", lambda *_: True
    )  # each stands for that of a process of its own
    first, second = (job(name, tmp_path, monkeypatch) for name in ("first", "second"))
    assert first.load() == 0
    assert first.save(10)
    find, found = CheckpointFiles.find, []

    def find_slowly(files: CheckpointFiles, *args: Any, **named: Any) -> Any:
        found.append(find(files, *args, **named))
        if len(found) == 1:
            assert first.save(20)
        return found[-1]

    monkeypatch.setattr(CheckpointFiles, "find", find_slowly)
    assert second.load() == 20
    assert len(found) == 2
    assert second.save(30)
    with pytest.raises(OtherRun, match="taken over by run second"):
        first.save(40)
    assert on_disk(tmp_path) == ["20-first", "30-second"]


def job(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpointer:
    monkeypatch.setenv("ELASTIC_AGENT_RUN", name)
    return Checkpointer(directory, {"numbers": {"done": torch.zeros(3)}})


def test_what_another_run_has_left_is_neither_deleted_nor_moved_nor_overwritten(
    tmp_path: Path, started: list[Run]
) -> None:
    """A script that never loads comes from nobody."""
    started.append(first := Run("first", tmp_path))
    for step in (10, 20):
        assert first.does("save", step) is True
    first.close()
    theirs = everything(tmp_path)
    started.append(second := Run("second", tmp_path))
    for step in (30, 40, 50):
        assert second.does("save", step) is True
    assert on_disk(tmp_path) == ["10-first", "20-first", "40-second", "50-second"]
    kept = everything(tmp_path)
    assert all(kept[name] == what for name, what in theirs.items() if name.startswith("step-"))


@pytest.mark.parametrize("lives", [True, False])
def test_who_only_reads_changes_nothing_and_waits_for_nobody(
    tmp_path: Path, started: list[Run], lives: bool
) -> None:
    started.append(first := Run("first", tmp_path))
    assert first.does("load") == 0
    assert first.does("save", 10) is True
    if not lives:
        first.close()
        for name in ("owner.json", "owner.lock"):
            (tmp_path / name).unlink()
    before = everything(tmp_path)
    started.append(reader := Run("reader", tmp_path, read_only=True))
    assert reader.does("load") == 10
    assert everything(tmp_path) == before


def test_a_directory_of_the_version_before_is_gone_on_from_and_taken_over(
    tmp_path: Path, started: list[Run]
) -> None:
    """Written by the tree at 55e3c86c, whose `owner.json` has another schema."""
    with tarfile.open(Path(__file__).with_name("checkpoint_of_55e3c86c.tar.xz")) as old:
        old.extractall(tmp_path, filter="data")
    started.append(run := Run("now", tmp_path))
    assert run.does("load") == 20
    for step in (30, 40):
        assert run.does("save", step) is True
    assert on_disk(tmp_path) == ["30-now", "40-now"]
